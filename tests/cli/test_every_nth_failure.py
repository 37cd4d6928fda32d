"""Every n-th write, flush, fsync, rename, link and allocation fails in turn: a whole file, the one before, or none."""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strategies import modern

from memtrace import writing
from memtrace.cache import folder, index
from memtrace.cli import main
from memtrace.errors import UsageError
from memtrace.estimate.ladder import Rung
from memtrace.estimate.predicted import write_document
from memtrace.export.waterfall import write_waterfall
from memtrace.live.metrics import open_sink
from memtrace.record import files

OLD = b"what was there before"


class Trouble:
    """Lets ``before`` operations through and then fails one; counts them all."""

    def __init__(self, before: int, error: BaseException, patch: pytest.MonkeyPatch) -> None:
        self.left, self.error, self.failed = before, error, False
        for holder, name in ((os, "fsync"), (os, "link"), (Path, "replace"), (os, "open")):
            patch.setattr(holder, name, self._failing(getattr(holder, name)))
        real = os.fdopen
        patch.setattr(os, "fdopen", lambda *args, **more: Watched(real(*args, **more), self))

    def step(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.failed = True
            raise self.error

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.step()
            return real(*args, **more)

        return call


class Watched:
    """A file whose writes and flushes can fail, half of a write being done."""

    def __init__(self, file: Any, trouble: Trouble) -> None:
        self._file, self._trouble = file, trouble

    def write(self, data: Any) -> int:
        self._file.write(bytes(data)[: len(data) // 2])
        self._trouble.step()
        self._file.write(bytes(data)[len(data) // 2 :])
        return len(data)

    def flush(self) -> None:
        self._trouble.step()
        self._file.flush()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def record(source: Path, target: Path) -> int:
    try:
        files.write_snapshot(modern(), target, force=True)
    except (OSError, MemoryError):
        return 2
    return 0


def written(write: Callable[[Path], object]) -> Callable[[Path, Path], int]:
    """A writer without a command of its own that is quick enough to be asked a hundred times."""

    def call(source: Path, target: Path) -> int:
        try:
            write(target)
        except UsageError:  # the command's one line
            return 2
        except MemoryError:
            return 3
        return 0

    return call


def command(*words: str) -> Callable[[Path, Path], int]:
    return lambda source, target: main([word.replace("IN", str(source)).replace("OUT", str(target)) for word in words])


WRITERS: dict[str, Callable[[Path, Path], int]] = {
    "export html": command("export", "IN", "-f", "html", "-o", "OUT", "--force"),
    "export chrome": command("export", "IN", "-f", "chrome", "-o", "OUT", "--force"),
    "export snapshot": command("export", "IN", "-f", "snapshot", "--events", "1:4", "-o", "OUT", "--force"),
    "scrub": command("scrub", "IN", "-o", "OUT", "--force"),
    "check": command("check", "IN", "--write", "OUT", "--force"),
    "timeline": command("timeline", "IN", "--format", "csv", "-o", "OUT", "--force"),
    "simulate": command("simulate", "IN", "--export", "OUT", "--force"),
    "recorder": record,
    "forecast --trace, estimate --trace": written(lambda target: write_document(modern(), target)),
    "live --metrics prometheus": written(lambda target: open_sink(f"prometheus:{target}").write([], {"step": 1})),
    "estimate --plot": written(lambda target: write_waterfall([Rung("a", 1)], target)),
}
ERRORS = {"full disk": OSError(errno.ENOSPC, "No space left on device"), "no memory": MemoryError()}


@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_whole_file_or_the_one_before(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(folder.FOLDER, str(tmp_path / "cache"))  # what fails in the user's own changes no answer
    source, place = tmp_path / "in.pickle", tmp_path / "out"
    source.write_bytes(pickle.dumps(modern(), 4))
    place.mkdir()
    target = place / "made"
    assert WRITERS[name](source, target) == 0
    whole = target.read_bytes()
    failures = 0
    for before in range(200):
        target.write_bytes(OLD)
        with pytest.MonkeyPatch.context() as patch:
            trouble = Trouble(before, ERRORS[what], patch)
            code = WRITERS[name](source, target)
        assert list(place.iterdir()) == [target]
        assert target.read_bytes() == (whole if code == 0 else OLD)
        assert "Traceback" not in capsys.readouterr().err
        if not trouble.failed:
            break
        failures += 1
        assert code in (2, 3)
    assert 4 <= failures < 199


@pytest.mark.parametrize("what", ERRORS)
def test_the_cache_holds_a_whole_file_or_none_and_the_answer_stays(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    monkeypatch.delenv(folder.OFF, raising=False)
    source = tmp_path / "in.pickle"
    source.write_bytes(pickle.dumps(modern(), 4))
    answers = set()
    for before in range(200):
        place = tmp_path / f"cache{before}"
        monkeypatch.setenv(folder.FOLDER, str(place))
        with pytest.MonkeyPatch.context() as patch:
            trouble = Trouble(before, ERRORS[what], patch)
            assert main(["report", str(source), "--json"]) == 0
        answers.add(capsys.readouterr().out)
        kept = list(place.iterdir()) if place.exists() else []
        assert not [each for each in kept if each.suffix != ".columns"]
        if kept:
            name = index.identified(source)[1]
            assert index.find(name) is not None
        if not trouble.failed:
            break
    assert len(answers) == 1 and before > 4 and writing.draft is not None


class Failing(io.RawIOBase):
    """A standard output whose n-th write fails, half of it being done."""

    def __init__(self, before: int, error: BaseException) -> None:
        self.left, self.error, self.failed = before, error, False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == -1:
            self.failed = True
            raise self.error
        return len(data)


@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize(
    "words", (["report"], ["report", "--json"], ["explain"], ["segments"], ["allocations"]), ids="-".join
)
def test_an_output_that_cannot_be_written_is_one_line(
    words: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memtrace.cli._drop_output", lambda: None)  # pytest's own file descriptor 1 must stay
    source = tmp_path / "in.pickle"
    source.write_bytes(pickle.dumps(modern(), 4))
    failures = 0
    for before in range(500):
        with pytest.MonkeyPatch.context() as patch:
            out = Failing(before, ERRORS[what])
            patch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(out, 64), encoding="utf-8"))
            code = main([words[0], str(source), *words[1:]])
        said = capsys.readouterr().err
        if not out.failed:
            assert code in (0, 4)
            break
        failures += 1
        assert code in (2, 3) and said.count("\n") == 1 and said.startswith("memtrace: ")
    assert 1 <= failures < 499
