"""Perfetto's protobuf against Perfetto's own schema, Trace Event JSON against its documentation."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from support import analysis

from memtrace.analysis import analyse
from memtrace.answers.curves import category_curves
from memtrace.attribution.categories import Category
from memtrace.errors import NoAnswerError
from memtrace.export.chrome import write_chrome
from memtrace.export.perfetto import write_perfetto
from memtrace.export.tracks import Tracks, build_tracks, event_times_ns
from memtrace.history.timeline import build
from memtrace.snapshot.load import from_raw

NAMES = ["tiny-llama_3-steps", "llama2-7b_oom-first-step", "llama2-7b_ring-truncated"]


def perfetto_of(tracks: Tracks) -> Any:
    buffer = io.BytesIO()
    write_perfetto(tracks, "a.pickle", buffer)
    trace = pb.Trace()
    assert trace.ParseFromString(buffer.getvalue()) == len(buffer.getvalue())
    return trace


@pytest.mark.parametrize("name", NAMES)
def test_perfetto_reads_back_every_curve(name: str) -> None:
    recording = analysis(name)
    tracks = build_tracks(recording)
    trace = perfetto_of(tracks)
    names: dict[int, str] = {}
    counters: dict[str, list[tuple[int, int]]] = defaultdict(list)
    depth: dict[int, int] = defaultdict(int)
    last: dict[int, int] = defaultdict(int)
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            names[packet.track_descriptor.uuid] = packet.track_descriptor.name
            continue
        event = packet.track_event
        assert event.track_uuid in names
        assert packet.timestamp >= last[event.track_uuid]
        last[event.track_uuid] = packet.timestamp
        if event.type == pb.TrackEvent.TYPE_COUNTER:
            counters[names[event.track_uuid]].append((packet.timestamp, event.counter_value))
        elif event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.name
            depth[event.track_uuid] += 1
        elif event.type == pb.TrackEvent.TYPE_SLICE_END:
            depth[event.track_uuid] -= 1
            assert depth[event.track_uuid] >= 0
    assert not any(depth.values())
    curves = category_curves(recording)
    expected = {"reserved": curves.reserved_bytes, "allocated": curves.allocated_bytes}
    expected |= {str(c): curves.categories[i] for i, c in enumerate(Category) if curves.categories[i].any()}
    times = tracks.time_ns
    for title, values in expected.items():
        stamps, seen = np.array(counters[title]).T
        at = np.searchsorted(stamps, times, side="right") - 1  # a counter holds until its next sample
        np.testing.assert_array_equal(seen[at], values)


def no_unknown_fields(message: Any) -> None:
    """Every byte written is a field that Perfetto's schema knows."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    assert len(UnknownFieldSet(message)) == 0
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if not hasattr(value, "ListFields") else [value]:
                no_unknown_fields(inner)


def test_every_field_is_one_of_the_schema() -> None:
    trace = perfetto_of(build_tracks(analysis("llama2-7b_oom-first-step"), 300))
    for packet in trace.packet[:400]:
        no_unknown_fields(packet)
    kinds = {packet.track_event.type for packet in trace.packet if packet.HasField("track_event")}
    assert kinds == {
        pb.TrackEvent.TYPE_SLICE_BEGIN,
        pb.TrackEvent.TYPE_SLICE_END,
        pb.TrackEvent.TYPE_COUNTER,
        pb.TrackEvent.TYPE_INSTANT,
    }
    process = trace.packet[0].track_descriptor.process
    assert (process.pid, process.process_name) == (1, "GPU 0: a.pickle")
    units = {p.track_descriptor.counter.unit for p in trace.packet if p.track_descriptor.HasField("counter")}
    assert units == {pb.CounterDescriptor.UNIT_SIZE_BYTES}


@pytest.mark.parametrize("name", NAMES)
def test_downsampling_keeps_the_peaks(name: str) -> None:
    full, few = build_tracks(analysis(name)), build_tracks(analysis(name), 400)
    assert len(few.events) < len(full.events)
    for group in ("levels", "categories"):
        for title, values in getattr(full, group).items():
            assert getattr(few, group)[title].max() == values.max(), title


@pytest.mark.parametrize("name", NAMES)
def test_trace_events_have_what_their_format_asks_for(name: str) -> None:
    buffer = io.BytesIO()
    tracks = build_tracks(analysis(name), 2000)
    write_chrome(tracks, "a <b>.pickle", buffer)
    trace = json.loads(buffer.getvalue())
    assert trace["otherData"]["baseTimeNanoseconds"] == int(tracks.time_ns[0])
    needed = {
        "M": {"name", "args"},
        "X": {"name", "ts", "dur", "tid"},
        "i": {"name", "ts", "s"},
        "C": {"name", "ts", "args"},
    }
    seen = set()
    for event in trace["traceEvents"]:
        seen.add(event["ph"])
        assert needed[event["ph"]] | {"pid"} <= set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    assert {"M", "X", "C"} <= seen
    assert ("i" in seen) == bool(analysis(name).timeline.oom_events)
    stacked = [event for event in trace["traceEvents"] if event["name"] == "memory by category (bytes)"]
    reserved = [event for event in trace["traceEvents"] if event["name"] == "memory (bytes)"]
    assert max(sum(event["args"].values()) for event in stacked) == max(event["args"]["reserved"] for event in reserved)


@given(st.lists(st.integers(0, 30), max_size=60))
def test_times_increase_strictly_and_stay_close(steps: list[int]) -> None:
    recorded = np.cumsum(np.array(steps, dtype=np.int64)) + 1_700_000_000_000_000
    times = event_times_ns(recorded, len(recorded))
    assert (np.diff(times) > 0).all()
    assert ((times - recorded * 1000 >= 0) & (times - recorded * 1000 <= len(steps))).all()


def annotated(notes: list[tuple[str, int, str]]) -> Tracks:
    raw = {
        "segments": [],
        "device_traces": [[{"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": t} for t in range(10)]],
        "external_annotations": [{"device": 0, "time_us": t, "name": n, "stage": s} for n, t, s in notes],
    }
    snapshot = from_raw(raw, "x")
    return build_tracks(analyse(build(snapshot, snapshot.devices[0])))


def test_recorded_ranges_nest_and_cut_ones_are_left_out() -> None:
    tracks = annotated(
        [
            ("cut", 0, "END"),
            ("a", 1, "START"),
            ("b", 1, "START"),
            ("b", 1, "END"),
            ("c", 2, "START"),
            ("a", 3, "END"),
            ("d", 4, "START"),
        ]
    )
    assert [(piece.name, piece.start_ns // 1000, piece.end_ns // 1000) for piece in tracks.ranges] == [
        ("b", 1, 1),
        ("c", 2, 3),
        ("a", 1, 3),
    ]
    names: list[str] = []
    for packet in perfetto_of(tracks).packet:
        if packet.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            names.append(packet.track_event.name)
        elif packet.track_event.type == pb.TrackEvent.TYPE_SLICE_END:
            names.append("end")
    assert names == ["a", "b", "end", "c", "end", "end"]


def test_the_outer_of_two_ranges_that_last_as_long_begins_first() -> None:
    tracks = annotated([("outer", 1, "START"), ("inner", 1, "START"), ("inner", 3, "END"), ("outer", 3, "END")])
    events = [packet.track_event for packet in perfetto_of(tracks).packet]
    begun = [event.name for event in events if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN]
    assert begun == ["outer", "inner"]


def test_a_file_without_a_trace_says_so() -> None:
    snapshot = from_raw([], "x")
    with pytest.raises(NoAnswerError, match="no trace"):
        build_tracks(analyse(build(snapshot, snapshot.devices[0])))
