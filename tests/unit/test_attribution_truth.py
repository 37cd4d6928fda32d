"""The attribution against the truth of labelled recordings: identity and operators, never memtrace's own rules."""

from __future__ import annotations

import numpy as np
import pytest
from scoring import score
from support import LABELLED, analysis, labels

from memtrace.answers.report import report
from memtrace.attribution.categories import SUBCATEGORIES, Category


@pytest.mark.parametrize("name", LABELLED)
def test_shares_right(name: str) -> None:
    made = analysis(name)
    result = score(made.timeline, made.attribution, labels(name))
    assert result.at_peak >= 0.99, result.wrong.most_common(5)
    assert result.overall >= 0.97


@pytest.mark.parametrize("name", LABELLED)
def test_little_is_left_unattributed_at_the_peak(name: str) -> None:
    budget = report(analysis(name))
    assert budget.attribution.unattributed_bytes <= 0.005 * budget.attribution.attributed_bytes


@pytest.mark.parametrize("name", LABELLED)
def test_every_rule_names_a_defined_category(name: str) -> None:
    for rule in analysis(name).attribution.rules:
        assert rule.subcategory in SUBCATEGORIES[rule.category]
        assert rule.why and rule.id


def test_rule_ids_are_unique() -> None:
    ids = [rule.id for rule in analysis("tiny-llama_3-steps").attribution.rules]
    assert len(ids) == len(set(ids))


def test_phases_match_the_recorded_marks() -> None:
    """Forward, backward and optimizer begin where the recorded program said they did, to within a few events."""
    from support import info

    name = "llama2-7b_baseline"
    made = analysis(name)
    times, phases = made.timeline.trace.time_us, made.attribution.facts.phases
    assert times is not None
    starts = {
        label: phases.start[:-1][phases.phase == number]
        for label, number in (("forward", 2), ("backward", 3), ("optimizer", 4))
    }
    moves = np.flatnonzero(made.timeline.trace.action <= 1)
    for mark_us, label in info(name)["marks"]:
        if label not in starts or (label == "optimizer" and mark_us > info(name)["marks"][7][0]):
            continue  # the second optimizer step allocates nothing
        marked = int(np.searchsorted(times, mark_us))
        nearest = starts[label][np.argmin(np.abs(starts[label] - marked))]
        assert np.sum((moves >= min(marked, nearest)) & (moves < max(marked, nearest))) <= 8, (label, marked, nearest)


def test_unattributed_memory_says_why() -> None:
    from strategies import modern

    from memtrace.analysis import analyse
    from memtrace.history.timeline import build
    from memtrace.snapshot.load import from_raw

    raw = modern()
    raw["device_traces"] = []
    snapshot = from_raw(raw, "x")
    budget = report(analyse(build(snapshot, snapshot.devices[0])))
    assert budget.categories[Category.UNATTRIBUTED] == (2 << 20) + 100
    assert "no trace" in budget.attribution.unattributed[0].reason
