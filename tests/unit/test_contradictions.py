"""Files edited by hand: no share above 100 %, no negative size, no claim to be exact, and a line that says so."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any

import pytest
import support
from damaged_snapshots import EDITS, Edit, without_trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrace.analysis import Analysis, analyse
from memtrace.answers.report import report
from memtrace.errors import SnapshotError
from memtrace.explain.explain import explain_snapshot
from memtrace.history.timeline import LEVELS_CONTRADICT, build, choose_event
from memtrace.render.explain_text import render_explanation
from memtrace.render.fragmentation_text import render_fragmentation
from memtrace.render.report_text import render_report
from memtrace.snapshot.load import from_raw

FINAL_STATE = {
    "scale_segments", "shrink_segments", "shrink_segments_and_blocks", "scale_blocks", "duplicate_segments",
    "overlap_segments", "request_above_block", "empty_blocks",
}  # fmt: skip


@cache
def _pickled(name: str) -> bytes:
    return pickle.dumps(support.raw_recording(name))


def original(name: str) -> dict[str, Any]:
    """A recording's content, to be edited: a copy by way of a pickle takes a fraction of what deepcopy takes."""
    return pickle.loads(_pickled(name))


@lru_cache(maxsize=1)
def edited(name: str, *edits: Edit) -> Analysis:
    raw = original(name)
    for edit in edits:
        edit(raw)
    snapshot = from_raw(raw, "edited")
    return analyse(build(snapshot, snapshot.devices[0]))


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers(item, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def check(analysis: Analysis, at: str | None) -> None:
    """What holds for any file."""
    moment = choose_event(analysis.timeline, at)
    budget = report(analysis, moment)
    assert sum(budget.categories.values()) == budget.reserved_bytes
    assert sum(budget.subcategories.values()) == budget.reserved_bytes
    assert budget.allocated_bytes <= budget.reserved_bytes
    assert budget.fragmentation.utilisation <= 1
    assert budget.fragmentation.peak_utilisation <= 1
    negative = [(p, n) for p, n in numbers(budget) if n < 0 and not p.endswith((".event", ".step", ".stream"))]
    assert negative == []
    explanation = explain_snapshot(analysis, moment)
    text = "\n".join(
        [
            line.plain
            for line in (*render_report(budget), *render_fragmentation(budget.fragmentation, budget.lora["meaning"]))
        ]
        + render_explanation(explanation)
    )
    shares = [float(found.replace(",", "")) for found in re.findall(r"(-?\d[\d,]*(?:\.\d+)?)\s?%", text)]
    assert all(0 <= share <= 100 for share in shares), text
    assert not re.search(r"(?<![\w.\]–-])-\d[\d.,]* (?:B|[KMGT]iB)", text), text


@pytest.mark.parametrize("at", [None, "peak", "end"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_oom-first-step"])
def test_an_edited_recording_is_told_from_a_real_one(name: str, edit: str, at: str | None) -> None:
    analysis = edited(name, EDITS[edit])
    check(analysis, at)
    assert not analysis.timeline.replay.exact
    assert any("could not be reproduced" in line for line in analysis.caveats)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_oom-first-step"])
def test_a_final_state_alone_contradicts_itself_or_is_possible(name: str, edit: str) -> None:
    analysis = edited(name, without_trace, EDITS[edit])
    check(analysis, None)
    assert analysis.timeline.replay.exact == (edit not in FINAL_STATE)
    assert any("contradicts itself" in line for line in analysis.caveats) == (edit in FINAL_STATE)


@pytest.mark.parametrize("edit", ["scale_trace", "shrink_segment_events", "more_released_than_grown"])
def test_levels_that_contradict_each_other_are_said_and_withheld(edit: str) -> None:
    analysis = edited("tiny-llama_3-steps", EDITS[edit])
    assert LEVELS_CONTRADICT in analysis.caveats


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(EDITS)), min_size=2, max_size=4), st.sampled_from([None, "peak", "end"]))
def test_edits_on_top_of_each_other(names: list[str], at: str | None) -> None:
    check(edited("tiny-llama_3-steps", *(EDITS[name] for name in names)), at)


@pytest.mark.parametrize("key", ["size", "requested_size"])
def test_sizes_that_are_no_integers_are_refused(key: str) -> None:
    raw = original("tiny-llama_3-steps")
    block = raw["segments"][0]["blocks"][0]
    block[key] = float(block[key])
    with pytest.raises(SnapshotError, match="expected an integer"):
        from_raw(raw, "edited")


@pytest.mark.parametrize("name", support.NAMES)
def test_no_bundled_recording_contradicts_itself(name: str) -> None:
    assert not any("contradict" in line for line in support.analysis(name).caveats)
