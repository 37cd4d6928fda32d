"""Output files: whole or not at all, and never over what is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memtrace.cli import main
from memtrace.errors import UsageError
from memtrace.writing import check_target, whole_file


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    target.chmod(0o600)

    def fail() -> None:
        with whole_file(target) as out:
            out.write(b"half")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert target.read_bytes() == b"old" and [item.name for item in tmp_path.iterdir()] == ["out"]
    with whole_file(target) as out:
        out.write(b"new")
    assert target.read_bytes() == b"new" and target.stat().st_mode & 0o777 == 0o600


def test_a_link_keeps_pointing_at_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with whole_file(tmp_path / "link") as out:
        out.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as out:
        out.write(b"through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)


def test_what_is_read_is_never_a_target(tmp_path: Path) -> None:
    source = tmp_path / "run.pickle"
    source.write_bytes(b"precious")
    (tmp_path / "alias").symlink_to(source)
    for target in (source, tmp_path / "alias"):
        with pytest.raises(UsageError, match="never overwritten"):
            check_target(target, True, str(source))
    with pytest.raises(UsageError, match="--force"):
        check_target(source, False)
    check_target(source, True, None, "-", str(tmp_path / "other"))
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("dangling", "loop"):
        with pytest.raises(UsageError):
            check_target(tmp_path / name, True)


def test_a_prediction_that_does_not_fit_on_the_disk_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run.pickle"
    predict = ["estimate", "--model", "tiny-llama", "--seq-len", "128", "--trace", str(target)]
    assert main(predict) == 0
    before = target.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memtrace.estimate.predicted.pickle.dump", full)
    capsys.readouterr()
    assert main([*predict, "--force"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert target.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_an_input_survives_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.pickle"
    assert main(["estimate", "--model", "tiny-llama", "--seq-len", "128", "--trace", str(run)]) == 0
    before = run.read_bytes()
    again = ["estimate", "--model", "tiny-llama", "--seq-len", "128", "--against", str(run), "--trace", str(run)]
    for command in (
        ["check", str(run), "--write", str(run)],
        again,
        ["export", str(run), "-f", "html", "-o", str(run)],
    ):
        assert main([*command, "--force"]) == 2
        assert "never overwritten" in capsys.readouterr().err
    assert run.read_bytes() == before
