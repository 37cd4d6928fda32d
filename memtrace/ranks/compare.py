"""Ranks side by side: at the same step where steps can be aligned, how uneven they are, and the odd one out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from statistics import median

from memtrace.attribution.categories import Category
from memtrace.errors import UsageError
from memtrace.ranks.odd import Odd, Share, Standing, find_odd
from memtrace.ranks.sources import natural
from memtrace.ranks.summary import Failure, Rank, StepPeak, rank_named
from memtrace.units import counted

_SHOWN = 8
_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step on every rank: the peak of allocated bytes in it, in the order of ``ranks``; None where missing."""

    step: int
    peaks_bytes: tuple[int | None, ...]
    spread_bytes: int
    highest_rank: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How uneven one figure is over the ranks. ``max_over_median`` is 1.0 for a balanced run."""

    min_bytes: int
    median_bytes: int
    max_bytes: int
    spread_bytes: int
    max_over_median: float | None


@dataclass(frozen=True, slots=True)
class RankComparison:
    """Every rank, what differs between them, and what could not be read.

    ``missing``: ranks of ``world_size`` (None: not recorded; then below the highest number) that no file is of.
    ``aligned_by``: ``recorded steps`` (numbers the program recorded), ``steps from the start`` or ``steps from the
    end`` (counted in the traces), or ``each rank's own event`` where no step is common to all. ``compared_step`` is
    the step that categories are compared at: the one with the highest peak anywhere.
    """

    ranks: tuple[Rank, ...]
    failed: tuple[Failure, ...]
    world_size: int | None
    missing: tuple[int, ...]
    numbered_by: str
    aligned_by: str
    compared_step: int | None
    compared: tuple[Standing, ...]
    steps: tuple[StepRow, ...]
    imbalance: Mapping[str, Spread]
    odd: Odd | None
    sentence: str


def compare_ranks(answers: Sequence[Rank | Failure]) -> RankComparison:
    """Compare what the workers returned. With no readable rank at all, everything but ``failed`` is empty.

    Raises UsageError where two files tell the same rank.
    """
    ranks, unplaced, numbered_by = _numbered([answer for answer in answers if isinstance(answer, Rank)])
    failed = (*(answer for answer in answers if isinstance(answer, Failure)), *unplaced)
    world_size = max((rank.world_size or 0 for rank in ranks), default=0) or None
    missing = _missing(ranks, failed, world_size) if numbered_by != "order of files" else ()
    aligned_by, steps = _align(ranks)
    step = _highest_step(steps)
    standings = tuple(_standing(rank, steps[i][step] if step is not None else None) for i, rank in enumerate(ranks))
    rows = tuple(_row(number, ranks, steps) for number in sorted({number for own in steps for number in own}))
    odd = find_odd(standings, meaning_of(ranks), [Share(rank.weights, rank.makes_loss) for rank in ranks])
    return RankComparison(
        ranks=tuple(ranks),
        failed=failed,
        world_size=world_size,
        missing=missing,
        numbered_by=numbered_by,
        aligned_by=aligned_by if step is not None else "each rank's own event",
        compared_step=step,
        compared=standings,
        steps=rows,
        imbalance=_imbalance(ranks, standings),
        odd=odd,
        sentence=_sentence(ranks, failed, missing, odd),
    )


def meaning_of(ranks: Sequence[Rank]) -> str:
    """What the category ``lora`` holds on the ranks: ``trained`` where none has adapters."""
    return "adapters" if any(rank.lora["meaning"] == "adapters" for rank in ranks) else "trained"


def _numbered(ranks: list[Rank]) -> tuple[list[Rank], list[Failure], str]:
    """(ranks in order of their numbers, those that can't be placed, what told the numbers).

    Where no file tells its rank, they are numbered in order of their files. Raises UsageError where two tell the same.
    """
    files: dict[int, list[str]] = {}
    for rank in ranks:
        if rank.rank is not None:
            files.setdefault(rank.rank, []).append(rank.file)
    for number, names in sorted(files.items()):
        if len(names) > 1:
            raise UsageError(f"rank {number} stands in {' and in '.join(sorted(names))}; give one file a rank")
    if not files:
        in_order = sorted(ranks, key=lambda rank: natural(rank.file))
        return [replace(rank, rank=number) for number, rank in enumerate(in_order)], [], "order of files"
    unplaced = [Failure(rank.file, "doesn't tell its rank, as the others do") for rank in ranks if rank.rank is None]
    told = [rank for rank in ranks if rank.rank is not None]
    return sorted(told, key=lambda rank: rank.rank or 0), unplaced, "recording or file name"


def _missing(ranks: Sequence[Rank], failed: Sequence[Failure], world_size: int | None) -> tuple[int, ...]:
    """Ranks that no file is of, not even one that can't be read: of the recorded world size, else below the highest
    number."""
    there = {*(rank.rank for rank in ranks), *(rank_named(failure.file) for failure in failed)}
    count = world_size or max((rank.rank or 0 for rank in ranks), default=-1) + 1
    return tuple(number for number in range(min(count, _MOST_RANKS)) if number not in there)


def _align(ranks: Sequence[Rank]) -> tuple[str, list[dict[int, StepPeak]]]:
    """(how, step -> its peak for each rank). A trace that lost its beginning can only be counted from its end."""
    if ranks and all(rank.steps_recorded for rank in ranks):
        how = "recorded steps"
    else:
        how = "steps from the end" if any(rank.truncated for rank in ranks) else "steps from the start"
    last = max((len(rank.steps) for rank in ranks), default=0) - 1
    aligned = []
    for rank in ranks:
        offset = last - rank.steps[-1].step if how == "steps from the end" and rank.steps else 0
        aligned.append({peak.step + offset: replace(peak, step=peak.step + offset) for peak in rank.steps})
    return how, aligned


def _highest_step(steps: Sequence[Mapping[int, StepPeak]]) -> int | None:
    """The step common to all with the highest peak on any rank; the earliest of equals, None without any."""
    common = sorted(set.intersection(*map(set, steps))) if steps else []
    return max(common, key=lambda step: max(own[step].allocated_bytes for own in steps), default=None)


def _standing(rank: Rank, peak: StepPeak | None) -> Standing:
    level, event = (peak, peak.event) if peak else (rank, rank.at.event)
    sizes = level.allocated_bytes, level.reserved_bytes, rank.outside_bytes
    return Standing(rank.rank or 0, rank.file, event, *sizes, level.categories)


def _row(step: int, ranks: Sequence[Rank], steps: Sequence[Mapping[int, StepPeak]]) -> StepRow:
    peaks = tuple(own[step].allocated_bytes if step in own else None for own in steps)
    known = [peak for peak in peaks if peak is not None]
    highest = max(range(len(peaks)), key=lambda i: peaks[i] or -1)
    return StepRow(step, peaks, max(known) - min(known), ranks[highest].rank or 0)


def _imbalance(ranks: Sequence[Rank], standings: Sequence[Standing]) -> dict[str, Spread]:
    if not ranks:
        return {}
    levels = ("allocated", "reserved")
    figures = {f"peak_{level}": [rank.peaks[f"{level}_bytes"] for rank in ranks] for level in levels}
    figures |= {str(c): [standing.categories.get(str(c), 0) for standing in standings] for c in Category}
    outside = [rank.outside_bytes for rank in ranks]
    if None not in outside:
        figures["outside_allocator"] = [size or 0 for size in outside]
    return {name: _spread(sizes) for name, sizes in figures.items()}


def _spread(sizes: Sequence[int]) -> Spread:
    middle = int(median(sizes))
    return Spread(min(sizes), middle, max(sizes), max(sizes) - min(sizes), max(sizes) / middle if middle > 0 else None)


def _sentence(ranks: Sequence[Rank], failed: Sequence[Failure], missing: Sequence[int], odd: Odd | None) -> str:
    count = counted(len(ranks), "rank")
    unread = f" (left out: {_listed([PurePath(failure.file).name for failure in failed])})" if failed else ""
    unread += f"; no file of rank{'' if len(missing) == 1 else 's'} {_listed(missing)}" if missing else ""
    dead = [rank.rank or 0 for rank in ranks if rank.oom]
    ooms = f"; out of memory on rank{'' if len(dead) == 1 else 's'} {_listed(dead)}" if dead else ""
    if not ranks:
        return f"No rank could be read{unread}."
    if len(ranks) == 1:
        return f"One rank{unread}{ooms}: nothing to compare it with."
    if odd is None:
        return f"{count}{unread} are balanced{ooms}."
    name = f"rank {odd.rank} ({PurePath(odd.file).name})"
    return f"{count}{unread}: {name} is the odd one out{ooms}. {odd.why[0] if odd.why else ''}".rstrip()


def _listed(found: Sequence[object]) -> str:
    more = len(found) - _SHOWN
    return ", ".join(map(str, found[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
