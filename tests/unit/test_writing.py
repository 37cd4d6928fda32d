"""Output files: whole or not at all, and never over what is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from memtrace_tui.settings import Settings
from support import trace_path

from memtrace import writing
from memtrace.cache.folder import kept_file
from memtrace.cli import main
from memtrace.errors import UsageError
from memtrace.writing import check_place, check_target, draft, whole_file


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


def test_names_that_were_planted_are_not_written_to(tmp_path: Path) -> None:
    """A stranger who can write to the folder guesses the name and puts a link to a file of the user's there."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"precious")
    names = []
    for number in range(2):
        with draft(tmp_path) as made:
            names.append(made.path.name)
            with pytest.raises(FileExistsError):
                os.open(made.path, writing._NEW)
        (tmp_path / names[0]).unlink(missing_ok=True)
        (tmp_path / names[0]).symlink_to(mine)
        with whole_file(tmp_path / f"out{number}") as out:
            out.write(b"x")
    assert len(set(names)) == 2 and mine.read_bytes() == b"precious"
    assert writing._NEW & os.O_EXCL and writing._NEW & os.O_NOFOLLOW


def test_every_writer_opens_files_that_did_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report, export, scrub, check, timeline and the browser's settings: no file is opened for writing but a new one,
    and none under a name that the next run would use again."""
    opened: list[tuple[str, int]] = []
    real = os.open

    def watched(path: object, flags: int, *more: object, **named: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(tmp_path)):
            opened.append((str(path), flags))
        return real(path, flags, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    snapshot = str(trace_path("tiny-llama_3-steps"))
    for number in range(2):
        Settings().save()
        for command in (
            ["export", snapshot, "-f", "html", "-o", str(tmp_path / "a.html")],
            ["scrub", snapshot, "-o", str(tmp_path / "b.pickle")],
            ["check", snapshot, "--write", str(tmp_path / "c.json")],
            ["timeline", snapshot, "--plot", str(tmp_path / "d.svg")],
            ["simulate", snapshot, "--export", str(tmp_path / "e.pickle")],
            ["estimate", "--model", "tiny-llama", "--seq-len", "64", "--trace", str(tmp_path / "f.pickle")],
        ):
            assert main([*command, "--force"][: None if number else -1]) == 0, command
    assert len({path for path, _ in opened}) == len(opened) >= 14
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW for _, flags in opened)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604, 0o644, 0o400])
@pytest.mark.parametrize("there", [None, 0o644, 0o600])
def test_nothing_is_wider_than_what_it_is_made_from(tmp_path: Path, mode: int, there: int | None) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.touch(mode)
    source.chmod(mode)
    if there is not None:
        target.touch()
        target.chmod(there)
    old = os.umask(0o022)
    try:
        with whole_file(target, None, "-", str(source)) as out:
            out.write(b"x")
    finally:
        os.umask(old)
    assert target.stat().st_mode & 0o777 == (0o644 if there is None else there) & (mode | 0o600)


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("is_file", [False, True])
def test_standard_output_by_its_name(tmp_path: Path, target: str, is_file: bool) -> None:
    command = [sys.executable, "-m", "memtrace", "export", str(trace_path("tiny-llama_3-steps"))]
    command += ["-f", "speedscope", "-o"]
    if is_file:
        with (tmp_path / "out").open("wb") as out:
            assert subprocess.run([*command, target], stdout=out).returncode == 0
        made = (tmp_path / "out").read_bytes()
    else:
        made = subprocess.run([*command, target], stdout=subprocess.PIPE).stdout
    assert subprocess.run([*command, str(tmp_path / "file")]).returncode == 0
    assert made == (tmp_path / "file").read_bytes()


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


def test_what_is_executed_lies_where_nobody_else_can_put_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the folder itself nor any above it: a helper is loaded, and a script run, by path."""
    own = tmp_path / "shared" / "mine"
    own.mkdir(parents=True, mode=0o700)
    own.chmod(0o700)
    monkeypatch.setenv("MEMTRACE_CACHE", str(own))
    link = tmp_path / "link"
    link.symlink_to(own)
    assert check_place(link) == own.resolve()
    made = kept_file("helper.so", lambda file: None)
    assert made.parent == own.resolve()
    own.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="shared: others could"):
        check_place(own)
    with pytest.raises(UsageError, match="others could put something else in its place"):
        kept_file("helper.so", lambda file: None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own.parent))
    assert main(["attach", str(os.getpid())]) == 4
    own.parent.chmod(0o1777)  # like /tmp
    assert check_place(own) == own.resolve()
    own.parent.chmod(0o700)
    real = own.parent.stat()
    theirs = os.stat_result((*real[:4], 4242, *real[5:]))
    stat_of = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: theirs if path == own.parent else stat_of(path, **how))
    with pytest.raises(PermissionError):
        check_place(own)
