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
from support import indexed_recording, trace_path

from memtrace.cache import index
from memtrace.cache.index import index_path, open_recording
from memtrace.cli import main
from memtrace.errors import SnapshotError
from memtrace.ranks.summary import Rank, summarise
from memtrace.ranks.workers import _interrupts_later
from memtrace.snapshot import container

TINY = str(trace_path("tiny-llama_3-steps"))
LINE = "memtrace: interrupted\n"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked recording alone in its folder, in a world where every recording is large enough for an index."""
    return indexed_recording(tmp_path, monkeypatch)


def beside(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


# -- Ctrl-C


def run_python(script: str, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


BEFORE = """
import memtrace.entry, os, signal
os.kill(os.getpid(), signal.SIGINT)
print("went on")
"""
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
IN_A_CALLBACK = """
import os, signal, sys, time
import memtrace.entry
from memtrace.snapshot import container
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
def interrupted(*args, **more):
    Dying()
    while True:
        time.sleep(0.01)
container._open_raw = interrupted
sys.exit(memtrace.entry.main())
"""
SWALLOWED = """
import os, signal, sys, time
import memtrace.entry, memtrace.cli
def interrupted(*args, **more):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass  # numpy does, where it looks up an attribute
    time.sleep(60)
from memtrace.snapshot import container
container._open_raw = interrupted
sys.exit(memtrace.entry.main())
"""
AS_ANOTHER_ERROR = """
import os, signal, sys
import memtrace.entry, memtrace.cli
def interrupted(*args, **more):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("what extension modules make of it")
memtrace.cli.main = interrupted
sys.exit(memtrace.entry.main())
"""
AFTER = """
import os, signal, sys
import memtrace.entry
code = memtrace.entry.main()
os.kill(os.getpid(), signal.SIGINT)
print("went on")
"""


@pytest.mark.parametrize("script", [BEFORE, WHILE, IN_A_CALLBACK, SWALLOWED, AS_ANOTHER_ERROR], ids=range(5))
def test_an_interrupt_is_one_line(script: str) -> None:
    done = run_python(script, "report", TINY)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_an_interrupt_at_the_very_end() -> None:
    done = run_python(AFTER, "report", TINY, "--json")
    assert (done.returncode, done.stderr) == (130, LINE)
    assert "went on" not in done.stdout


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    script = BEFORE.replace(
        "import memtrace.entry", "import signal; signal.signal(2, signal.SIG_IGN); import memtrace.entry"
    )
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


HALF_WRITTEN = """
import os, signal, sys
import memtrace.entry
from memtrace.cache import index, sealed
index.MIN_EVENTS = 1
def interrupted(out, *args):
    out.write(b"x" * 100_000)
    out.flush()
    os.kill(os.getpid(), signal.SIGINT)
index.write_sealed = interrupted
sys.exit(memtrace.entry.main())
"""


def test_an_interrupt_while_the_index_is_written_leaves_none(snapshot: Path) -> None:
    done = run_python(HALF_WRITTEN, "report", str(snapshot))
    assert (done.returncode, done.stderr) == (130, LINE)
    assert beside(snapshot) == ["s.pickle"]


def test_what_a_killed_process_left_is_removed_later(snapshot: Path) -> None:
    old, new = (snapshot.with_name(f".s.pickle.memtrace-index.{pid}.partial") for pid in (1, 2))
    for each in (old, new):
        each.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert main(["report", str(snapshot)]) == 0
    assert beside(snapshot) == [new.name, "s.pickle", "s.pickle.memtrace-index"]


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
    assert beside(snapshot) == ["s.pickle"]


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
    assert beside(snapshot) == ["s.pickle"]


def test_a_file_that_is_cut_while_it_is_read(snapshot: Path) -> None:
    def cut(share: float) -> None:
        os.truncate(snapshot, 5000)

    with pytest.raises(SnapshotError, match="ends in the middle"):
        open_recording(snapshot, cut)


# -- places


def test_no_home(snapshot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert main(["report", str(snapshot)]) == 0
    assert beside(snapshot) == ["s.pickle"]


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
    assert beside(snapshot) == ["s.pickle"]


@pytest.mark.parametrize("verb", ["report", "info", "explain", "fragmentation", "simulate"])
def test_what_one_verb_wrote_another_reads(
    verb: str, snapshot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(snapshot)]) == 0
    first = capsys.readouterr().out
    assert index_path(snapshot).exists()

    def load(*args: Any) -> Any:
        raise AssertionError("the snapshot itself was read")

    monkeypatch.setattr(index, "load", load)
    assert main([verb, str(snapshot)]) == 0
    assert capsys.readouterr().out == first
    assert main(["info", str(snapshot)]) == 0


def test_ranks_use_it(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = summarise(str(snapshot))
    assert isinstance(first, Rank) and index_path(snapshot).exists()
    monkeypatch.setattr(index, "load", None)
    assert summarise(str(snapshot)) == first
    assert not isinstance(summarise(str(snapshot), use_index=False), Rank)
