"""Scores an attribution against the truth labels of a recording, by category and by purpose (category/subcategory)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Purpose
from memtrace.attribution.classify import Attribution
from memtrace.history.timeline import Timeline

P = Purpose

# The labelling's words of before, as purposes. It does not tell 4-bit weights from others, nor inputs of checkpointed
# blocks from other saved tensors: either is right there.
WORDS: dict[str, tuple[Purpose, ...]] = {
    "base_weights/weight": (P.QUANTIZED, P.UNQUANTIZED),
    "base_weights/quant_const": (P.QUANT_STATE,),
    "base_weights/load_temp": (P.LOADING,),
    "lora/param": (P.PARAMS,),
    "lora/init_temp": (P.PARAMS,),
    "lora/grad": (P.GRADS,),
    "lora/optstate": (P.OPTIMIZER_STATE,),
    "activations/held": (P.SAVED, P.CHECKPOINT_INPUT),
    "activations/saved": (P.SAVED, P.CHECKPOINT_INPUT),
    "activations/unfinished": (P.SAVED, P.CHECKPOINT_INPUT),
    "temporary/loss_grad": (P.LOSS,),
    "runtime/cublas": (P.CUBLAS_WORKSPACE,),
}


def meant_by(label: str) -> tuple[Purpose, ...]:
    """What is right where the truth says ``label``."""
    return WORDS[label] if label in WORDS else (Purpose(label),)


@dataclass(frozen=True, slots=True)
class Score:
    """Shares (0 to 1) of bytes whose category, and whose purpose, is right, at the peak and overall; the confusions of
    purposes in bytes."""

    at_peak: float
    overall: float
    purpose_at_peak: float
    purpose_overall: float
    unattributed_at_peak: float
    wrong: Counter[tuple[str, str]]


def score(timeline: Timeline, attribution: Attribution, truth: dict[str, Any]) -> Score:
    """Compare byte by byte. ``truth`` is a recording's ``labels.json``."""
    table, peak = timeline.allocations, truth["peak_event"]
    said = [rule.purpose for rule in attribution.rules]
    by, size = attribution.rule.astype(np.int64), table.requested_bytes
    born, freed = table.alloc_event, table.free_completed_event
    at_peak = (born <= peak) & ((freed < 0) | (freed > peak))
    words, wanted = _labels_of(born, truth)
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    for where, rows in (("all", wanted >= 0), ("peak", (wanted >= 0) & at_peak)):
        for pair, count in _sums(wanted[rows] * len(said) + by[rows], size[rows]):
            label, purpose = words[pair // len(said)], said[pair % len(said)]
            meant = meant_by(label)
            total[where] += count
            right[where] += count * (purpose.category is meant[0].category)
            right[where + " purpose"] += count * (purpose in meant)
            if where == "all" and purpose not in meant:
                wrong[label, str(purpose)] += count
    # Memory from before the recording has no events: there, the truth is a total for each label, of what is left of it
    # at the peak.
    early: Counter[Purpose] = Counter()
    for number, count in _sums(by[at_peak & (born < 0)], size[at_peak & (born < 0)]):
        early[said[number]] += count
    left = Counter(truth["peak_breakdown"])
    for number, count in _sums(wanted[at_peak & (born >= 0)], size[at_peak & (born >= 0)]):
        left[words[number] if number >= 0 else "unlabelled"] -= count
    categories: Counter[str] = Counter()
    purposes: Counter[tuple[Purpose, ...]] = Counter()
    for label in truth["before_recording"]:
        if label != "unlabelled":
            categories[meant_by(label)[0].category] += left[label]
            purposes[meant_by(label)] += left[label]
    for category, count in categories.items():
        total["peak"] += count
        right["peak"] += min(count, sum(n for purpose, n in early.items() if purpose.category == category))
    for meant, count in purposes.items():
        found = sum(early[purpose] for purpose in meant)
        right["peak purpose"] += min(count, found)
        if found != count:
            wrong["before the recording", "/".join(meant)] += abs(count - found)
    lost = int(size[at_peak & attribution.rows_of(Purpose.UNATTRIBUTED)].sum())
    return Score(
        at_peak=right["peak"] / total["peak"],
        overall=right["all"] / total["all"],
        purpose_at_peak=right["peak purpose"] / total["peak"],
        purpose_overall=right["all purpose"] / total["all"],
        unattributed_at_peak=lost / total["peak"],
        wrong=wrong,
    )


def _labels_of(born: NDArray[np.int64], truth: dict[str, Any]) -> tuple[list[str], NDArray[np.int64]]:
    """The truth's words, and for each allocation which of them it has; -1 for none."""
    numbers: dict[str, int] = {}
    label = np.array([-1 if word is None else numbers.setdefault(word, len(numbers)) for word in truth["label"]])
    events = np.asarray(truth["event_index"])
    order = np.argsort(events)
    place = order[np.searchsorted(events, born, sorter=order).clip(max=len(events) - 1)]
    return list(numbers), np.where(events[place] == born, label[place], -1)


def _sums(keys: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Each key and its bytes."""
    found, place = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(found), np.int64)
    np.add.at(sums, place, sizes)
    return list(zip(found.tolist(), sums.tolist(), strict=True))
