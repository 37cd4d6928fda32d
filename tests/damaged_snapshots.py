"""Edits by hand on a recording's dictionary that leave a file which no allocator can have written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Raw = dict[str, Any]


def _traces(raw: Raw) -> list[list[dict[str, Any]]]:
    return [trace for trace in raw["device_traces"] if trace]


def scale_trace(raw: Raw, factor: int = 10) -> None:
    for trace in _traces(raw):
        for event in trace:
            if event["action"] in ("alloc", "free_requested", "free_completed"):
                event["size"] *= factor


def scale_segments(raw: Raw, factor: int = 10) -> None:
    for segment in raw["segments"]:
        segment["total_size"] *= factor


def shrink_segments(raw: Raw) -> None:
    for segment in raw["segments"]:
        segment["total_size"] //= 8


def shrink_segments_and_blocks(raw: Raw) -> None:
    for segment in raw["segments"]:
        segment["total_size"] = 0
        for block in segment["blocks"]:
            block["size"] //= 8
            segment["total_size"] += block["size"]


def scale_blocks(raw: Raw) -> None:
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            block["size"] *= 10


def drop_segments(raw: Raw) -> None:
    raw["segments"] = raw["segments"][::2]


def drop_most_segments(raw: Raw) -> None:
    raw["segments"] = raw["segments"][:1]


def duplicate_segments(raw: Raw) -> None:
    raw["segments"] += copy.deepcopy(raw["segments"])


def overlap_segments(raw: Raw) -> None:
    """Every second segment starts in the middle of the one before it."""
    segments = sorted(raw["segments"], key=lambda segment: segment["address"])
    for before, segment in zip(segments[::2], segments[1::2], strict=False):
        shift = before["address"] + before["total_size"] // 2 - segment["address"]
        segment["address"] += shift
        for block in segment["blocks"]:
            if "address" in block:
                block["address"] += shift


def request_above_block(raw: Raw) -> None:
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                block["requested_size"] = block["size"] * 3


def empty_blocks(raw: Raw) -> None:
    for segment in raw["segments"]:
        segment["blocks"] = []


def all_in_use(raw: Raw) -> None:
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            block["state"] = "active_allocated"
            block["requested_size"] = block["size"]


def _cut(raw: Raw, first: float, stop: float) -> None:
    raw["device_traces"] = [t[int(len(t) * first) : int(len(t) * stop)] for t in raw["device_traces"]]


def first_half(raw: Raw) -> None:
    _cut(raw, 0, 0.5)


def without_middle(raw: Raw) -> None:
    raw["device_traces"] = [t[: len(t) // 4] + t[3 * len(t) // 4 :] for t in raw["device_traces"]]


def without_segment_events(raw: Raw) -> None:
    raw["device_traces"] = [[e for e in t if not e["action"].startswith("segment")] for t in raw["device_traces"]]


def without_frees(raw: Raw) -> None:
    raw["device_traces"] = [[e for e in t if not e["action"].startswith("free")] for t in raw["device_traces"]]


def twice(raw: Raw) -> None:
    raw["device_traces"] = [t + copy.deepcopy(t) for t in raw["device_traces"]]


def reversed_trace(raw: Raw) -> None:
    raw["device_traces"] = [t[::-1] for t in raw["device_traces"]]


def scale_one_segment_event(raw: Raw) -> None:
    for trace in _traces(raw):
        event = next((e for e in trace if e["action"] in ("segment_alloc", "segment_map")), None)
        if event is not None:
            event["size"] *= 50


def shrink_segment_events(raw: Raw) -> None:
    for trace in _traces(raw):
        for event in trace:
            if event["action"] in ("segment_alloc", "segment_map"):
                event["size"] //= 8


def more_released_than_grown(raw: Raw) -> None:
    """Releases of segments that were never there."""
    for trace in _traces(raw):
        released = [{**e, "action": "segment_free"} for e in trace if e["action"] == "segment_alloc"]
        trace += copy.deepcopy(released) * 2


def other_run(raw: Raw) -> None:
    """The segments of another process: the same sizes elsewhere."""
    for segment in raw["segments"]:
        segment["address"] += 1 << 44
        for block in segment["blocks"]:
            if "address" in block:
                block["address"] += 1 << 44


Edit = Callable[[Raw], None]
EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        scale_trace, scale_segments, shrink_segments, shrink_segments_and_blocks, scale_blocks, drop_segments,
        drop_most_segments, duplicate_segments, overlap_segments, request_above_block, empty_blocks, all_in_use,
        first_half, without_middle, without_segment_events, without_frees, twice, reversed_trace,
        scale_one_segment_event, shrink_segment_events, more_released_than_grown, other_run,
    )
}  # fmt: skip


def without_trace(raw: Raw) -> None:
    """Only the final state stays."""
    raw["device_traces"] = [[] for _ in raw["device_traces"]]
