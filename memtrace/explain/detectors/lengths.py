"""Sequence lengths that differ from step to step: memory in pieces, and the one batch that is too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memtrace.answers.fragmentation import measure
from memtrace.arrays import place_of
from memtrace.attribution.categories import Category
from memtrace.explain.advice import formula, settings_to_try
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import Seen, detector
from memtrace.history.timeline import At
from memtrace.units import counted
from memtrace.units import format_bytes as size

_LEAST_PASSES = 3
_LEAST_LENGTHS = 3
_LONGER = 1.25
_PADDING_SHARE = 0.2


def pass_sizes(case: Case) -> list[int]:
    """Bytes of the embedding's output in each pass (up to the event if memory ran out there), so, its tokens.

    Without an embedding on the stacks, the largest tensor of the forward pass stands in for it. Zeros are left out.
    """
    born, embedded = case.facts.born, case.attribution.serving("embedding")
    rows = embedded if embedded.any() else case.facts.pass_end >= 0
    result = []
    for one in case.passes:
        if one.start > case.at.event and case.is_oom:
            break
        mine = slice(place_of(born, one.start), place_of(born, one.end))
        result.append(int(case.size[mine][rows[mine]].max(initial=0)))
    return [n for n in result if n]


def _lengths_vary(sizes: list[int]) -> bool:
    """Whether passes worked on at least three different numbers of tokens."""
    return len(sizes) >= _LEAST_PASSES and len(set(sizes)) >= _LEAST_LENGTHS


@detector("Sequences of different lengths leave memory in pieces", least=0)
def variable_length_fragmentation(case: Case) -> Seen | None:
    """Passes of different lengths left free pieces that later requests can't use."""
    sizes = pass_sizes(case)
    if not _lengths_vary(sizes):
        return None
    why = (
        f"; {len(sizes)} passes had {len(set(sizes))} different lengths, the longest {max(sizes) / min(sizes):.1f} "
        "times the shortest"
    )
    return _in_pieces(case, 0.03, why)


@detector("Reserved memory that is free in pieces", least=0)
def reserved_in_pieces(case: Case) -> Seen | None:
    """The same without different lengths: pieces between tensors of different lifetimes."""
    return None if _lengths_vary(pass_sizes(case)) else _in_pieces(case, 0.03 if case.is_oom else 0.1)


def _in_pieces(case: Case, least: float, why: str = "") -> Seen | None:
    """What is free inside reserved memory at the refusal, else where reserved memory was highest. It costs all that is
    free at a refusal, else what was reserved beyond the most ever allocated."""
    _, allocated, reserved = case.timeline.peaks()
    waste, event = reserved.size_bytes - allocated.size_bytes, reserved.event
    if case.is_oom:
        waste, event = case.reserved_bytes - case.allocated_bytes, case.at.event
    if not case.is_material(waste, least) or (case.is_oom and case.verdict.verdict == "budget"):
        return None
    found = measure(case.timeline, case.attribution, At("event", event, case.timeline.time_us(event)))
    when = "at the refusal" if case.is_oom else "where reserved memory was highest"
    free, count = found.reserved_bytes - found.allocated_bytes, found.free_block_count
    told = f"{size(free)} of {size(found.reserved_bytes)} reserved was free in {counted(count, 'piece')} {when}{why}."
    if why or count > 1:
        return Seen(None, told, tuple(settings_to_try(case)), size_bytes=waste)
    return Seen(None, told, size_bytes=waste, title="Reserved memory that is free, in one piece")


@detector("This batch has more tokens than usual", least=0.05)
def padding_or_packing(case: Case) -> Seen | None:
    """The pass in question has clearly more tokens than usual, so its activations are what is too much."""
    sizes = pass_sizes(case)
    if case.here is None or len(sizes) != len(case.passes) or len(sizes) <= _LEAST_PASSES:
        return None
    mine = case.passes.index(case.here)
    now, usual = sizes[mine], float(np.median([*sizes[:mine], *sizes[mine + 1 :]]))
    if now < _LONGER * usual:
        return None
    of_pass = case.kind(Category.ACTIVATIONS, Category.TEMPORARY) & case.live & (case.facts.born >= case.here.start)
    extra = round(case.total(of_pass) * (1 - usual / now))
    rank = "the longest" if now >= max(sizes) else "one of the longest"
    cut: dict[str, Any] = {"max_length": int(case.dims.tokens * (usual / now))} if case.dims is not None else {}
    evidence = (
        f"{rank} of {len(sizes)} batches: {now / usual:.2f} times the tokens of the median one, and with them "
        f"{size(extra)} more activations."
    )
    return Seen(None, evidence, (formula("length", of_pass, 1 - usual / now, **cut),), size_bytes=extra)


@detector("One long sequence pads the others of its batch", least=0.05)
def padding_by_one_outlier(case: Case) -> Seen | None:
    """The recorder's lengths of the largest batch: without its longest sequence all would be clearly shorter."""
    run = case.timeline.snapshot.config.get("run")
    lengths = run.get("lengths") if isinstance(run, Mapping) else None
    sizes = pass_sizes(case)
    if not isinstance(lengths, list) or len(lengths) < 2 or case.here is None or len(sizes) != len(case.passes):
        return None
    *_, second, longest = sorted(int(length) for length in lengths)
    share = 1 - second / max(longest, 1)
    if share < _PADDING_SHARE or sizes[case.passes.index(case.here)] < max(sizes):
        return None
    of_pass = case.kind(Category.ACTIVATIONS, Category.TEMPORARY) & case.live & (case.facts.born >= case.here.start)
    evidence = (
        f"one of {len(lengths)} sequences has {longest:,} tokens, the next longest {second:,}: {share:.0%} of the "
        "batch is there for it alone."
    )
    change = (
        "batches of like lengths (group_by_length), sequences joined without padding (padding_free or packing), or the "
        "longest samples cut"
    )
    return Seen(None, evidence, (formula(change, of_pass, share),), size_bytes=round(case.total(of_pass) * share))
