"""The index beside a large snapshot: the same answers, never stale, never a stranger's, never in the way."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from snapshot_equal import assert_same
from strategies import modern
from support import indexed_recording

from memtrace.analysis import analyse
from memtrace.answers.report import report
from memtrace.cache import index
from memtrace.cache.index import index_path, open_recording
from memtrace.snapshot.model import Annotation
from memtrace.snapshot.stacks import Frame
from memtrace.snapshot.store import Unfit, pack, unpack


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked recording, in a world where every recording is large enough for an index."""
    return indexed_recording(tmp_path, monkeypatch)


def answer(path: Path) -> Any:
    recording = open_recording(path)
    return report(analyse(recording.timeline(recording.snapshot.devices[0])))


def is_read(path: Path) -> bool:
    """Whether opening the snapshot reads its index."""
    return bool(open_recording(path).replays)


def test_the_same_answers(snapshot: Path) -> None:
    first = answer(snapshot)
    assert index_path(snapshot).exists()
    assert is_read(snapshot)
    assert answer(snapshot) == first
    fresh = open_recording(snapshot)
    index_path(snapshot).unlink()
    assert_same(fresh.snapshot, open_recording(snapshot).snapshot)
    assert fresh.snapshot.source == str(snapshot)
    assert [path.name for path in snapshot.parent.iterdir()] == ["s.pickle"]


def test_replay_survives(snapshot: Path) -> None:
    recording = open_recording(snapshot)
    made = recording.timeline(recording.snapshot.devices[0]).replay
    kept = open_recording(snapshot).replays[0]
    for item in dataclasses.fields(made):
        left, right = getattr(made, item.name), getattr(kept, item.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert np.array_equal(left, right), item.name
        elif not dataclasses.is_dataclass(left):
            assert left == right, item.name


def test_a_changed_snapshot_is_read_again(snapshot: Path) -> None:
    answer(snapshot)
    raw = pickle.loads(snapshot.read_bytes())
    raw["device_traces"][0].pop()
    snapshot.write_bytes(pickle.dumps(raw, 4))
    assert not is_read(snapshot)


def test_the_same_size_and_time_with_other_bytes(snapshot: Path) -> None:
    answer(snapshot)
    found = snapshot.stat()
    data = bytearray(snapshot.read_bytes())
    data[:4000] = data[:4000][::-1]
    snapshot.write_bytes(data)
    os.utime(snapshot, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert index._read(snapshot) is None


@pytest.mark.parametrize("place", [0.0, 0.001, 0.3, 0.9])
def test_a_damaged_index_is_not_used(snapshot: Path, place: float) -> None:
    first = answer(snapshot)
    data = bytearray(index_path(snapshot).read_bytes())
    data[int(place * len(data))] ^= 1
    index_path(snapshot).write_bytes(data)
    assert not is_read(snapshot)
    assert answer(snapshot) == first
    assert is_read(snapshot)  # replaced by a good one


@pytest.mark.parametrize("length", [0, 5, 60, 1000])
def test_an_index_cut_short_is_not_used(snapshot: Path, length: int) -> None:
    answer(snapshot)
    index_path(snapshot).write_bytes(index_path(snapshot).read_bytes()[:length])
    assert not is_read(snapshot)


def test_a_strangers_index_is_not_used(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(snapshot)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert not is_read(snapshot)


def test_the_key_is_private(snapshot: Path, tmp_path: Path) -> None:
    answer(snapshot)
    assert (tmp_path / "cache" / "memtrace" / "index.key").stat().st_mode & 0o777 == 0o600


def test_turned_off(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(index.SWITCH, "1")
    answer(snapshot)
    assert not index_path(snapshot).exists()


def test_small_recordings_leave_nothing(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_EVENTS", 1_000_000)
    answer(snapshot)
    assert not index_path(snapshot).exists()


def test_where_nothing_can_be_written(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = answer(snapshot)
    index_path(snapshot).unlink()
    index_path(snapshot).mkdir()  # renaming a file onto a folder fails
    assert answer(snapshot) == first
    assert sorted(path.name for path in snapshot.parent.iterdir()) == ["s.pickle", "s.pickle.memtrace-index"]
    index_path(snapshot).rmdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(snapshot / "below a file"))
    assert answer(snapshot) == first
    assert not index_path(snapshot).exists()


def test_a_full_disk(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    answer(snapshot)
    assert not index_path(snapshot).exists()


def test_values_survive_packing() -> None:
    value = {
        "none": None, "big": 10**40, "nan": float("inf"), "text": "é\ud800", 3: (1, [2.5, True]), (1, 2): {},
        "frame": Frame("a.py", 3, "f"), "note": Annotation(0, 1, "x", "START"),
        "wide": np.array([1 << 40, -1]), "narrow": np.arange(5), "empty": np.zeros(0, np.int32),
        "same": np.broadcast_to(np.int32(7), (9,)), "flags": np.array([True, False]),
    }  # fmt: skip
    classes = {"Frame": Frame, "Annotation": Annotation}
    made = unpack(memoryview(b"".join(pack(value, classes))), classes)
    assert made.keys() == value.keys()
    for key, wanted in value.items():
        if isinstance(wanted, np.ndarray):
            assert made[key].dtype == wanted.dtype
            assert np.array_equal(made[key], wanted)
        else:
            assert made[key] == wanted
            assert type(made[key]) is type(wanted)


@pytest.mark.parametrize("value", [{1, 2}, object(), np.zeros((2, 2)), np.array(["a"])])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(Unfit):
        pack(value, {})


def test_a_short_trace_of_hand_made_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(modern(), 4))
    first = answer(path)
    assert is_read(path)
    assert answer(path) == first


def test_devices_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    raw = modern()
    raw["device_traces"] = [raw["device_traces"][0], list(raw["device_traces"][0])]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(raw, 4))
    writes = []
    real = index._write
    monkeypatch.setattr(index, "_write", lambda *args: (writes.append(1), real(*args)))
    from memtrace.cli import main

    assert main(["info", str(path)]) == 0
    assert sorted(open_recording(path).replays) == [0, 1] and len(writes) == 1
    assert main(["info", str(path)]) == 0
    assert len(writes) == 1
