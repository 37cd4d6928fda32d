"""``browse`` before the screen changes: what can't be a snapshot is one line on stderr, as in every other command."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

import pytest
from browser_cases import TINY, main_screen, settle, text_of, until
from memtrace_tui.app import BrowseApp
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.provider import BrowsedRecording, Provider
from support import trace_path

from memtrace.cli import main
from memtrace.cli.browse import _look_at
from memtrace.units import format_bytes, format_count


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


@pytest.mark.parametrize("name", [TINY, "llama2-7b_oom-first-step"])
async def test_what_the_file_says_shows_before_anything_is_worked_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are those that the report of its last event has once it is there."""
    may_go_on, real = threading.Event(), BrowsedRecording.provider

    def waiting(self: BrowsedRecording, *args: object, **kwargs: object) -> Provider:
        assert may_go_on.wait(60)
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(BrowsedRecording, "provider", waiting)
    app = BrowseApp(str(trace_path(name)), few_colours=False, remember=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: "events; the file ends with" in text_of(pilot))
        early = text_of(pilot)
        may_go_on.set()
        await until(lambda: isinstance(app.screen, MainScreen))
        await settle(pilot)
        provider = main_screen(pilot).session.provider
        report = provider.report(provider.count - 1)
        sizes = format_bytes(report.reserved_bytes), format_bytes(report.allocated_bytes)
        refused = [f"{format_bytes(int(provider.timeline.trace.size[event]))} refused" for event in provider.ooms]
        for words in (f"{format_count(provider.count)} events", *sizes, *refused):
            assert words in early
        assert ("OUT OF MEMORY" in early) == bool(refused)
