"""Ranks as text: one row each, how uneven they are, the odd one out, and the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from memtrace.analysis import PREDICTED
from memtrace.attribution.categories import Category, category_name, category_words
from memtrace.ranks.compare import RankComparison, meaning_of
from memtrace.render.text import Text, columns, table, warning_lines
from memtrace.render.words import verdict_name
from memtrace.units import format_bytes, printable

_STEPS = 12
_INEXACT = "the allocator could not be reproduced; sizes are estimates"


def render_ranks(answer: RankComparison, width: int = 100) -> Iterator[Text]:
    """The sentence, a row a rank at the compared moment, imbalance, steps, and what could not be read.

    A row that is wider than ``width`` becomes two, one in a table of levels and one in a table of categories.
    """
    yield Text(answer.sentence, style="bold")
    if answer.odd is not None:
        yield from (Text(f"  {reason}") for reason in answer.odd.why[1:])
    if answer.ranks:
        yield Text()
        where = "categories at each rank's own event"
        if answer.compared_step is not None:
            where = f"categories at each rank's peak in step {answer.compared_step} ({answer.aligned_by})"
        yield Text(f"{where}; ranks numbered by {answer.numbered_by}", style="dim")
        yield from _tables(answer, width)
    if len(answer.ranks) > 1:
        yield Text()
        yield from _imbalance(answer)
        if len(answer.steps) > 1:
            yield Text()
            yield from _steps(answer)
    if answer.failed:
        yield Text()
        for failure in answer.failed:
            yield Text.assemble(("unread   ", "red bold"), f"{failure.file}: {failure.error}")
    predicted = [str(rank.rank) for rank in answer.ranks if rank.predicted]
    inexact = [str(rank.rank) for rank in answer.ranks if not rank.exact]
    for which, warning in ((predicted, PREDICTED), (inexact, _INEXACT)):
        if which:
            yield from warning_lines([f"rank {', '.join(which)}: {warning}"])


def _tables(answer: RankComparison, width: int) -> list[Text]:
    outside = any(rank.outside_bytes is not None for rank in answer.ranks)
    levels = [["file", "peak", "reserved", *(["outside"] if outside else [])]]
    shown = [c for c in Category if any(standing.categories.get(str(c)) for standing in answer.compared)]
    categories = [[category_words(c, meaning_of(answer.ranks)) for c in shown]]
    names = short_names([rank.file for rank in answer.ranks])
    for name, rank, standing in zip(names, answer.ranks, answer.compared, strict=True):
        extra = [] if not outside else ["?" if rank.outside_bytes is None else format_bytes(rank.outside_bytes)]
        peaks = (format_bytes(rank.peaks[f"{level}_bytes"]) for level in ("allocated", "reserved"))
        levels.append([printable(name), *peaks, *extra])
        categories.append([format_bytes(standing.categories.get(str(c), 0)) for c in shown])
    numbers = ["rank", *(str(rank.rank) for rank in answer.ranks)]
    verdicts = ["verdict", *(verdict_name(rank.verdict) for rank in answer.ranks)]
    of_levels, of_categories = [False, *[True] * (len(levels[0]) - 1)], [True] * len(shown)
    whole = _rows(numbers, [a + b for a, b in zip(levels, categories, strict=True)], verdicts)
    lines = columns(whole, [True, *of_levels, *of_categories, False])
    if max(map(len, lines)) <= width:
        return _styled(answer, lines)
    first = columns(_rows(numbers, levels, verdicts), [True, *of_levels, False])
    second = columns(_rows(numbers, categories), [True, *of_categories])
    return [*_styled(answer, first), Text(), *_styled(answer, second)]


def short_names(files: Sequence[str]) -> list[str]:
    """As much of the end of each path as tells all of them apart: the file's name, or with folders before it."""
    parts = [PurePath(file).parts for file in files]
    longest = max(map(len, parts), default=1)
    kept = next((n for n in range(1, longest) if len({own[-n:] for own in parts}) == len(set(parts))), longest)
    return [str(PurePath(*own[-kept:])) for own in parts]


def _rows(numbers: list[str], cells: list[list[str]], last: list[str] | None = None) -> list[list[str]]:
    ends = [[cell] for cell in last] if last else [[] for _ in numbers]
    return [[number, *row, *end] for number, row, end in zip(numbers, cells, ends, strict=True)]


def _styled(answer: RankComparison, lines: list[str]) -> list[Text]:
    odd = None if answer.odd is None else answer.odd.rank
    styles = ["bold", *("yellow" if rank.rank == odd else "" for rank in answer.ranks)]
    return [Text(line, style=style) for line, style in zip(lines, styles, strict=True)]


def _imbalance(answer: RankComparison) -> list[Text]:
    rows = [["imbalance", "lowest", "median", "highest", "spread"]]
    for name, spread in answer.imbalance.items():
        if spread.max_bytes:
            sizes = (spread.min_bytes, spread.median_bytes, spread.max_bytes, spread.spread_bytes)
            rows.append([category_name(name, meaning_of(answer.ranks)), *map(format_bytes, sizes)])
    return table(rows, [False, True, True, True, True])


def _steps(answer: RankComparison) -> list[Text]:
    """The steps with the widest spread, in order."""
    widest = sorted(answer.steps, key=lambda row: -row.spread_bytes)[:_STEPS]
    rows = [["step", "lowest peak", "highest peak", "spread", "highest on"]]
    for row in sorted(widest, key=lambda row: row.step):
        known = [peak for peak in row.peaks_bytes if peak is not None]
        missing = len(row.peaks_bytes) - len(known)
        note = f"rank {row.highest_rank}" + (f" ({missing} without this step)" if missing else "")
        rows.append([str(row.step), *map(format_bytes, (min(known), max(known), row.spread_bytes)), note])
    more = len(answer.steps) - len(widest)
    rest = [Text(f"  {more} more steps with less spread", style="dim")] if more else []
    return [*table(rows, [True, True, True, True, False]), *rest]
