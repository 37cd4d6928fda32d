"""Sequence lengths that differ from step to step: memory in pieces, and the one batch that is too long."""

from __future__ import annotations

import numpy as np

from memtrace.answers.fragmentation import measure
from memtrace.attribution.categories import Category
from memtrace.explain.advice import formula, settings_to_try
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.history.timeline import At
from memtrace.units import counted
from memtrace.units import format_bytes as size

_LEAST_PASSES = 3
_LEAST_LENGTHS = 3
_LONGER = 1.25


def pass_sizes(case: Case) -> list[int]:
    """Bytes of the embedding's output in each pass (up to the event if memory ran out there), so, its tokens.

    Without an embedding on the stacks, the largest tensor of the forward pass stands in for it. Zeros are left out.
    """
    facts, sizes = case.facts, case.size
    embedded = case.module == "embedding"
    result = []
    for one in case.passes:
        if one.start > case.at.event and case.is_oom:
            break
        inside = (facts.born >= one.start) & (facts.born < one.end)
        rows = inside & embedded
        if not embedded.any():
            rows = inside & (facts.pass_end >= 0)
        result.append(int(sizes[rows].max(initial=0)))
    return [n for n in result if n]


def lengths_vary(case: Case) -> bool:
    """Whether passes worked on at least three different numbers of tokens."""
    sizes = pass_sizes(case)
    return len(sizes) >= _LEAST_PASSES and len(set(sizes)) >= _LEAST_LENGTHS


def _slack(case: Case) -> tuple[int, int, int, str]:
    """(bytes free inside reserved memory, number of pieces, reserved bytes, when): at the refusal, else where
    reserved memory was highest."""
    event = case.at.event if case.is_oom else case.timeline.peaks()[2].event
    at = At("event", event, case.timeline.time_us(event))
    found = measure(case.timeline, case.attribution, at)
    free = found.reserved_bytes - found.allocated_bytes
    when = "at the refusal" if case.is_oom else "where reserved memory was highest"
    return free, found.free_block_count, found.reserved_bytes, when


def _waste(case: Case) -> int:
    """What fragmentation costs: all that is free in pieces at a refusal, else what was reserved beyond the most ever
    allocated."""
    if case.is_oom:
        return _slack(case)[0]
    _, allocated, reserved = case.timeline.peaks()
    return reserved.size_bytes - allocated.size_bytes


def variable_length_fragmentation(case: Case) -> Finding | None:
    """Passes of different lengths left free pieces that later requests can't use."""
    if not lengths_vary(case):
        return None
    waste = _waste(case)
    if not case.is_material(waste, 0.03) or (case.is_oom and case.verdict.verdict == "budget"):
        return None
    free, count, reserved, when = _slack(case)
    sizes = pass_sizes(case)
    evidence = (
        f"{size(free)} of {size(reserved)} reserved was free in {counted(count, 'piece')} {when}; {len(sizes)} passes "
        f"had {len(set(sizes))} different lengths, the longest {max(sizes) / min(sizes):.1f} times the shortest"
    )
    return Finding(
        "variable_length_fragmentation",
        "Sequences of different lengths leave memory in pieces",
        waste,
        evidence + ".",
        tuple(settings_to_try(case)),
    )


def reserved_in_pieces(case: Case) -> Finding | None:
    """The same without different lengths: pieces between tensors of different lifetimes."""
    if lengths_vary(case):
        return None
    waste = _waste(case)
    least = 0.03 if case.is_oom else 0.1
    if not case.is_material(waste, least) or (case.is_oom and case.verdict.verdict == "budget"):
        return None
    free, count, reserved, when = _slack(case)
    return Finding(
        "reserved_in_pieces",
        "Reserved memory that is free in pieces" if count > 1 else "Reserved memory that is free, in one piece",
        waste,
        f"{size(free)} of {size(reserved)} reserved was free in {counted(count, 'piece')} {when}.",
        tuple(settings_to_try(case)) if count > 1 else (),
    )


def _usual_length(case: Case, share: float) -> dict[str, int]:
    """The option that cuts this pass's sequences to the usual length, where its tokens are known."""
    return {"max_length": int(case.dims.tokens * share)} if case.dims is not None and case.here is not None else {}


def padding_or_packing(case: Case) -> Finding | None:
    """The pass in question has clearly more tokens than usual, so its activations are what is too much."""
    sizes = pass_sizes(case)
    if case.here is None or len(sizes) != len(case.passes) or len(sizes) <= _LEAST_PASSES:
        return None
    mine = case.passes.index(case.here)
    now, usual = sizes[mine], float(np.median([*sizes[:mine], *sizes[mine + 1 :]]))
    if now < _LONGER * usual:
        return None
    of_pass = (case.kind(Category.ACTIVATIONS) | case.kind(Category.TEMPORARY)) & case.live
    of_pass &= case.facts.born >= case.here.start
    extra = round(case.total(of_pass) * (1 - usual / now))
    if not case.is_material(extra, 0.05):
        return None
    rank = "the longest" if now >= max(sizes) else "one of the longest"
    return Finding(
        "padding_or_packing",
        "This batch has more tokens than usual",
        extra,
        f"{rank} of {len(sizes)} batches: {now / usual:.2f} times the tokens of the median one, and with them "
        f"{size(extra)} more activations.",
        (formula(case, "length", of_pass, 1 - usual / now, **_usual_length(case, usual / now)),),
    )
