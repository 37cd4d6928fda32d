"""A cut snapshot replays to the very curves of the whole one."""

from __future__ import annotations

import io
import pickle
import pickletools
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from strategies import modern
from support import SMALL, trace_path

from memtrace.errors import NoAnswerError
from memtrace.export.cut import RawRecording, cut, read_recording, write_snapshot
from memtrace.history.timeline import Timeline, build
from memtrace.snapshot.load import from_raw


@lru_cache(maxsize=3)
def opened(name: str) -> tuple[RawRecording, Timeline]:
    recording = read_recording(trace_path(name))
    return recording, build(recording.snapshot, recording.snapshot.devices[0])


def replayed(snapshot: dict[str, Any]) -> Timeline:
    buffer = io.BytesIO()
    write_snapshot(snapshot, buffer)
    loaded = from_raw(pickle.loads(buffer.getvalue()), "cut")
    assert loaded.warnings == ()
    return build(loaded, loaded.devices[0])


@pytest.mark.parametrize("name", [*SMALL, "llama2-7b_baseline-expandable", "llama2-7b_cpp-stacks"])
@pytest.mark.parametrize("share", [(0.0, 1.0), (0.3, 0.5), (0.5, 1.0), (0.0, 0.3), (0.62, 0.621)])
def test_the_curves_of_the_range_come_back(name: str, share: tuple[float, float]) -> None:
    recording, whole = opened(name)
    first = min(int(share[0] * len(whole)), len(whole) - 1)
    stop = max(first + 1, int(share[1] * len(whole)))
    snapshot = cut(recording, whole, first, stop)
    part = replayed(snapshot)
    assert part.replay.exact, part.replay.why
    assert stop - first <= len(part) <= stop - first + 40  # widened to whole operations
    times = whole.trace.time_us
    assert times is not None and part.trace.time_us is not None
    kept = snapshot["device_traces"][0]
    start = next(i for i in range(first, -1, -1) if recording.raw["device_traces"][0][i] is kept[0])
    inside = slice(start, start + len(part))
    for curve in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
        np.testing.assert_array_equal(getattr(part, curve), getattr(whole, curve)[inside])
    np.testing.assert_array_equal(part.trace.time_us, times[inside])


def test_what_is_live_keeps_its_stack_size_and_address() -> None:
    recording, whole = opened("tiny-llama_3-steps")
    event = len(whole) // 2
    part = replayed(cut(recording, whole, event - 100, event + 1))
    rows, cut_rows = whole.live_rows(event), part.live_rows(len(part) - 1)

    def facts(timeline: Timeline, rows: Any) -> set[Any]:
        table, stacks = timeline.allocations, timeline.snapshot.stacks
        return {
            (
                int(table.address[r]),
                int(table.requested_bytes[r]),
                int(table.block_bytes[r]),
                stacks.stack(int(table.stack[r])),
            )
            for r in rows.tolist()
        }

    assert facts(whole, rows) == facts(part, cut_rows)


def test_it_is_written_at_protocol_4_without_globals() -> None:
    recording, whole = opened("tiny-llama_3-steps")
    buffer = io.BytesIO()
    write_snapshot(cut(recording, whole, 0, 500), buffer)
    operations = [(op.name, value) for op, value, _ in pickletools.genops(buffer.getvalue())]
    assert operations[0] == ("PROTO", 4)
    assert not {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ"} & {name for name, _ in operations}


def test_settings_annotations_and_extra_keys_survive() -> None:
    raw = modern()
    raw["memtrace"] = {"version": 1}
    raw["external_annotations"] = [
        {"device": 0, "time_us": t, "name": "step", "stage": stage}
        for t, stage in ((1, "START"), (2, "END"), (9, "START"))
    ]
    copied = {**raw, "device_traces": [list(t) for t in raw["device_traces"]]}
    recording = RawRecording(raw, from_raw(copied, "x"))
    timeline = build(recording.snapshot, recording.snapshot.devices[0])
    snapshot = cut(recording, timeline, 0, 2)
    assert snapshot["allocator_settings"] == raw["allocator_settings"] and snapshot["memtrace"] == {"version": 1}
    assert [note["time_us"] for note in snapshot["external_annotations"]] == [1, 2]


def test_other_devices_are_cut_to_the_same_time() -> None:
    raw = modern()
    second = [dict(event, time_us=event["time_us"] + 1) for event in raw["device_traces"][0]]
    raw["device_traces"].append(second)
    raw["segments"] += [dict(segment, device=1) for segment in raw["segments"]]
    copied = {**raw, "device_traces": [list(t) for t in raw["device_traces"]]}
    recording = RawRecording(raw, from_raw(copied, "x"))
    timeline = build(recording.snapshot, recording.snapshot.devices[0])
    snapshot = cut(recording, timeline, 0, 3)
    last = max(event["time_us"] for event in snapshot["device_traces"][0])
    assert snapshot["device_traces"][1] and all(event["time_us"] <= last for event in snapshot["device_traces"][1])
    assert {segment["device"] for segment in snapshot["segments"]} == {0, 1}


def test_a_recording_that_can_not_be_replayed_is_not_cut() -> None:
    raw = modern()
    raw["segments"] = []  # the trace says otherwise
    copied = {**raw, "device_traces": [list(t) for t in raw["device_traces"]]}
    recording = RawRecording(raw, from_raw(copied, "x"))
    timeline = build(recording.snapshot, recording.snapshot.devices[0])
    assert not timeline.replay.exact
    with pytest.raises(NoAnswerError, match="not known"):
        cut(recording, timeline, 0, 2)
