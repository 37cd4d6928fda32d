"""The odd rank out, and why: which part of its memory differs from the others', with numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from memtrace.attribution.categories import Category, category_name
from memtrace.units import format_bytes, format_delta

_MIN_SHARE = 0.02  # of the others' median: smaller differences are ordinary unevenness
_DEVIATIONS = 5.0  # times the others' own unevenness, so that a run that is uneven all over has no odd one
_WORTH_NAMING = 0.2  # of the whole difference
OUTSIDE = "outside_allocator"


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank at the compared moment. ``categories`` sum to ``reserved_bytes``."""

    rank: int
    file: str
    event: int
    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int | None
    categories: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Odd:
    """The rank that stands apart. ``excess_bytes`` is signed, against ``against`` (the median of the others)."""

    rank: int
    file: str
    excess_bytes: int
    against_bytes: int
    parts: Mapping[str, int]
    why: tuple[str, ...]


def find_odd(standings: Sequence[Standing], meaning: str) -> Odd | None:
    """The rank whose memory on the device is furthest from the others', or None if all are much alike.

    Memory outside the allocator counts where every rank's file tells it. Of two ranks the larger is the odd one.
    ``meaning``: of the category ``lora``, as in the report.
    """
    if len(standings) < 2:
        return None
    with_outside = all(standing.outside_bytes is not None for standing in standings)
    outside = [{OUTSIDE: each.outside_bytes or 0} if with_outside else {} for each in standings]
    parts = [{**standing.categories, **beside} for standing, beside in zip(standings, outside, strict=True)]
    totals = [sum(own.values()) for own in parts]

    def others(index: int) -> list[int]:
        return [total for i, total in enumerate(totals) if i != index]

    index = max(range(len(totals)), key=lambda i: (abs(totals[i] - median(others(i))), totals[i], -i))
    rest = others(index)
    middle = int(median(rest))
    excess = totals[index] - middle
    unevenness = median(abs(total - middle) for total in rest) if len(rest) > 2 else 0.0
    if abs(excess) <= max(_MIN_SHARE * middle, _DEVIATIONS * unevenness):
        return None
    typical = {
        name: int(median(own.get(name, 0) for i, own in enumerate(parts) if i != index)) for name in parts[index]
    }
    changes = {name: parts[index][name] - typical[name] for name in parts[index] if parts[index][name] != typical[name]}
    ranked = sorted(changes, key=lambda name: -abs(changes[name]))
    against = "the median of the others" if len(rest) > 1 else f"rank {standings[1 - index].rank}"
    why = tuple(
        _reason(name, parts[index][name], typical[name], against, meaning)
        for name in ranked
        if changes[name] * excess > 0 and abs(changes[name]) >= _WORTH_NAMING * abs(excess)
    )
    odd = standings[index]
    return Odd(odd.rank, odd.file, excess, middle, changes, why)


def _reason(name: str, here_bytes: int, typical_bytes: int, against: str, meaning: str) -> str:
    """The measured difference, then what it is consistent with; the second half is a possibility and says so."""
    change = here_bytes - typical_bytes
    more = change > 0
    figures = f"{format_bytes(here_bytes)} against {format_bytes(typical_bytes)} ({against})"
    times = f", {here_bytes / typical_bytes:.1f} times as much" if more and typical_bytes > 0 else ""
    head = f"{category_name(name, meaning)} {format_delta(change)}: {figures}{times}"
    known = _CONSISTENT_WITH.get((name, more))
    if name == Category.BASE_WEIGHTS and more and typical_bytes and here_bytes >= 1.6 * typical_bytes:
        known = "a second model on this rank (a reference or teacher model, say), or weights the others shard"
    return f"{head}; consistent with {known}." if known else f"{head}."


_CONSISTENT_WITH: dict[tuple[str, bool], str] = {
    (Category.BASE_WEIGHTS, True): "weights that are sharded or quantised elsewhere",
    (Category.BASE_WEIGHTS, False): "a smaller share of the model on this rank",
    (Category.LORA, True): "optimizer states or gradients that are not spread evenly",
    (Category.LORA, False): "optimizer states or gradients that are not spread evenly",
    (Category.ACTIVATIONS, True): "longer sequences or a larger batch on this rank",
    (Category.ACTIVATIONS, False): "shorter sequences or a smaller batch on this rank",
    (Category.TEMPORARY, True): "longer sequences or a larger batch on this rank, or work only it does",
    (Category.TEMPORARY, False): "shorter sequences or a smaller batch on this rank",
    (Category.RUNTIME, True): "communication buffers or workspaces that only this rank has",
    (Category.FRAGMENTATION, True): "more varied sequence lengths here, or a past peak whose segments are kept",
    (OUTSIDE, True): "NCCL buffers, CUDA contexts of other ranks on this GPU, or another process",
}
