"""The cache of large recordings: the same answers, never out of date, never a stranger's, never in the way."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import lzma
import os
import pickle
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from snapshot_equal import assert_same
from strategies import modern
from support import indexed_recording, kept_files, trace_path

from memtrace import writing
from memtrace.analysis import analyse
from memtrace.answers.report import report
from memtrace.answers.segment_map import segment_map
from memtrace.cache import folder, index
from memtrace.cache.index import find, identified, open_recording
from memtrace.cache.store import Shelf, Unfit, unpack
from memtrace.cli import main
from memtrace.errors import SnapshotError
from memtrace.export.table import allocation_columns
from memtrace.history.timeline import choose_event
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Annotation
from memtrace.snapshot.stacks import Frame


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked recording, in a world where every recording is large enough for the cache."""
    return indexed_recording(tmp_path, monkeypatch)


def pack(value: Any, classes: Collection[type]) -> bytes:
    """The stored form."""
    out = io.BytesIO()
    Shelf(out, classes).finish(value)
    return out.getvalue()


def answer(path: Path) -> Any:
    recording = open_recording(path)
    return report(analyse(recording.timeline(recording.snapshot.devices[0])))


def is_read(path: Path) -> bool:
    """Whether the snapshot is opened from the cache."""
    return bool(open_recording(path).replayed)


def kept(path: Path) -> Path:
    """The one file that is kept."""
    [found] = kept_files(path.parent)
    return found


def test_the_same_answers(snapshot: Path) -> None:
    first = answer(snapshot)
    assert is_read(snapshot)
    assert answer(snapshot) == first
    fresh = open_recording(snapshot)
    kept(snapshot).unlink()
    assert_same(fresh.snapshot, open_recording(snapshot).snapshot)
    assert fresh.snapshot.source == str(snapshot)
    assert [path.name for path in snapshot.parent.iterdir()] == ["s.pickle"]


def check_kept(path: Path) -> None:
    """What is kept answers as what was just made does, whole and in parts."""
    recording = open_recording(path)
    made = recording.analysis(recording.snapshot.devices[0])
    again = open_recording(path)
    assert again.known and again.replayed
    kept = again.analysis(again.snapshot.devices[0])
    assert kept.caveats == made.caveats
    assert [rule.id for rule in kept.attribution.rules] == [rule.id for rule in made.attribution.rules]
    for name in ("died", "phase", "step"):  # what a table shows needs no more
        assert np.array_equal(getattr(kept.attribution.facts, name), getattr(made.attribution.facts, name)), name
    assert "_all" not in vars(kept.attribution.facts)
    count = len(made.timeline)
    for events in (None, f"{count // 3}:", f":{count // 2 + 1}", f"{count // 2}:{count // 2 + 40}"):
        mine, wanted = ((each.within(events, None) if count > 40 else each) for each in (kept, made))
        for kind in (None, "peak", "reserved-peak", "end"):
            at = choose_event(wanted.timeline, kind)
            assert choose_event(mine.timeline, kind) == at
            assert report(mine, at) == report(wanted, at)
            assert segment_map(mine, at) == segment_map(wanted, at)
        rows = wanted.timeline.rows_within()
        for name, column in allocation_columns(mine, mine.timeline.rows_within()).items():
            assert np.array_equal(column, allocation_columns(wanted, rows)[name]), name


@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_ring-truncated", "llama2-7b_baseline-expandable"])
def test_what_is_kept_answers_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folder.FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(folder.OFF, raising=False)
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    check_kept(trace_path(name))


@pytest.mark.parametrize("seed", [*range(24), None])  # None: the one that completes frees before it requests them
def test_damaged_recordings_are_kept_as_they_are(
    seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fuzz"))
    monkeypatch.setenv(folder.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    from mutate import damaged

    path = tmp_path / "s.pickle"
    early = Path(__file__).parents[1] / "hostile" / "fuzz_56.pickle.xz"
    path.write_bytes(lzma.decompress(early.read_bytes()) if seed is None else damaged(seed))
    with contextlib.suppress(SnapshotError):
        load(path)
        check_kept(path)


def test_replay_survives(snapshot: Path) -> None:
    recording = open_recording(snapshot)
    made = recording.timeline(recording.snapshot.devices[0]).replay
    kept = open_recording(snapshot).replayed[0].replay
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


def test_a_restored_time_brings_no_old_answer_back(snapshot: Path) -> None:
    answer(snapshot)
    found = snapshot.stat()
    data = bytearray(snapshot.read_bytes())
    data[:4000] = data[:4000][::-1]
    snapshot.write_bytes(data)
    os.utime(snapshot, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (snapshot.stat().st_size, snapshot.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert find(identified(snapshot)[1]) is None


def test_another_file_of_that_name_size_and_time(snapshot: Path) -> None:
    answer(snapshot)
    found = snapshot.stat()
    other = snapshot.with_name("other")
    other.write_bytes(snapshot.read_bytes())
    other.replace(snapshot)
    os.utime(snapshot, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert not is_read(snapshot)


def test_the_same_recording_by_another_name(snapshot: Path) -> None:
    answer(snapshot)
    link = snapshot.with_name("link")
    link.symlink_to(snapshot)
    assert is_read(link) and open_recording(link).snapshot.source == str(link)


def test_code_that_changed_reads_again(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(snapshot)
    monkeypatch.setattr(folder, "_code", lambda: "another")
    assert not is_read(snapshot)


@pytest.mark.parametrize("length", [0, 5, 60, 1000, -1])
def test_a_file_cut_short_is_not_used(snapshot: Path, length: int) -> None:
    first = answer(snapshot)
    kept(snapshot).write_bytes(kept(snapshot).read_bytes()[:length])
    assert not is_read(snapshot)
    assert answer(snapshot) == first
    assert is_read(snapshot)  # replaced by a good one


def test_a_file_of_another_recording_is_not_used(snapshot: Path) -> None:
    answer(snapshot)
    content = kept(snapshot).read_bytes()
    snapshot.touch()
    answer(snapshot)
    new = max(kept_files(snapshot.parent), key=lambda path: path.stat().st_mtime_ns)
    new.write_bytes(content)
    assert find(new.stem) is None


def test_only_the_user_can_read_or_write_it(snapshot: Path) -> None:
    answer(snapshot)
    assert kept(snapshot).stat().st_mode & 0o777 == 0o600
    assert kept(snapshot).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702])
def test_where_others_can_write_nothing_is_believed_or_kept(snapshot: Path, mode: int) -> None:
    first = answer(snapshot)
    place = kept(snapshot).parent
    place.chmod(mode)
    assert not is_read(snapshot)
    for each in place.iterdir():
        each.unlink()
    assert answer(snapshot) == first
    assert list(place.iterdir()) == []


def test_a_file_that_others_can_write_is_not_believed(snapshot: Path) -> None:
    answer(snapshot)
    kept(snapshot).chmod(0o620)
    assert not is_read(snapshot)


def test_a_link_in_the_place_of_a_file_is_not_followed(snapshot: Path) -> None:
    answer(snapshot)
    real = kept(snapshot).rename(snapshot.with_name("elsewhere"))
    (snapshot.parent.parent / "cache" / f"{identified(snapshot)[1]}.columns").symlink_to(real)
    assert not is_read(snapshot)


def test_somebody_elses_folder_or_file_is_not_believed(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(snapshot)
    monkeypatch.setattr(folder, "is_mine", lambda found: False)
    assert not is_read(snapshot)


def test_the_oldest_go_first(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(snapshot)
    first = kept(snapshot)
    monkeypatch.setattr(folder, "MAX_BYTES", 2 * first.stat().st_size + 5000)
    os.utime(first, (5, 5))
    for _ in range(2):
        snapshot.touch()
        answer(snapshot)
    assert len(kept_files(snapshot.parent)) == 2 and not first.exists()
    assert is_read(snapshot)


def test_what_is_used_is_not_the_oldest(snapshot: Path) -> None:
    answer(snapshot)
    os.utime(kept(snapshot), (5, 5))
    assert is_read(snapshot)
    assert kept(snapshot).stat().st_mtime > 5


def test_info_says_where_and_how_large(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(snapshot), "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert cache == {"folder": str(kept(snapshot).parent), "files": 1, "bytes": kept(snapshot).stat().st_size}
    assert main(["info", str(snapshot)]) == 0
    assert f"{cache['folder']}: 1 large recording, " in capsys.readouterr().out
    assert main(["info", str(snapshot), "--json", "--no-index"]) == 0
    assert "cache" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("variables", "below"),
    [
        ({"MEMTRACE_CACHE": "a/b", "XDG_CACHE_HOME": "c"}, "a/b"),
        ({"MEMTRACE_CACHE": "", "XDG_CACHE_HOME": "c"}, "c/memtrace"),
        ({"MEMTRACE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "d"}, "d/.cache/memtrace"),
    ],
)
def test_where_it_is(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], below: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    answer(snapshot)
    assert len(list((tmp_path / below).iterdir())) == 1 and is_read(snapshot)


def test_turned_off(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folder.OFF, "1")
    answer(snapshot)
    assert kept_files(snapshot.parent) == []


def test_small_recordings_leave_nothing(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_EVENTS", 1_000_000)
    answer(snapshot)
    assert kept_files(snapshot.parent) == []


def test_where_nothing_can_be_written(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = answer(snapshot)
    file = kept(snapshot)
    file.unlink()
    file.mkdir()  # renaming a file onto a folder fails
    assert answer(snapshot) == first
    assert list(file.parent.iterdir()) == [file]
    file.rmdir()
    monkeypatch.setenv(folder.FOLDER, str(snapshot / "below a file"))
    assert answer(snapshot) == first
    assert kept_files(snapshot.parent) == []


def test_a_full_disk(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    answer(snapshot)
    assert kept_files(snapshot.parent) == []


@pytest.mark.skipif(os.name == "nt", reason="no file that is mapped can be renamed there")
def test_columns_lie_in_the_file_before_it_is_whole(snapshot: Path) -> None:
    recording = open_recording(snapshot)
    [draft] = (snapshot.parent.parent / "cache").iterdir()
    trace = recording.snapshot.devices[0].trace
    assert draft.name.endswith(".tmp") and not trace.address.flags.owndata and not trace.address.flags.writeable
    assert_same(recording.snapshot, load(snapshot))
    written = draft.stat().st_size
    assert written > trace.address.nbytes
    recording.analysis(recording.snapshot.devices[0])
    assert not draft.exists() and kept(snapshot).stat().st_size < 2 * written  # nothing is written twice
    assert np.array_equal(recording.snapshot.devices[0].trace.address, load(snapshot).devices[0].trace.address)


def test_what_is_not_finished_leaves_nothing(snapshot: Path) -> None:
    open_recording(snapshot)
    gc.collect()
    assert list((snapshot.parent.parent / "cache").iterdir()) == []


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_disk_that_fills_up_on_the_way(fails_at: int, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folder.OFF, "1")
    wanted = answer(snapshot)
    monkeypatch.delenv(folder.OFF)
    calls, real = [], writing.Draft.to_disk

    def to_disk(self: writing.Draft) -> None:
        calls.append(1)
        if len(calls) == fails_at:
            raise OSError("full")
        real(self)

    monkeypatch.setattr(writing.Draft, "to_disk", to_disk)
    recording = open_recording(snapshot)
    assert report(recording.analysis(recording.snapshot.devices[0])) == wanted
    assert (len(calls) >= fails_at and kept_files(snapshot.parent) == []) or fails_at < 3
    assert answer(snapshot) == wanted and len(kept_files(snapshot.parent)) == 1


def test_values_survive_packing() -> None:
    value = {
        "none": None, "big": 10**40, "nan": float("inf"), "text": "é\ud800", 3: (1, [2.5, True]), (1, 2): {},
        "frame": Frame("a.py", 3, "f"), "note": Annotation(0, 1, "x", "START"),
        "wide": np.array([1 << 40, -1]), "narrow": np.arange(5), "empty": np.zeros(0, np.int32),
        "same": np.broadcast_to(np.int32(7), (9,)), "flags": np.array([True, False]),
    }  # fmt: skip
    classes = (Frame, Annotation)
    made = unpack(memoryview(pack(value, classes)), classes)
    assert made.keys() == value.keys()
    for key, wanted in value.items():
        if isinstance(wanted, np.ndarray):
            assert made[key].dtype == wanted.dtype
            assert np.array_equal(made[key], wanted)
        else:
            assert made[key] == wanted
            assert type(made[key]) is type(wanted)


@pytest.mark.parametrize("value", [object(), np.zeros((2, 2)), np.array(["a"]), Frame, Path(), print, len])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(Unfit):
        pack(value, ())


def test_no_other_class_is_made_and_no_damaged_description_is_looked_at() -> None:
    stored = pack([Frame("a.py", 3, "f"), np.arange(9)], (Frame,))
    with pytest.raises(Unfit):
        unpack(memoryview(stored), (Annotation,))
    for at in range(len(stored)):
        damaged = bytearray(stored)
        damaged[at] ^= 1
        with contextlib.suppress(Unfit):
            frame, numbers = unpack(memoryview(damaged), (Frame,))
            assert frame == Frame("a.py", 3, "f") and len(numbers) == 9


def test_what_was_written_of_a_class_that_has_changed_is_unfit() -> None:
    stored = memoryview(pack(Annotation(0, 1, "x", "START"), (Annotation,)))
    changed = type("Annotation", (), {"__module__": Annotation.__module__, "__slots__": ("name",)})
    with pytest.raises(Unfit):
        unpack(stored, (changed,))


def test_a_short_trace_of_hand_made_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folder.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(modern(), 4))
    first = answer(path)
    assert is_read(path)
    assert answer(path) == first


def test_devices_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folder.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    raw = modern()
    raw["device_traces"] = [raw["device_traces"][0], list(raw["device_traces"][0])]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(raw, 4))
    writes = []
    real = folder.keep
    monkeypatch.setattr(folder, "keep", lambda *args: (writes.append(1), real(*args)))
    assert main(["info", str(path)]) == 0
    assert sorted(open_recording(path).replayed) == [0, 1] and len(writes) == 1
    assert main(["info", str(path)]) == 0
    assert len(writes) == 1
