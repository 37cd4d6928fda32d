"""speedscope and collapsed stacks: their own schema, and every byte in them."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from typing import Any

import jsonschema
import orjson
import pytest
from support import TRUTH, analysis

from memtrace.answers.report import report
from memtrace.export.flame import live_stacks, to_collapsed, to_speedscope, volume_stacks
from memtrace.history.timeline import choose_event
from memtrace.snapshot.model import Action

NAMES = ["tiny-llama_3-steps", "llama2-7b_oom-first-step", "llama2-7b_cpp-stacks", "llama2-7b_recorded-after-load"]


@lru_cache
def schema() -> Any:
    """speedscope's own, as its package ships it."""
    return json.loads((TRUTH / "speedscope" / "file-format-schema.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_live_bytes_follow_the_schema_and_sum_to_reserved(name: str) -> None:
    recording = analysis(name)
    at = choose_event(recording.timeline, None)
    stacks = live_stacks(recording, at)
    profile = json.loads(orjson.dumps(to_speedscope(stacks, name)))
    jsonschema.validate(profile, schema())
    sampled = profile["profiles"][0]
    assert sum(sampled["weights"]) == sampled["endValue"] == recording.timeline.curve_at(at.event)[2]
    assert all(0 <= frame < len(profile["shared"]["frames"]) for sample in sampled["samples"] for frame in sample)
    by_category: Counter[str] = Counter()
    for sample, weight in zip(sampled["samples"], sampled["weights"], strict=True):
        by_category[profile["shared"]["frames"][sample[0]]["name"]] += weight
    expected = {key: size for key, size in report(recording, at).categories.items() if size}
    assert dict(by_category) == expected


@pytest.mark.parametrize("name", NAMES[:2])
def test_volume_is_every_byte_ever_allocated(name: str) -> None:
    recording = analysis(name)
    stacks = volume_stacks(recording)
    jsonschema.validate(json.loads(orjson.dumps(to_speedscope(stacks, name))), schema())
    trace = recording.timeline.trace
    assert stacks.total_bytes == int(trace.size[trace.action == Action.ALLOC].sum())


@pytest.mark.parametrize("name", NAMES)
def test_collapsed_lines_parse_as_flamegraph_tools_do(name: str) -> None:
    recording = analysis(name)
    stacks = live_stacks(recording, choose_event(recording.timeline, None))
    total = 0
    for line in to_collapsed(stacks).splitlines():
        path, _, weight = line.rpartition(" ")
        assert path.split(";")[0] and all(path.split(";"))
        total += int(weight)
    assert total == stacks.total_bytes


def test_nothing_reserved_is_an_empty_profile() -> None:
    recording = analysis("llama2-7b_oom-at-load")
    stacks = live_stacks(recording, choose_event(recording.timeline, None))
    jsonschema.validate(to_speedscope(stacks, "x"), schema())
