"""The segment map's geometry and cells: nothing overlaps, nothing is lost, every hole shows."""

from __future__ import annotations

import numpy as np
import pytest
from browser_cases import CASES, TINY, recording
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace_tui.data.coloring import FIRST, HOLE, MODES, coloring
from memtrace_tui.data.details import allocation_lines, block_lines, segment_lines
from memtrace_tui.data.flow import SORTS, Heading, flow, packed_cells, range_cells, scales

from memtrace.history.layout import State

events = st.integers(-1, 10_063)


@given(events, st.integers(10, 200), st.integers(3, 60), st.sampled_from(list(SORTS)), st.integers(-2, 4))
@settings(deadline=None, max_examples=60)
def test_segments_flow_like_words(event: int, width: int, height: int, sort: str, zoom: int) -> None:
    provider = recording(TINY).provider()
    layout = provider.layout(event)
    fullest = provider.layout(provider.peaks[2].event)
    births = provider.timeline.allocations.alloc_event[layout.row]
    geometry = flow(layout, width, scales(fullest, width, height), births, sort, zoom)
    assert sorted(geometry.cells) == list(range(len(layout)))
    placed: dict[int, int] = {}
    for row in geometry.rows:
        if isinstance(row, Heading):
            assert row.cell_bytes >= 512
            continue
        at = 0
        for piece in row:
            assert piece.x >= at and piece.x + piece.count <= width
            assert piece.first == placed.get(piece.segment, 0)
            placed[piece.segment] = piece.first + piece.count
            at = piece.x + piece.count + 1  # a gap
    assert placed == geometry.cells


@pytest.mark.parametrize("sort", [sort for sort in SORTS if sort != "address"])
def test_the_map_is_in_the_order_that_is_chosen(sort: str) -> None:
    provider = recording("llama2-7b_oom-fragmentation").provider()
    layout = provider.layout(provider.start.event)
    births = provider.timeline.allocations.alloc_event[layout.row]
    differ = False
    for row in flow(layout, 100, {}, births, sort).rows:
        if not isinstance(row, Heading):
            continue
        keys = []
        for segment in row.segments:
            blocks = range(int(layout.first_block[segment]), int(layout.first_block[segment + 1]))
            sizes = {True: [0], False: [0]}  # by whether they are free
            for block in blocks:
                sizes[bool(layout.block_state[block] == State.FREE)].append(int(layout.block_bytes[block]))
            free, used, total = sum(sizes[True]), sum(sizes[False]), int(layout.total_bytes[segment])
            oldest = min((int(births[block]) for block in blocks if layout.row[block] >= 0), default=1 << 62)
            is_empty = not used and sort in ("free", "share", "pins")  # nothing pins it: behind the others
            keys.append((is_empty, {"free": -free, "share": -round(free / total, 5), "size": -total,
                                    "hole": -max(sizes[True]), "age": oldest,
                                    "pins": used if free else 1 << 61}[sort]))  # fmt: skip
        assert keys == sorted(keys)
        differ |= len(set(keys)) > 1
    assert differ


@given(events, st.sampled_from(MODES))
@settings(deadline=None, max_examples=40)
def test_cells_show_every_hole_and_every_block(event: int, mode: str) -> None:
    provider = recording(TINY).provider()
    layout = provider.layout(event)
    colours = coloring(provider, layout, mode)
    assert len(colours.codes) == len(layout.block_address)
    assert int(colours.codes.max(initial=0)) < len(colours.roles) == len(colours.labels) <= len(colours.letters)
    assert ((colours.codes == HOLE) == (layout.block_state == State.FREE)).all()
    segments = list(range(len(layout)))
    cell = 1 << 20
    counts = [max(1, -(-int(size) // cell)) for size in layout.total_bytes]
    cells = packed_cells(layout, colours.codes, segments, counts, cell) if segments else None
    first = 0
    for segment, count in zip(segments, counts, strict=True):
        assert cells is not None
        fill = cells.fill[first : first + count]
        free = int(layout.free_bytes()[segment])
        assert (fill < 8).any() == (free > 0)
        assert (fill > 0).any() == (free < int(layout.total_bytes[segment]))
        assert (layout.segment[cells.block[first : first + count]] == segment).all()
        assert ((cells.code[first : first + count] >= 1) == (fill > 0)).all()
        one = range_cells(
            layout, colours.codes, segment, int(layout.address[segment]),
            int(layout.address[segment] + count * cell), count,
        )  # fmt: skip
        assert (one.fill == fill).all()
        first += count


def test_colours_by_category_are_the_attribution() -> None:
    provider = recording(TINY).provider()
    layout = provider.layout(provider.start.event)
    colours = coloring(provider, layout, "category")
    attribution = provider.analysis.attribution
    for block in np.flatnonzero(layout.row >= 0)[:200].tolist():
        category = attribution.rules[int(attribution.rule[layout.row[block]])].category
        assert colours.roles[int(colours.codes[block])] == f"cat:{category}"
        assert colours.codes[block] >= FIRST


@pytest.mark.parametrize("case", CASES)
def test_details_of_every_segment_and_block(case: str) -> None:
    provider = recording(case).provider()
    layout = provider.layout(provider.start.event)
    for segment in range(min(len(layout), 40)):
        lines = segment_lines(provider, layout, segment, 60)
        assert f"{int(layout.address[segment]):#x}" in lines[0].plain
    for block in range(0, len(layout.block_address), max(len(layout.block_address) // 60, 1)):
        for line in block_lines(provider, layout, block, 60):
            assert len(line.plain) <= 200 and "\x1b" not in line.plain
    for row in provider.live(provider.start.event)[:60].tolist():
        text = "\n".join(line.plain for line in allocation_lines(provider, row, provider.start.event, 60))
        assert "purpose" in text and "because" in text and "\x1b" not in text
