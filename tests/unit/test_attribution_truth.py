"""The attribution against the truth of labelled recordings: identity and operators, never memtrace's own rules."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support import LABELLED, analysis, labels

from memtrace.attribution.categories import SUBCATEGORIES, Category
from memtrace.report import report


def score(name: str) -> tuple[float, float, Counter[tuple[str, str]]]:
    """(share of the peak's bytes right, share of all allocated bytes right, confusions at the peak in bytes)."""
    made, truth = analysis(name), labels(name)
    table, peak = made.timeline.allocations, truth["peak_event"]
    said = made.attribution.categories()
    size, born, freed = table.requested_bytes, table.alloc_event, table.free_completed_event
    at_peak = (born <= peak) & ((freed < 0) | (freed > peak))
    wanted = dict(zip(truth["event_index"], truth["label"], strict=True))
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    for row in range(len(table)):
        label = wanted.get(int(born[row]))
        if label is None:
            continue
        hit = label.split("/")[0] == said[row]
        for where in ("all", "peak") if at_peak[row] else ("all",):
            total[where] += int(size[row])
            right[where] += int(size[row]) * hit
        if at_peak[row] and not hit:
            wrong[label, said[row]] += int(size[row])
    # Memory from before the recording has no events: there, the truth is a total for each label.
    before: Counter[str] = Counter()
    for label, count in truth["before_recording"].items():
        if label != "unlabelled":
            before[label.split("/")[0]] += count
    early = at_peak & (born < 0)
    for category, count in before.items():
        total["peak"] += count
        right["peak"] += min(count, int(size[early & (said == category)].sum()))
    return right["peak"] / total["peak"], right["all"] / total["all"], wrong


@pytest.mark.parametrize("name", LABELLED)
def test_shares_right(name: str) -> None:
    at_peak, overall, wrong = score(name)
    assert at_peak >= 0.99, wrong.most_common(5)
    assert overall >= 0.97


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

    from memtrace.report import analyse
    from memtrace.snapshot.load import from_raw
    from memtrace.timeline import build

    raw = modern()
    raw["device_traces"] = []
    snapshot = from_raw(raw, "x")
    budget = report(analyse(build(snapshot, snapshot.devices[0])))
    assert budget.categories[Category.UNATTRIBUTED] == (2 << 20) + 100
    assert "no trace" in budget.attribution.unattributed[0].reason
