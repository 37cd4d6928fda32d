"""A part of a recording straight from the cache says what the whole says of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import modern
from support import trace_path

from memtrace.analysis import Analysis
from memtrace.answers.curves import category_curves, pick_events
from memtrace.answers.report import report
from memtrace.answers.segment_map import segment_map
from memtrace.cache import checkpoints, folder, index
from memtrace.cache.index import open_recording
from memtrace.errors import MemtraceError, NoAnswerError, UsageError
from memtrace.export.table import allocation_columns, curve_columns
from memtrace.history.layout import layout_at
from memtrace.history.timeline import LEVELS_CONTRADICT, choose_event
from memtrace.snapshot.container import open_stream
from memtrace.snapshot.devices import choose_device

NAMES = [
    "tiny-llama_3-steps", "llama2-7b_oom-first-step", "llama2-7b_ring-truncated", "llama2-7b_recorded-after-load",
    "llama2-7b_baseline-expandable",
]  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(an unpacked recording kept with many checkpoints, its whole analysis)."""
    place = tmp_path_factory.mktemp("part")
    path = place / "s.pickle"
    with open_stream(trace_path(str(request.param))) as opened:
        path.write_bytes(opened.stream.read())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(folder.FOLDER, str(place / "cache"))
        patch.delenv(folder.OFF, raising=False)
        patch.setattr(index, "MIN_EVENTS", 1)
        patch.setattr(checkpoints, "_SPACING_EVENTS", 200)
        patch.setattr(checkpoints, "_LIVE_SHARE", 1)
        recording = open_recording(path)
        whole = recording.analysis(recording.snapshot.devices[0])
        again = open_recording(path)  # stacks are numbered as they are met: compare with the index's own numbers
        assert again.known
        yield path, again.analysis(again.snapshot.devices[0]), whole


def open_part(path: Path | str, device: int | None, events: str | None, steps: str | None) -> Analysis | None:
    recording = open_recording(path)
    return recording.part(choose_device(recording.snapshot, device)[0], events, steps)


def test_the_index_keeps_the_attribution(both: tuple[Path, Analysis, Analysis]) -> None:
    _, kept, made = both
    assert np.array_equal(kept.attribution.rule, made.attribution.rule)
    assert [rule.id for rule in kept.attribution.rules] == [rule.id for rule in made.attribution.rules]
    assert report(kept) == report(made)
    for name in ("start", "phase", "step"):
        assert np.array_equal(
            getattr(kept.attribution.facts.phases, name), getattr(made.attribution.facts.phases, name)
        )


@given(st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_part_says_what_the_whole_says_of_it(both: tuple[Path, Analysis, Analysis], data: st.DataObject) -> None:
    path, whole, _ = both
    count = len(whole.timeline)
    first = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(first + 1, min(count, first + 4000)))
    text = f"{first}:{stop}"
    part, wanted = open_part(path, None, text, None), whole.within(text, None)
    assert part is not None
    for kind in (None, "peak", "reserved-peak", "end", str(data.draw(st.integers(first, stop - 1)))):
        at = choose_event(wanted.timeline, kind)
        assert choose_event(part.timeline, kind) == at
        assert report(part, at) == report(wanted, at)
        mine, theirs = segment_map(part, at), segment_map(wanted, at)
        assert mine == theirs
        assert layout_at(part.timeline, at.event).reserved_bytes == layout_at(wanted.timeline, at.event).reserved_bytes
    curves = [category_curves(each, each.timeline.window) for each in (part, wanted)]
    events = pick_events(curves[0], stop - first)
    mine_columns, their_columns = (
        curve_columns(each, curve, events) for each, curve in zip((part, wanted), curves, strict=True)
    )
    for name, column in mine_columns.items():
        assert np.array_equal(column, their_columns[name]), name
    tables = [allocation_columns(each, each.timeline.rows_within()) for each in (part, wanted)]
    for name, column in tables[0].items():
        assert np.array_equal(column, tables[1][name]), name


def test_steps(both: tuple[Path, Analysis, Analysis]) -> None:
    path, whole, _ = both
    steps = whole.attribution.facts.phases.step
    last = int(steps.max())
    if last < 0:
        with pytest.raises(NoAnswerError):
            open_part(path, None, None, "0:1")
        return
    part = open_part(path, None, None, f"{last}:")
    assert part is not None
    assert part.timeline.window == whole.within(None, f"{last}:").timeline.window
    with pytest.raises(UsageError):
        open_part(path, None, None, f"{last + 7}:")


def test_only_the_part_is_read(both: tuple[Path, Analysis, Analysis], monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole, _ = both
    part = open_part(path, None, f"{len(whole.timeline) - 5}:", None)
    assert part is not None
    assert len(part.timeline.allocations) < len(whole.timeline.allocations)
    assert not part.timeline.trace.size[: len(whole.timeline) - 5 - 5000].any()


def test_where_there_is_no_index(both: tuple[Path, Analysis, Analysis], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = both
    monkeypatch.setenv(folder.OFF, "1")
    assert open_part(path, None, "0:5", None) is None
    monkeypatch.delenv(folder.OFF)
    copied = path.with_name("d.pickle")
    copied.write_bytes(path.read_bytes())
    assert open_part(copied, None, "0:5", None) is None


def test_a_recording_with_its_configuration_needs_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folder.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(modern() | {"memtrace": {"version": 1, "config": {"seq_len": 1}}}, 4))
    recording = open_recording(path)
    recording.analysis(recording.snapshot.devices[0])
    assert open_recording(path).known
    assert open_part(path, None, "0:1", None) is None


@pytest.mark.parametrize("seed", [*range(24), 56])  # 56 completes frees before it requests them
def test_parts_of_damaged_recordings(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fuzz"))
    monkeypatch.setenv(folder.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_EVENTS", 1)
    monkeypatch.setattr(checkpoints, "_SPACING_EVENTS", 20)
    monkeypatch.setattr(checkpoints, "_LIVE_SHARE", 0)
    from mutate import damaged

    path = tmp_path / "s.pickle"
    path.write_bytes(damaged(seed))
    try:
        recording = open_recording(path)
    except MemtraceError:
        return
    device = recording.snapshot.devices[0]
    recording.analysis(device)
    kept = open_recording(path)
    whole = kept.analysis(kept.snapshot.devices[0])
    count = len(whole.timeline)
    for first in range(0, count, max(count // 6, 1)):
        text = f"{first}:{min(first + 40, count)}"
        part, wanted = open_part(path, device.device, text, None), whole.within(text, None)
        if LEVELS_CONTRADICT in whole.caveats:  # levels that are not sums of events are read off the whole
            assert part is None
            continue
        assert part is not None
        assert report(part) == report(wanted)
        assert np.array_equal(
            category_curves(part, part.timeline.window).categories,
            category_curves(wanted, wanted.timeline.window).categories,
        )
