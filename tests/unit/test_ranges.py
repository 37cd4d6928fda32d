"""Ranges of events and steps: answers about a part of a recording, with the numbers of the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import analysis

from memtrace.analysis import Analysis
from memtrace.answers.curves import category_curves, pick_events
from memtrace.answers.report import report
from memtrace.errors import NoAnswerError, UsageError
from memtrace.export.flame import volume_stacks
from memtrace.export.table import curve_columns
from memtrace.export.tracks import build_tracks
from memtrace.history.timeline import Window, choose_event
from memtrace.ranges import check_ranges, parse_range

TINY = "tiny-llama_3-steps"
OOM = "llama2-7b_oom-first-step"


def part(name: str, events: str) -> Analysis:
    return analysis(name).within(events, None)


def test_what_a_range_says() -> None:
    assert parse_range("3:7", 0, 10, "events") == (3, 7)
    assert parse_range(":", 0, 10, "events") == (0, 10)
    assert parse_range(" 4: ", 0, 10, "events") == (4, 10)
    assert parse_range(":4", 0, 10, "events") == (0, 4)
    assert parse_range("1,000:2_000", 0, 5000, "events") == (1000, 2000)
    assert parse_range("7:", 7, 9, "steps") == (7, 9)


@pytest.mark.parametrize(
    "text",
    ["3", "a:b", "7:3", "4:4", "0:11", "10:", "-1:3", "1:2:3", "", "0:0", ":0", "1:" + "9" * 5000, "٣:٤", "0x1:2"],
)
def test_bad_ranges(text: str) -> None:
    with pytest.raises(UsageError, match="events") as caught:
        parse_range(text, 0, 10, "events")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_both_ranges_at_once() -> None:
    with pytest.raises(UsageError, match="exclude"):
        check_ranges("1:2", "0:1")


@given(st.data())
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("name", [TINY, OOM])
def test_a_part_says_what_the_whole_says_of_it(name: str, data: st.DataObject) -> None:
    whole = analysis(name)
    count = len(whole.timeline)
    first = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(first + 1, min(count, first + 3000)))
    window = part(name, f"{first}:{stop}")
    curves, small = category_curves(whole), category_curves(window, window.timeline.window)
    assert np.array_equal(small.categories, curves.categories[:, first:stop])
    assert np.array_equal(small.allocated_bytes, curves.allocated_bytes[first:stop])
    for peak, curve in zip(
        window.timeline.peaks(), (curves.requested_bytes, curves.allocated_bytes, curves.reserved_bytes), strict=True
    ):
        if first > 0 or peak.event >= 0:
            assert first <= peak.event < stop
            assert peak.size_bytes == curve[first:stop].max() == curve[peak.event]
    at = choose_event(window.timeline, None)
    mine = report(window, at)
    assert mine.window == (first, stop)
    assert replace(mine, window=None, peaks={}, fragmentation=None) == replace(
        report(whole, at), window=None, peaks={}, fragmentation=None
    )
    events = pick_events(small, 200)
    assert events[0] == first and events[-1] == stop - 1
    columns = curve_columns(window, small, events)
    assert np.array_equal(columns["activations"], curve_columns(whole, curves, events)["activations"])


def test_rows_of_a_part() -> None:
    window = part(TINY, "500:600")
    table = window.timeline.allocations
    rows = window.timeline.rows_within()
    live = {row for event in range(500, 600) for row in window.timeline.live_rows(event).tolist()}
    made_and_freed = np.flatnonzero((table.alloc_event >= 500) & (table.alloc_event < 600)).tolist()
    assert set(rows.tolist()) == live | set(made_and_freed)


def test_choosing_an_event_within_a_part() -> None:
    timeline = part(TINY, "100:200").timeline
    assert choose_event(timeline, "end").event == 199
    assert choose_event(timeline, "150").event == 150
    for outside in ("99", "200", "-1"):
        with pytest.raises(UsageError, match="100:200"):
            choose_event(timeline, outside)
    with pytest.raises(NoAnswerError, match="100:200"):
        choose_event(timeline, "oom")


def test_a_refusal_outside_is_none() -> None:
    whole = analysis(OOM).timeline
    event = whole.oom_events[-1]
    assert part(OOM, f":{event}").timeline.oom_events == [e for e in whole.oom_events if e < event]
    assert choose_event(part(OOM, f"{event}:{event + 1}").timeline, None).kind == "oom"


def test_steps() -> None:
    whole = analysis(TINY)
    phases = whole.attribution.facts.phases
    middle = whole.within(None, "1:2").timeline.span
    assert set(phases.step[phases.span_of(np.arange(*middle))].tolist()) == {1}
    assert whole.within(None, ":").timeline.span.stop == len(whole.timeline)
    assert whole.within(None, ":1").timeline.span.stop == middle.first
    for bad in ("0:9", "7:8"):
        with pytest.raises(UsageError, match="steps 0 to"):
            whole.within(None, bad)


def test_no_steps_and_no_events() -> None:
    whole = analysis(TINY)
    loading = whole.attribution.facts.phases
    none = replace(
        whole,
        attribution=replace(
            whole.attribution,
            facts=replace(whole.attribution.facts, phases=replace(loading, step=np.full(len(loading), -1))),
        ),
    )
    with pytest.raises(NoAnswerError, match="no training step"):
        none.within(None, "0:1")


def test_tracks_and_volume_of_a_part() -> None:
    window = part(TINY, "500:900")
    tracks = build_tracks(window, 100)
    assert tracks.events[0] == 500 and tracks.events[-1] == 899
    assert all(500 <= piece.event < 900 for piece in tracks.phases if piece.event is not None)
    assert tracks.time_ns[0] <= min(piece.start_ns for piece in tracks.phases)
    table = window.timeline.allocations
    made = (table.alloc_event >= 500) & (table.alloc_event < 900)
    assert volume_stacks(window).total_bytes == int(table.requested_bytes[made].sum())


def test_the_whole_is_the_window_of_everything() -> None:
    whole = analysis(TINY)
    everything = part(TINY, ":")
    assert everything.timeline.window == Window(0, len(whole.timeline))
    assert everything.timeline.peaks() == whole.timeline.peaks()
    assert np.array_equal(everything.timeline.rows_within(), whole.timeline.rows_within())
