"""The odd rank out, and why: which part of its memory differs from the others', with numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from memtrace.attribution.categories import Category, category_words
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


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of the model: how many weights of each size in bytes, and whether the loss is made there."""

    weights: Mapping[int, int]
    makes_loss: bool


def find_odd(standings: Sequence[Standing], meaning: str, shares: Sequence[Share] = ()) -> Odd | None:
    """The rank whose memory on the device is furthest from the others', or None if all are much alike.

    Memory outside the allocator counts where every rank's file tells it. Of two ranks the larger is the odd one.
    ``meaning``: of the category ``lora``, as in the report. ``shares``: the ranks' parts of the model, in that order.
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
    split = how_split(shares[index], [*shares[:index], *shares[index + 1 :]], excess > 0) if shares else {}
    why = tuple(
        _reason(name, parts[index][name], typical[name], against, meaning, split.get(name))
        for name in ranked
        if changes[name] * excess > 0 and abs(changes[name]) >= _WORTH_NAMING * abs(excess)
    )
    odd = standings[index]
    return Odd(odd.rank, odd.file, excess, middle, changes, why)


def how_split(own: Share, others: Sequence[Share], more: bool) -> dict[str, str]:
    """What the way a model is split over ranks implies for one of them, by category: another model, tensors that most
    others don't hold (embeddings and heads), more or fewer of those that they do (layers, experts), the only loss.

    ``more``: whether it has more memory in use than the others; what would make that less explains nothing.
    """
    typical = {s: int(median(o.weights.get(s, 0) for o in others)) for s in {s for o in others for s in o.weights}}
    only = [(n, size) for size, n in own.weights.items() if not typical.get(size)]
    missing = [(n, size) for size, n in typical.items() if n and size not in own.weights]
    if own.weights and any(typical.values()) and not own.weights.keys() & typical.keys():
        text = "another program or model: no weight here is of a size that other ranks hold"
        return dict.fromkeys((Category.BASE_WEIGHTS, Category.LORA, Category.ACTIVATIONS, Category.TEMPORARY), text)
    split: dict[str, str] = {}
    if found := only if more else missing:
        holds = "that most other ranks don't hold" if more else "that most others hold, missing here"
        n, size = max(found, key=lambda each: each[0] * each[1])
        text = f"{n} × {format_bytes(size)} {holds}: an embedding or a head, as at either end of a pipeline"
        split |= {Category.BASE_WEIGHTS: text, Category.LORA: text}
    elif not (only or missing) and (difference := _whole(own.weights) - _whole(typical)) and (difference > 0) == more:
        counts = f"{sum(own.weights.values())} weights of the same sizes against {sum(typical.values())}"
        split[Category.BASE_WEIGHTS] = f"{counts}: an uneven split of layers or experts, or a second model"
    if own.makes_loss and not any(other.makes_loss for other in others):
        split[Category.TEMPORARY] = "the loss, which no other rank makes: the last stage of a pipeline"
    return split


def _whole(weights: Mapping[int, int]) -> int:
    return sum(size * n for size, n in weights.items())


def _reason(name: str, here_bytes: int, typical_bytes: int, against: str, meaning: str, split: str | None) -> str:
    """The measured difference, then what it is consistent with; the second half is a possibility and says so.
    ``split``: what the split of the model over ranks says of it."""
    change = here_bytes - typical_bytes
    more = change > 0
    figures = f"{format_bytes(here_bytes)} against {format_bytes(typical_bytes)} ({against})"
    times = f", {here_bytes / typical_bytes:.1f} times as much" if more and typical_bytes > 0 else ""
    head = f"{category_words(name, meaning)} {format_delta(change)}: {figures}{times}"
    known = split or _CONSISTENT_WITH.get((name, more))
    second = split is None or "second" in split
    if name == Category.BASE_WEIGHTS and more and second and typical_bytes and here_bytes >= 1.6 * typical_bytes:
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
