"""Twice as much of anything a file can hold is at most some 2.5 times the work, counted in calls and in memory."""

from __future__ import annotations

import cProfile
import gc
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strategies import BASE, FRAME, MIB, event, modern, segment
from strategies import block as made_block

from memtrace.cli import main

Raw = dict[str, Any]
SIZE = 100


def segments(count: int) -> Raw:
    raw = modern()
    raw["segments"] += [segment(BASE + ((i + 2) << 30), [made_block(2 * MIB, 2 * MIB)]) for i in range(count)]
    return raw


def blocks(count: int) -> Raw:
    raw = modern()
    states = ("active_allocated", "inactive")
    raw["segments"].append(segment(BASE + (5 << 30), [made_block(MIB, MIB, states[i % 2]) for i in range(2 * count)]))
    return raw


def pools(count: int) -> Raw:
    raw = modern()
    raw["segments"] += [
        segment(BASE + ((i + 2) << 30), [made_block(2 * MIB, 2 * MIB)], segment_pool_id=(0, i + 1))
        for i in range(count)
    ]
    return raw


def events(count: int, **more: Callable[[int], Any]) -> Raw:
    raw = modern()
    for i in range(count):
        at = BASE + (2 << 30) + i * 2 * MIB
        extra = {key: value(i) for key, value in more.items()}
        pair = [event("segment_alloc", at, 2 * MIB, 10 + i), event("alloc", at, 2 * MIB, 10 + i)]
        raw["device_traces"][0] += [made | extra for made in pair]
        raw["segments"].append(segment(at, [made_block(2 * MIB, 2 * MIB)]))
    return raw


def pairs(count: int) -> Raw:
    """Allocations that are freed again."""
    raw = modern()
    for i in range(count):
        for action in ("alloc", "free_requested", "free_completed"):
            raw["device_traces"][0].append(event(action, BASE + 2 * MIB, 3 * MIB, 10 + i))
    return raw


def ooms(count: int) -> Raw:
    raw = modern()
    raw["device_traces"][0] += [event("oom", 1 << 20, 1 << 40, 10 + i, device_free=5) for i in range(count)]
    return raw


def devices(count: int) -> Raw:
    raw = modern()
    trace = raw["device_traces"][0]
    raw["device_traces"] = [list(trace) for _ in range(count // 4)]
    for number in range(1, count // 4):
        raw["segments"] += [dict(each, device=number) for each in modern()["segments"]]
    return raw


def one_stack(count: int) -> Raw:
    """A deep stack, and as many blocks that share it."""
    frames = [dict(FRAME, line=i, name=f"f{i}") for i in range(4 * count)]
    raw = modern()
    shared = [{**made_block(MIB, MIB), "frames": frames} for _ in range(4 * count)]
    raw["segments"].append(segment(BASE + (5 << 30), shared))
    for made in raw["segments"][-1]["blocks"]:
        made["frames"] = frames
    return raw


def extra(key: str, make: Callable[[int], Any]) -> Callable[[int], Raw]:
    return lambda count: modern() | {"memtrace": {"version": 1, key: make(count)}}


LISTS: dict[str, Callable[[int], Raw]] = {
    "segments": segments,
    "blocks": blocks,
    "pools": pools,
    "pools of events": lambda count: events(count, pool_id=lambda i: (0, i + 1)),
    "streams": lambda count: events(count, stream=lambda i: i),
    "stacks": lambda count: events(count, frames=lambda i: [dict(FRAME, line=i, name=f"f{i}")]),
    "metadata": lambda count: events(count, user_metadata=lambda i: f"name.{i}"),
    "frames": lambda count: events(10, frames=lambda i: [dict(FRAME, line=j, name=f"f{j}") for j in range(count)]),
    "one deep stack": one_stack,
    "frees": pairs,
    "annotations": lambda count: modern() | {"external_annotations": [
        {"device": 0, "time_us": i, "name": f"a{i}", "stage": ("START", "END")[i % 2]} for i in range(4 * count)]},
    "settings": lambda count: modern() | {"allocator_settings": {
        "PYTORCH_CUDA_ALLOC_CONF": ",".join(f"a{i}:1" for i in range(4 * count)),
        **{f"k{i}": i for i in range(count)}}},
    "unknown keys": lambda count: modern() | {f"k{i}": i for i in range(4 * count)},
    "ooms": ooms,
    "devices": devices,
    "phases": extra("phases", lambda count: [{"time_us": i, "name": f"p{i}", "step": i} for i in range(count)]),
    "labels": extra("labels", lambda count: [
        {"address": BASE + i, "bytes": 512, "category": "lora", "subcategory": "params", "name": f"l{i}"}
        for i in range(count)]),
    "problems": extra("problems", lambda count: [f"problem {i}" for i in range(count)]),
    "packages": extra("packages", lambda count: {f"p{i}": "1.0" for i in range(count)}),
    "steps": extra("steps", lambda count: {"columns": ["step", "time_us"], "rows": [[i, i] for i in range(count)]}),
    "models": extra("config", lambda count: {"models": [{"class": f"M{i}", "parameters": i} for i in range(count)]}),
    "configuration": extra("config", lambda count: {f"k{i}": i for i in range(count)}),
    "statistics": extra("stats", lambda count: {f"allocation.all.peak{i}": i for i in range(count)}),
}  # fmt: skip
# What stands in the extra key, in settings and annotations, explain reads as segments does, and more of it.
SAID = LISTS.keys() - {"segments", "blocks", "pools", "pools of events", "streams", "stacks", "metadata", "frames",
                       "one deep stack", "frees", "ooms", "devices"}  # fmt: skip
VERBS = [["explain", "--json"], ["segments", "--json"], ["simulate", "--json"], ["scrub", "--check"]]
CASES = [(what, verb) for what in LISTS for verb in VERBS
         if not (verb[0] in ("segments", "simulate") and what in SAID)]  # fmt: skip
CASES += [(what, ["export", "-f", "chrome"]) for what in ("annotations", "phases", "ooms", "frees")]  # what tracks show


def work(path: Path, verb: list[str], memory: bool) -> tuple[int, int]:
    """(calls of Python and C functions, bytes held at the most if ``memory`` is watched)."""
    counted, peak = cProfile.Profile(), 0
    gc.collect()
    if memory:
        tracemalloc.start()
    counted.enable()
    try:
        main([verb[0], str(path), *verb[1:]])
    finally:
        counted.disable()
        if memory:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return sum(function.callcount for function in counted.getstats()), peak


@pytest.mark.parametrize(("what", "verb"), CASES, ids=[f"{what}-{verb[0]}" for what, verb in CASES])
def test_twice_as_much_is_twice_the_work(
    what: str, verb: list[str], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    paths = [tmp_path / f"{doublings}.pickle" for doublings in range(3)]
    for doublings, path in enumerate(paths):
        path.write_bytes(pickle.dumps(LISTS[what](SIZE << doublings), 4))
    main([verb[0], str(paths[0]), *verb[1:]])  # imports, and expressions that are compiled once
    costs = [work(path, verb, path is not paths[0]) for path in paths]
    if not is_linear(costs):  # an expression may be compiled again in the middle, once the library's cache is full
        again = [work(path, verb, path is not paths[0]) for path in paths]
        costs = [(min(a, b), min(c, d)) for (a, c), (b, d) in zip(costs, again, strict=True)]
    assert is_linear(costs), costs


def is_linear(costs: list[tuple[int, int]]) -> bool:
    """Whether the second doubling costs about twice what the first did, without what any file costs, and memory."""
    first, second, third = (calls for calls, _ in costs)
    return third - second < 2.5 * max(second - first, 0) + 0.3 * first and costs[2][1] < 2.5 * costs[1][1]
