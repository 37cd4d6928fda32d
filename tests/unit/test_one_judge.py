"""One judge: a snapshot, the failing process and a log's text of the same refusal get the same verdict."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from support import analysis, raw_recording

from memtrace.attribution.phases import Phase
from memtrace.explain.facts import ByteSpan, FactSource, OomFacts
from memtrace.explain.process_facts import facts_of_process, layers_by_name
from memtrace.explain.snapshot_facts import refused_at, verdict_at
from memtrace.explain.verdict import judge

OOMS = ["llama2-7b_oom-first-step", "llama2-7b_oom-fragmentation", "mistral-7b_oom-late-cpp", "qwen2-7b_oom-backward"]
MIB, GIB = 1 << 20, 1 << 30


def as_the_process_saw_it(name: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """A recording's last refusal as memtrace's recorder would have stood before it."""
    seen = analysis(name)
    timeline, phases = seen.timeline, seen.attribution.facts.phases
    event = timeline.oom_events[-1]
    raw = raw_recording(name)
    requested, allocated, reserved = timeline.curve_at(event)
    refused = refused_at(seen, event)
    assert refused is not None and refused.capacity is not None and timeline.trace.time_us is not None
    extra = {
        "oom": {"requested_bytes": int(timeline.trace.size[event])},
        "stats": {
            "allocated_bytes.all.current": allocated, "reserved_bytes.all.current": reserved,
            "requested_bytes.all.current": requested,
        },
        "device_free_bytes": timeline.trace.oom_device_free_bytes.get(event),
        "device_total_bytes": None,
        "limit_bytes": refused.capacity.low_bytes,
        "labels": [{"name": f"model.layers.{i}.mlp.up_proj.weight"} for i in range(32)],
        "phases": [
            {"time_us": int(timeline.trace.time_us[start]), "name": Phase(int(phase)).label, "step": int(step)}
            for start, phase, step in zip(phases.start[:-1].tolist(), phases.phase, phases.step, strict=True)
        ],
    }  # fmt: skip
    return extra, raw["device_traces"][0][: event + 1], raw.get("allocator_settings", {})


@pytest.mark.parametrize("name", OOMS)
def test_the_process_and_its_recording_agree(name: str) -> None:
    seen = analysis(name)
    extra, trace, settings = as_the_process_saw_it(name)
    facts = facts_of_process(extra, trace, settings)
    limited = extra["limit_bytes"]
    verdict, refused = verdict_at(seen, seen.timeline.oom_events[-1], limited)
    assert refused is not None
    for name in ("asked", "driver_asked", "allocated", "reserved", "slack", "room", "still_needed_bytes"):
        assert getattr(facts, name) == getattr(refused.facts, name), name
    assert judge(facts).verdict == verdict.verdict
    assert [line for line in judge(facts).because if "layers" in line] == [
        line for line in verdict.because if "layers" in line
    ]


def test_facts_decide_not_their_source() -> None:
    card = OomFacts(
        FactSource.SNAPSHOT, asked=ByteSpan.exactly(GIB), allocated=ByteSpan.exactly(18 * GIB),
        reserved=ByteSpan.exactly(23 * GIB),
        slack=ByteSpan.exactly(5 * GIB), free=ByteSpan.exactly(GIB // 2), total=ByteSpan.exactly(24 * GIB),
    )  # fmt: skip
    assert {judge(replace(card, source=source)).verdict for source in FactSource} == {"fragmentation"}
    short = replace(card, still_needed_bytes=20 * GIB)
    assert {judge(replace(short, source=source)).verdict for source in FactSource} == {"budget"}
    assert [judge(replace(card, source=source)).confidence for source in FactSource] == [
        "measured",
        "measured",
        "derived",
    ]
    assert judge(replace(card, is_exact=False)).confidence == "derived"


@pytest.mark.parametrize(
    ("changes", "verdict", "sure"),
    [
        # pieces of 2 % of the capacity and below are ordinary
        ({"allocated": 9800 * MIB, "slack": 200 * MIB, "asked": 150 * MIB}, "budget", False),
        ({"allocated": 9799 * MIB, "slack": 201 * MIB, "asked": 150 * MIB}, "fragmentation", True),
        ({"allocated": 9800 * MIB, "slack": 200 * MIB, "asked": 100 * MIB}, "budget", True),
        # what is still to come, against all that could have been had
        ({"still_needed_bytes": 2000 * MIB}, "fragmentation", True),
        ({"still_needed_bytes": 2001 * MIB}, "budget", False),
        ({"still_needed_bytes": 4000 * MIB}, "budget", True),
        # the pieces are short by a hair
        ({"asked": 2000 * MIB}, "fragmentation", True),
        ({"asked": 2001 * MIB}, "budget", True),
        # others' memory decides once it is more than this process's
        ({"total": 20000 * MIB}, "fragmentation", True),
        ({"total": 20001 * MIB}, "not_this_process", True),
    ],
)
def test_where_each_rule_turns(changes: dict[str, int], verdict: str, sure: bool) -> None:
    given = {
        "allocated": 8000 * MIB,
        "reserved": 10000 * MIB,
        "slack": 2000 * MIB,
        "asked": 1000 * MIB,
        "free": 0,
    } | changes
    facts = OomFacts(FactSource.PROCESS, **_spans(given))
    assert (judge(facts).verdict, judge(facts).confidence == "measured") == (verdict, sure)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({"allocated": 8499 * MIB}, "unknown"), ({"allocated": 8500 * MIB}, "budget"), ({"allocated": None}, "unknown")],
)
def test_a_text_without_pieces_is_judged_by_how_full_the_card_was(changes: dict[str, Any], verdict: str) -> None:
    given = {"asked": 0, "total": 10000 * MIB, "allocated": 0} | changes
    assert judge(OomFacts(FactSource.TEXT, **_spans(given))).verdict == verdict


def test_margins_of_drivers_and_small_tensors_make_a_text_a_guess() -> None:
    text = {"asked": 1000 * MIB, "total": 50000 * MIB, "free": 2000 * MIB, "reserved": 48000 * MIB, "slack": 0}
    assert judge(OomFacts(FactSource.TEXT, **_spans(text))).confidence == "derived"
    assert judge(OomFacts(FactSource.TEXT, **_spans(text | {"free": 1999 * MIB}))).confidence == "guess"
    pieces = {"asked": 2 * MIB, "total": 10000 * MIB, "free": 0, "allocated": 8000 * MIB, "reserved": 10000 * MIB,
              "slack": 2000 * MIB}  # fmt: skip
    assert judge(OomFacts(FactSource.TEXT, **_spans(pieces))).confidence == "guess"
    assert judge(OomFacts(FactSource.TEXT, **_spans(pieces | {"asked": 3 * MIB}))).confidence == "derived"


def _spans(given: dict[str, Any]) -> dict[str, Any]:
    plain = {"still_needed_bytes", "pieces", "usable_bytes"}
    assert given.keys() <= {field.name for field in fields(OomFacts)}
    return {k: v if k in plain or v is None else ByteSpan.exactly(v) for k, v in given.items()}


def test_layers_are_counted_by_their_names() -> None:
    names = [f"base.model.layers.{i}.experts.{e}.w1" for i in range(12) for e in range(8)] + ["head.1.weight"]
    assert layers_by_name(names) == 12
    assert layers_by_name(["model.embed.weight", "model.blocks.0.a"]) is None
