"""Predicted runs against recorded ones: the stream allocation by allocation, the three levels, the categories."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memtrace.allocator.config import AllocatorConfig
from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.options import RunOptions
from memtrace.estimate.placement import place
from memtrace.estimate.presets import gpu_preset, model_preset
from memtrace.estimate.stream import EMPTY_CACHE, Stream, live_at

TRUTH = Path(__file__).parent.parent / "truth" / "measured" / "recorded_streams.json"
RECORDED: dict[str, dict[str, Any]] = json.loads(TRUTH.read_text())
WITH_LOAD = [name for name, run in RECORDED.items() if "sha256" in run]
COMPLETE = [name for name, run in RECORDED.items() if not run["out_of_memory"]]
GIB = 1 << 30


@cache
def stream_of(name: str) -> Stream:
    run = RECORDED[name]
    options = RunOptions(**run["options"])
    shape = model_preset(run["model"])
    shape = replace(shape, layers=run.get("layers", shape.layers))
    return simulate_run(shape, options, gpu_preset("h200").device, steps=run["steps"])


def digest(stream: Stream, allocations: int) -> str:
    """One line an allocation: what was freed since the one before, and its size."""
    line = hashlib.sha256()
    freed: list[int] = []
    for entry in stream.events:
        if entry < 0:
            freed.append(~entry)
        elif entry < EMPTY_CACHE:
            if entry == allocations:
                break
            line.update(f"{sorted(freed)} {stream.sizes[entry]}\n".encode())
            freed = []
    return line.hexdigest()


@pytest.mark.parametrize("name", WITH_LOAD)
def test_stream_equals_the_recording(name: str) -> None:
    run = RECORDED[name]
    stream = stream_of(name)
    if not run["out_of_memory"]:
        assert len(stream.sizes) == run["allocations"]
    assert digest(stream, run["allocations"]) == run["sha256"]


@pytest.mark.parametrize("name", COMPLETE)
def test_all_three_levels_equal_pytorchs_statistics(name: str) -> None:
    placement = place(stream_of(name))
    peaks = RECORDED[name]["peaks"]
    assert int(placement.requested.max()) == peaks["requested"]
    assert int(placement.allocated.max()) == peaks["allocated"]
    assert int(placement.reserved.max()) == peaks["reserved"]


def test_the_same_request_is_refused_under_the_same_limit() -> None:
    run = RECORDED["llama2-7b_oom-first-step"]
    placement = place(stream_of("llama2-7b_oom-first-step"), AllocatorConfig(limit_bytes=int(22.5 * GIB)))
    assert placement.refused_event is not None
    assert stream_of("llama2-7b_oom-first-step").events[placement.refused_event] == run["allocations"]
    for level in ("requested", "allocated", "reserved"):
        assert int(getattr(placement, level).max()) == run["peaks"][level]


@pytest.mark.parametrize("name", WITH_LOAD)
def test_categories_at_the_peak_equal_the_truth(name: str) -> None:
    run, stream = RECORDED[name], stream_of(name)
    event = stream.events.index(run["peak_allocation"])
    found = dict.fromkeys(run["peak_categories"], 0)
    for index in live_at(stream, event):
        found[stream.labels[index].partition("/")[0]] += stream.sizes[index]
    total = sum(run["peak_categories"].values())
    assert sum(found.values()) == total
    for category, size in run["peak_categories"].items():
        # A cuBLASLt workspace counts as the product's own in the truth, as runtime here: 2 MiB at most.
        assert abs(found[category] - size) <= max(2 << 20 if category in ("runtime", "base_weights") else 0, 0)
        if category != "runtime":
            assert abs(found[category] - size) <= 0.001 * size
