"""``browse`` before the screen changes: what can't be a snapshot is one line on stderr, as in every other command."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

import pytest
from browser_cases import TINY
from support import trace_path

from memtrace.cli import main
from memtrace.cli.browse import _look_at


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("missing.pickle",), "missing.pickle: no such file"),
        (("runs/missing",), "runs/missing: no such file"),
        (("browse", "missing.pickle"), "missing.pickle: no such file"),
        (("browse", "missing"), "missing: no such file"),
        (("browse", str(trace_path(TINY)), "missing.pickle"), "missing.pickle: no such file"),
        (("browse", "folder"), "folder: a folder, not a snapshot file"),
        (("folder",), "folder: a folder, not a snapshot file"),
        (("browse", "empty.pickle"), "empty.pickle: the file is empty"),
        (("empty.pickle",), "empty.pickle: the file is empty"),
        (("browse", "page.pickle"), "page.pickle: an HTML page"),
        (("browse", "x" * 5000), "xxx"),
        (("x" * 5000 + ".pickle",), "xxx"),
    ],
)
def test_a_file_that_is_none_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty.pickle").touch()
    Path("page.pickle").write_text("<!doctype html>")
    assert main(args) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"memtrace: {said}") and err.count("\n") == 1


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "locked.pickle"
    path.write_bytes(b"\x80\x02.")
    path.chmod(0)
    assert main(["browse", str(path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_a_word_that_is_no_file_is_still_taken_for_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reprot"]) == 2
    assert "did you mean report" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_the_look_takes_nothing_out_of_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"content"))
    writer.start()
    _look_at(argparse.Namespace(file=str(pipe), other=None))
    _look_at(argparse.Namespace(file="-", other=None))
    read.append(pipe.read_bytes())
    writer.join(10)
    assert read == [b"content"]
