"""What many tests need: the bundled recordings, loaded once a process, and the truth about them."""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pytest

from memtrace.analysis import Analysis, analyse
from memtrace.cache import folder, index
from memtrace.history.timeline import Timeline, build
from memtrace.oomlog import LogReading, OomMessage, read_log
from memtrace.snapshot.container import open_stream
from memtrace.snapshot.decoder.decode import decode
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Device, Snapshot

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "sample_traces"
TRUTH = Path(__file__).parent / "truth"
MANIFEST = json.loads((TRACES / "manifest.json").read_text())
NAMES: list[str] = [trace["name"] for trace in MANIFEST["traces"]]
LABELLED: list[str] = sorted(path.name.removesuffix(".labels.json.xz") for path in (TRUTH / "labels").glob("*.xz"))
FIELD: list[str] = sorted(
    path.name.removesuffix(".labels.json.xz") for path in (TRUTH / "field").glob("*.labels.json.xz")
)
STACKS: list[str] = sorted(
    path.name.removesuffix(".labels.json.xz") for path in (TRUTH / "stacks").glob("*.labels.json.xz")
)
WHOLE = [name for name in NAMES if name not in ("llama2-7b_ring-truncated", "llama2-7b_recorded-after-load")]
SMALL = ["tiny-llama_3-steps", "llama2-7b_oom-first-step", "llama2-7b_ring-truncated", "llama2-7b_oom-at-load"]


def trace_path(name: str) -> Path:
    """A bundled recording, or one of the labelled ones made for the tests."""
    folders = (TRACES, TRUTH / "recordings", TRUTH / "field", TRUTH / "stacks")
    return next(path for folder in folders for path in folder.glob(f"{name}.pickle*"))


@lru_cache(maxsize=4)
def snapshot(name: str) -> Snapshot:
    """A recording, loaded."""
    return load(trace_path(name))


@lru_cache(maxsize=4)
def timeline(name: str) -> Timeline:
    """A recording's (first) device, replayed."""
    loaded = snapshot(name)
    return build(loaded, loaded.devices[0])


@lru_cache(maxsize=4)
def analysis(name: str) -> Analysis:
    """A recording's (first) device, attributed."""
    return analyse(timeline(name))


class _Shared(index.OpenRecording):
    """A recording that is attributed once, whoever asks."""

    @cached_property
    def made(self) -> dict[int, Analysis]:
        return {}

    def analysis(self, device: Device, rules: Any = (), on_progress: Any = None) -> Analysis:
        if rules:
            return super().analysis(device, rules, on_progress)
        if device.device not in self.made:
            self.made[device.device] = super().analysis(device)
        return self.made[device.device]


@lru_cache(maxsize=5)
def _shared(source: str) -> _Shared:
    return _Shared(load(source))


@contextmanager
def shared_recordings(*folders: Path) -> Iterator[None]:
    """Commands that run in this process read, replay and attribute each of the repository's recordings (and of those in
    ``folders``) once.
    """
    original = index.open_recording

    def remembered(source: Any, *args: Any, **options: Any) -> index.OpenRecording:
        path = Path(source)
        ours = path.is_file() and path.resolve().parent in (TRACES, TRUTH / "recordings", *folders)
        return _shared(str(source)) if ours else original(source, *args, **options)

    index.open_recording = remembered
    try:
        yield
    finally:
        index.open_recording = original


def info(name: str) -> dict[str, Any]:
    """Configuration and statistics of the recorded process."""
    return json.loads((TRUTH / _folder(name, "info") / f"{name}.info.json").read_text())


def labels(name: str) -> dict[str, Any]:
    """The truth about every allocation of a labelled recording."""
    return json.loads(lzma.open(TRUTH / _folder(name, "labels") / f"{name}.labels.json.xz").read())


def _folder(name: str, otherwise: str) -> str:
    return "field" if name in FIELD else "stacks" if name in STACKS else otherwise


def kept_files(folder_of: Path) -> list[Path]:
    """The files of the cache that :func:`indexed_recording` made beside a recording's folder."""
    return sorted((folder_of.parent / "cache").glob("*"))


def indexed_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked recording alone in its folder, in a world where every recording is large enough for the cache."""
    monkeypatch.setenv(folder.FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(folder.OFF, raising=False)
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    path = tmp_path / "run" / "s.pickle"
    path.parent.mkdir()
    with open_stream(trace_path("tiny-llama_3-steps")) as opened:
        path.write_bytes(opened.stream.read())
    return path


def raw_recording(name: str) -> dict[str, Any]:
    """A recording's content as it was pickled."""
    with open_stream(trace_path(name)) as opened:
        return decode(opened.stream, opened.head, opened.name)


def read_text(log: str | bytes) -> LogReading:
    """A log that is at hand as text or bytes, read."""
    return read_log(io.BytesIO(log.encode("utf-8", "replace") if isinstance(log, str) else log))


def parse_log(log: str | bytes) -> tuple[OomMessage, ...]:
    """Its messages."""
    return read_text(log).messages
