"""The segment/block layout as a text map: one line a segment, one letter a share of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from memtrace.answers.segment_map import SegmentMap, SegmentView
from memtrace.attribution.categories import Category, category_name
from memtrace.render.text import Text, heading
from memtrace.render.words import FREE, MARKS, PENDING, STYLE, moment_name, pool_name, stream_name
from memtrace.units import counted, format_bytes, format_count

_HEAD_WIDTH = 48


def render_segments(answer: SegmentMap, meaning: str, width: int = 80, most: int | None = 40) -> Iterator[Text]:
    """Segments grouped by pool and stream, most free bytes first.

    ``meaning``: the report's, of the category ``lora``. ``most`` rows of each group, in which segments that look alike
    share one; None: a row for every segment.
    """
    legend = Text.assemble(moment_name(answer.at), ": ")
    for category, mark in MARKS.items():
        if category != Category.FRAGMENTATION:
            legend.append(f"{mark.letter} {category_name(category, meaning)}  ", mark.ansi)
    legend.append(f"{FREE} free  {PENDING} pending free")
    yield legend
    for (pool, stream), members in groupby(sorted(answer.segments, key=_group), key=_group):
        segments = sorted(members, key=lambda s: (-s.free_bytes, s.address))
        total, free = sum(s.total_bytes for s in segments), sum(s.free_bytes for s in segments)
        sizes = f"{counted(len(segments), 'segment')}, {format_bytes(total)}, {format_bytes(free)} free"
        yield Text()
        yield heading(f"{pool_name(pool)}, {stream_name(stream)}: {sizes}")
        rows, rest = _rows(segments, width, most)
        yield from rows
        if rest:
            left = format_bytes(sum(s.free_bytes for s in rest))
            yield Text(f"  … {format_count(len(rest))} more, {left} free (--all)", style="dim")


def _group(segment: SegmentView) -> tuple[str, int]:
    return segment.pool, segment.stream


def _rows(segments: list[SegmentView], width: int, most: int | None) -> tuple[list[Text], list[SegmentView]]:
    """(rows, segments that are not shown)."""
    groups: dict[tuple[object, ...], tuple[Text, list[SegmentView]]] = {}
    for position, segment in enumerate(segments):
        cells = _cells(segment, max(16, width - _HEAD_WIDTH))
        alike = (segment.total_bytes, segment.free_bytes, cells.plain, position if most is None else None)
        if alike not in groups and len(groups) == most:
            return [_row(*group) for group in groups.values()], segments[position:]
        groups.setdefault(alike, (cells, []))[1].append(segment)
    return [_row(*group) for group in groups.values()], []


def _row(cells: Text, alike: list[SegmentView]) -> Text:
    first = alike[0]
    count = f"×{len(alike)}" if len(alike) > 1 else ""
    sizes = f"{format_bytes(first.total_bytes):>10} {format_bytes(first.free_bytes):>10} free "
    return Text.assemble(f"  0x{first.address:x} {count:<4}{sizes}", cells)


def _cells(segment: SegmentView, cells: int) -> Text:
    """What is where in a segment, a letter a cell."""
    marks: list[tuple[str, str]] = []
    per_cell = segment.total_bytes / cells
    # Each cell shows whatever holds most of it, so that small blocks don't hide a hole, nor the other way round.
    at, block, used_of_block = 0, 0, 0
    for cell in range(cells):
        end = round((cell + 1) * per_cell)
        shares: dict[tuple[str, str], int] = {}
        while at < end and block < len(segment.blocks):
            view = segment.blocks[block]
            take = min(view.block_bytes - used_of_block, end - at)
            mark = _mark(view.state, view.category)
            shares[mark] = shares.get(mark, 0) + take
            at += take
            used_of_block += take
            if used_of_block == view.block_bytes:
                block, used_of_block = block + 1, 0
        if shares:
            marks.append(max(shares, key=lambda mark: shares[mark]))
    line = Text()
    for (letter, style), run in groupby(marks):
        line.append(letter * sum(1 for _ in run), style)
    return line


def _mark(state: str, category: str | None) -> tuple[str, str]:
    if state == "free" or category is None:
        return FREE, "dim"
    if state == "pending_free":
        return PENDING, "red"
    return MARKS[category].letter, STYLE[category]
