"""Interrupts, endless input, files that change, places where nothing can be written: one line, and nothing left."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import indexed_recording, kept_files, trace_path

from memtrace.cache import index
from memtrace.cache.index import open_recording
from memtrace.cli import main
from memtrace.errors import SnapshotError
from memtrace.ranks.summary import Rank, summarise
from memtrace.ranks.workers import _interrupts_later
from memtrace.snapshot import container

TINY = str(trace_path("tiny-llama_3-steps"))
LINE = "memtrace: interrupted\n"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked recording alone in its folder, in a world where every recording is large enough for the cache."""
    return indexed_recording(tmp_path, monkeypatch)


def beside(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


# -- Ctrl-C


def run_python(script: str, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


WHILE = """
import os, signal, sys
import memtrace.entry
from memtrace.snapshot import container
def interrupted(*args, **more):
    os.kill(os.getpid(), signal.SIGINT)
    raise RuntimeError("went on")
container._open_raw = interrupted
sys.exit(memtrace.entry.main())
"""


def test_an_interrupt_is_one_line() -> None:
    done = run_python(WHILE, "report", TINY)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_process_leaves_no_unfinished_file(ending: int, snapshot: Path, tmp_path: Path) -> None:
    default = f"import signal\nsignal.signal({ending}, signal.SIG_DFL)\n"  # nohup and some CI systems have it ignored
    script = default + HALF_WRITTEN.replace("SIGINT", signal.Signals(ending).name)
    done = run_python(script, "report", str(snapshot))
    assert (done.returncode, done.stdout, done.stderr) == (128 + ending, "", "")
    assert kept_files(snapshot.parent) == []


HALF_WRITTEN = """
import os, signal, sys
import memtrace.entry
from memtrace.cache import index
from memtrace import writing
index.MIN_EVENTS = 1
def interrupted(made, *args):
    made.out.write(b"x" * 100_000)
    made.out.flush()
    os.kill(os.getpid(), signal.SIGINT)
writing.Draft.replace = interrupted
sys.exit(memtrace.entry.main())
"""


def test_an_interrupt_while_it_is_written_leaves_nothing(snapshot: Path) -> None:
    done = run_python(HALF_WRITTEN, "report", str(snapshot))
    assert (done.returncode, done.stderr) == (130, LINE)
    assert beside(snapshot) == ["s.pickle"] and kept_files(snapshot.parent) == []


def test_what_a_killed_process_left_is_removed_later(snapshot: Path) -> None:
    place = snapshot.parent.parent / "cache"
    killed = run_python(HALF_WRITTEN.replace("SIGINT", "SIGKILL"), "report", str(snapshot))
    assert killed.returncode == -signal.SIGKILL and [each.suffix for each in place.iterdir()] == [".tmp"]
    assert main(["report", str(snapshot)]) == 0
    assert [each.suffix for each in place.iterdir()] == [".columns"]


def test_an_interrupt_while_a_worker_starts_comes_when_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), _interrupts_later():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_giving_up_during_the_replay_leaves_nothing(snapshot: Path) -> None:
    class GivenUp(Exception):
        pass

    def give_up(share: float) -> None:
        raise GivenUp

    recording = open_recording(snapshot)
    with pytest.raises(GivenUp):
        recording.analysis(recording.snapshot.devices[0], on_progress=give_up)
    assert beside(snapshot) == ["s.pickle"] and kept_files(snapshot.parent) == []


# -- input


class Endless(io.RawIOBase):
    """A stream that repeats its last byte for ever; ``taken`` counts what was read."""

    def __init__(self, beginning: bytes) -> None:
        self.beginning, self.taken = beginning, 0

    def read(self, size: int = -1) -> bytes:
        assert size > 0, "an endless stream can't be read to its end"
        start = self.taken
        self.taken += size
        return self.beginning[start : start + size].ljust(size, self.beginning[-1:])


@pytest.mark.parametrize(
    ("beginning", "says", "most"),
    [
        (b"\0", "neither a pickle nor JSON", 2 << 20),
        (b"y\n", "neither a pickle nor JSON", 2 << 20),
        (b"\x80\x04\0", "no end after 4 MiB", 6 << 20),
        (b'{"segments": 1', "no end after 4 MiB", 6 << 20),
    ],
)
def test_endless_input(
    beginning: bytes, says: str, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Endless(beginning)
    monkeypatch.setattr(container, "_pipe_limit_bytes", lambda: 4 << 20)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    assert main(["report", "-"]) == 3
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert stream.taken <= most


def test_a_pipe_under_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = Path(TINY).read_bytes()
    threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True).start()
    assert main(["report", str(pipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reserved_bytes"] > 0


def test_the_free_memory_is_the_bound() -> None:
    assert 1 << 20 < container._pipe_limit_bytes() <= 16 << 30


# -- files that change


def test_a_file_that_grows_while_it_is_read_gets_no_index(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = index.load

    def load(*args: Any) -> Any:
        found = real(*args)
        with snapshot.open("ab") as out:
            out.write(b"more")
        return found

    monkeypatch.setattr(index, "load", load)
    assert main(["report", str(snapshot)]) == 0
    assert beside(snapshot) == ["s.pickle"] and kept_files(snapshot.parent) == []


def test_a_file_that_is_cut_while_it_is_read(snapshot: Path) -> None:
    def cut(share: float) -> None:
        os.truncate(snapshot, 5000)

    with pytest.raises(SnapshotError, match="ends in the middle"):
        open_recording(snapshot, cut)


# -- places


def test_no_home(snapshot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MEMTRACE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert main(["report", str(snapshot)]) == 0
    assert beside(snapshot) == ["s.pickle"] and kept_files(snapshot.parent) == []


def test_no_folder_for_temporary_files(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(snapshot / "nowhere"))
    for verb in ("report", "explain", "info"):
        assert main([verb, str(snapshot)]) == 0


# -- the index in every verb that reads


@pytest.mark.parametrize(
    "verb", [["report"], ["info"], ["explain"], ["ranks", "-j", "1"], ["allocations"], ["timeline"], ["fragmentation"]]
)
def test_no_index(
    verb: list[str], snapshot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, str(snapshot), "--no-index"]) == 0
    assert beside(snapshot) == ["s.pickle"] and kept_files(snapshot.parent) == []


@pytest.mark.parametrize("verb", ["report", "info", "explain", "fragmentation", "simulate"])
def test_what_one_verb_wrote_another_reads(
    verb: str, snapshot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(snapshot)]) == 0
    first = capsys.readouterr().out
    assert kept_files(snapshot.parent)

    def load(*args: Any) -> Any:
        raise AssertionError("the snapshot itself was read")

    monkeypatch.setattr(index, "load", load)
    assert main([verb, str(snapshot)]) == 0
    assert capsys.readouterr().out == first
    assert main(["info", str(snapshot)]) == 0


def test_ranks_use_it(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = summarise(str(snapshot))
    assert isinstance(first, Rank) and kept_files(snapshot.parent)
    monkeypatch.setattr(index, "load", None)
    assert summarise(str(snapshot)) == first
    assert not isinstance(summarise(str(snapshot), use_index=False), Rank)
