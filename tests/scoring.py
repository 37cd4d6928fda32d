"""Scores an attribution against the truth labels of a recording."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from memtrace.attribution.classify import Attribution
from memtrace.history.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Score:
    """Shares (0 to 1) of bytes whose category is right, at the peak and overall; the peak's confusions in bytes."""

    at_peak: float
    overall: float
    unattributed_at_peak: float
    wrong: Counter[tuple[str, str]]


def score(timeline: Timeline, attribution: Attribution, truth: dict[str, Any]) -> Score:
    """Compare categories byte by byte. ``truth`` is a recording's ``labels.json``."""
    table, peak = timeline.allocations, truth["peak_event"]
    said = attribution.categories()
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
            wrong[label, str(said[row])] += int(size[row])
    # Memory from before the recording has no events: there, the truth is a total for each label.
    before: Counter[str] = Counter()
    for label, count in truth["before_recording"].items():
        if label != "unlabelled":
            before[label.split("/")[0]] += count
    early = at_peak & (born < 0)
    for category, count in before.items():
        total["peak"] += count
        right["peak"] += min(count, int(size[early & (said == category)].sum()))
    lost = int(size[at_peak & (said == "unattributed")].sum())
    return Score(right["peak"] / total["peak"], right["all"] / total["all"], lost / total["peak"], wrong)
