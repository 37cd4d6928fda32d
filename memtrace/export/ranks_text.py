"""Ranks as text: one row each, how uneven they are, the odd one out, and the steps."""

from __future__ import annotations

from pathlib import PurePath

from rich.text import Text

from memtrace.attribution.categories import Category
from memtrace.export.text import columns, heading, warning_lines
from memtrace.ranks.compare import RankComparison
from memtrace.units import format_bytes

_SHORT = {
    Category.BASE_WEIGHTS: "base",
    Category.LORA: "lora",
    Category.ACTIVATIONS: "activations",
    Category.TEMPORARY: "temporary",
    Category.RUNTIME: "runtime",
    Category.FRAGMENTATION: "fragmentation",
    Category.UNATTRIBUTED: "unattributed",
}
_STEPS = 12


def render_ranks(answer: RankComparison) -> list[Text]:
    """The sentence, a row a rank at the compared moment, imbalance, steps, and what could not be read."""
    lines = [Text(answer.sentence, style="bold")]
    if answer.odd is not None:
        lines += [Text(f"  {reason}") for reason in answer.odd.why[1:]]
    if answer.ranks:
        lines += [Text(), Text(f"{_where(answer)}; ranks numbered by {answer.numbered_by}", style="dim")]
        lines += _table(answer)
    if len(answer.ranks) > 1:
        lines += [Text(), *_imbalance(answer)]
        if len(answer.steps) > 1:
            lines += [Text(), *_steps(answer)]
    if answer.failed:
        lines.append(Text())
        lines += [
            Text.assemble(("unread   ", "red bold"), f"{failure.file}: {failure.error}") for failure in answer.failed
        ]
    inexact = [str(rank.rank) for rank in answer.ranks if not rank.exact]
    if inexact:
        lines += warning_lines(
            [f"rank {', '.join(inexact)}: the allocator could not be reproduced; sizes are estimates"]
        )
    return lines


def _where(answer: RankComparison) -> str:
    if answer.compared_step is None:
        return "categories at each rank's own event"
    return f"categories at each rank's peak in step {answer.compared_step} ({answer.aligned_by})"


def _present(answer: RankComparison) -> list[Category]:
    return [c for c in Category if any(standing.categories.get(str(c)) for standing in answer.compared)]


def _table(answer: RankComparison) -> list[Text]:
    shown = _present(answer)
    outside = any(rank.outside_bytes is not None for rank in answer.ranks)
    header = [
        "rank",
        "file",
        "peak",
        "reserved",
        *(_SHORT[c] for c in shown),
        *(["outside"] if outside else []),
        "verdict",
    ]
    rows = [header]
    for rank, standing in zip(answer.ranks, answer.compared, strict=True):
        extra = [] if not outside else ["?" if rank.outside_bytes is None else format_bytes(rank.outside_bytes)]
        rows.append(
            [
                str(rank.rank),
                PurePath(rank.file).name,
                format_bytes(rank.peaks["allocated_bytes"]),
                format_bytes(rank.peaks["reserved_bytes"]),
                *(format_bytes(standing.categories.get(str(c), 0)) for c in shown),
                *extra,
                rank.verdict,
            ]
        )
    right = [True, False, *[True] * (len(header) - 3), False]
    odd = None if answer.odd is None else answer.odd.rank
    styles = ["bold", *("yellow" if rank.rank == odd else "" for rank in answer.ranks)]
    return [Text(line, style=style) for line, style in zip(columns(rows, right), styles, strict=True)]


def _imbalance(answer: RankComparison) -> list[Text]:
    rows = [["imbalance", "lowest", "median", "highest", "spread"]]
    for name, spread in answer.imbalance.items():
        if spread.max_bytes:
            sizes = (spread.min_bytes, spread.median_bytes, spread.max_bytes, spread.spread_bytes)
            rows.append([name, *map(format_bytes, sizes)])
    lines = columns(rows, [False, True, True, True, True])
    return [heading(lines[0]), *map(Text, lines[1:])]


def _steps(answer: RankComparison) -> list[Text]:
    """The steps with the widest spread, in order."""
    widest = sorted(answer.steps, key=lambda row: -row.spread_bytes)[:_STEPS]
    rows = [["step", "lowest peak", "highest peak", "spread", "highest on"]]
    for row in sorted(widest, key=lambda row: row.step):
        known = [peak for peak in row.peaks_bytes if peak is not None]
        missing = len(row.peaks_bytes) - len(known)
        note = f"rank {row.highest_rank}" + (f" ({missing} without this step)" if missing else "")
        rows.append([str(row.step), *map(format_bytes, (min(known), max(known), row.spread_bytes)), note])
    lines = columns(rows, [True, True, True, True, False])
    more = len(answer.steps) - len(widest)
    rest = [Text(f"  {more} more steps with less spread", style="dim")] if more else []
    return [heading(lines[0]), *map(Text, lines[1:]), *rest]
