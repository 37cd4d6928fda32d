"""The segment map: every segment of every pool as long as it is large, filled by what lives in it; and one segment's
blocks."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
from rich.segment import Segment
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from memtrace.history.layout import Layout, State
from memtrace.render.words import pool_name, stream_name
from memtrace.units import counted, format_bytes
from memtrace_tui.data.coloring import Coloring
from memtrace_tui.data.flow import (
    NO_FLOW,
    Flow,
    Heading,
    MapCells,
    Piece,
    PoolKey,
    flow,
    packed_cells,
    range_cells,
    scales,
)
from memtrace_tui.data.lines import Span
from memtrace_tui.look import ScreenLook
from memtrace_tui.provider import Provider
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import EIGHTHS, Cursored, keys


@lru_cache(8192)
def cell_segment(look: ScreenLook, colours: Coloring, fill: int, code: int, odd: bool, behind: str = "") -> Segment:
    """One cell: colour is what most of it is, height is how much of it is in use, the rest is the hole."""
    role = colours.roles[code]
    if look.plain:
        letter = colours.letters[code]
        is_low = fill < 4 and letter.isupper()
        return Segment(letter.lower() if is_low else letter, look.style("text", behind or "background"))
    if fill == 0:
        return Segment(" ", look.style("text", "hole"))
    if odd and not role.startswith("heat"):
        role = "shade:" + role.replace(":", "|")
    if fill == 8:
        return Segment(" ", look.style("text", role))
    return Segment(EIGHTHS[fill], look.style(role, "hole"))


class MapWidget(Cursored, can_focus=True):
    """What the map of segments and that of one segment's blocks share: a selection, kept as an address, as an index
    would not survive a cursor move."""

    class Chosen(Message):
        """Another segment or block is selected."""

    class Turned(Message):
        """Look inside the selected segment, or at all of them again."""

    address = -1

    @property
    def layout_now(self) -> Layout:
        """Segments and blocks at the cursor."""
        return self.session.provider.layout(self.session.event)

    def action_turn(self) -> None:
        self.post_message(self.Turned())


@lru_cache(4)
def _scales(provider: Provider, width: int, height: int) -> dict[PoolKey, int]:
    """Scales that fit the moment of most reserved memory, for as long as the screen keeps its size."""
    return scales(provider.layout(provider.peaks[2].event), width, height)


class SegMap(MapWidget):
    """Pools as paragraphs, segments as words. Arrows choose a segment, Enter looks inside."""

    BINDINGS = keys("""
        left right              step(±1)  Segment / Next segment         ←→↑↓
        up,k down,j             row(±1)   -Row up / Row down
        pageup pagedown         page(±1)  -Page up / Page down
        home                    edge(0)   -First segment
        end                     edge(-1)  -Last segment
        enter                   turn      Look inside
        plus,equals_sign        zoom(1)   Scale                          +-
        minus                   zoom(-1)  -Smaller scale
        0                       zoom(0)   -Fit
    """)

    top = scale = 0
    _revealed = Size()  # the size at which the selection was in sight
    _key: tuple[object, ...] = ()
    _flow = NO_FLOW

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._cells: dict[int, tuple[MapCells, int]] = {}  # segment -> its pool's cells, its first one
        self._strips: dict[int, Strip] = {}

    @property
    def segment(self) -> int:
        """Row of the selected segment in the layout; -1 if there is none."""
        at = int(self.layout_now.address.searchsorted(self.address, side="right")) - 1
        return max(at, 0) if len(self.layout_now) else -1

    def prepare(self) -> Flow:
        """Geometry and cells for the cursor, size, colouring and sort in force."""
        session, size, colours = self.session, self.size, self.session.colours
        key = (colours, size, session.segment_sort, self.scale, self.look)
        if key != self._key:
            layout, width = self.layout_now, max(size.width - 3, 8)
            born = session.provider.timeline.allocations.alloc_event
            births = born[layout.row] if len(born) else np.zeros(len(layout.row), np.int32)
            cell_bytes = _scales(session.provider, width, size.height)
            self._flow = flow(layout, width, cell_bytes, births, session.segment_sort, self.scale)
            self._cells, self._strips, self._key = {}, {}, key
            for row in self._flow.rows:
                if isinstance(row, Heading):
                    counts = [self._flow.cells[segment] for segment in row.segments]
                    cells = packed_cells(layout, colours.codes, row.segments, counts, row.cell_bytes)
                    firsts = accumulate([0, *counts[:-1]])
                    self._cells |= {s: (cells, first) for s, first in zip(row.segments, firsts, strict=True)}
            self.top = max(min(self.top, len(self._flow.rows) - size.height), 0)
            if size != self._revealed:
                self._revealed = size
                self._reveal()
        return self._flow

    def _reveal(self) -> None:
        """Scroll as little as needed to show the selected segment."""
        row = self.prepare().row_of.get(self.segment, 0)
        self.top = max(min(self.top, row - 1), row - self.size.height + 1, 0)

    def choose(self, segment: int) -> None:
        if segment < 0:
            return
        self.address = int(self.layout_now.address[segment])
        self._reveal()
        self.refresh()
        self.post_message(self.Chosen())

    # -- actions

    def action_step(self, by: int) -> None:
        order = list(self.prepare().cells)
        if order:
            self.choose(order[max(min(order.index(self.segment) + by, len(order) - 1), 0)])

    def action_row(self, by: int) -> None:
        geometry, segment = self.prepare(), self.segment
        if segment < 0:
            return
        x = geometry.x_of[segment]
        row = geometry.row_of[segment] + by
        while 0 <= row < len(geometry.rows):
            pieces = geometry.rows[row]
            if not isinstance(pieces, Heading) and pieces:
                found = next((p for p in pieces if p.x + p.count > x), pieces[-1])
                if found.segment != segment:
                    self.choose(found.segment)
                    return
            row += by

    def action_page(self, by: int) -> None:
        for _ in range(max(self.size.height - 2, 1)):
            self.action_row(by)

    def action_edge(self, which: int) -> None:
        order = list(self.prepare().cells)
        if order:
            self.choose(order[which])

    def action_zoom(self, by: int) -> None:
        """Half or twice as many bytes a cell; 0 fits everything again."""
        self.scale = 0 if by == 0 else max(min(self.scale + by, 12), -4)
        self.choose(self.segment)

    def wheel(self, by: int) -> None:
        self.top = max(min(self.top + 2 * by, len(self.prepare().rows) - self.size.height), 0)
        self.refresh()

    def on_click(self, event: events.MouseEvent) -> None:
        rows = self.prepare().rows
        row = self.top + event.y
        if row < len(rows) and not isinstance(pieces := rows[row], Heading):
            for piece in pieces:
                if piece.x <= event.x - 1 < piece.x + piece.count:
                    (self.action_turn if piece.segment == self.segment else partial(self.choose, piece.segment))()

    # -- drawing

    def draw_line(self, y: int) -> Strip:
        geometry = self.prepare()
        row = self.top + y
        if not geometry.rows:
            text = " nothing is reserved at this event" if y == 1 else ""
            return self.look.spans([(text, "dim")], self.size.width)
        if row >= len(geometry.rows):
            return self.blank()
        content = geometry.rows[row]
        if isinstance(content, Heading):
            return self._heading(content)
        chosen = self.segment
        if any(piece.segment == chosen for piece in content):
            return self._pieces(content)
        if row not in self._strips:
            self._strips[row] = self._pieces(content)
        return self._strips[row]

    def _heading(self, heading: Heading) -> Strip:
        layout = self.layout_now
        members = list(heading.segments)
        total, free = int(layout.total_bytes[members].sum()), int(layout.free_bytes()[members].sum())
        kind = "" if heading.kind == "ordinary" else f" {heading.kind}"
        stream = stream_name(heading.stream)
        spans: list[Span] = [
            (f" {pool_name(heading.pool)}{kind}", "title"), (f"  {stream}  ", "dim"), (format_bytes(total), "strong"),
            (f" in {counted(len(members), 'segment')}  ", "dim"),
            (format_bytes(free), "bad" if free else "strong"), (f" free ({free / total:.0%})", "dim"),
        ]  # fmt: skip
        used = sum(len(text) for text, _ in spans)
        scale = f"1 cell = {format_bytes(heading.cell_bytes).replace('.00', '').replace('.0', '')} "
        room = self.size.width - used
        spans.append((f"{scale:>{room}}" if room > len(scale) else "", "dim"))
        return self.look.spans(spans, self.size.width, "surface")

    def _pieces(self, pieces: tuple[Piece, ...]) -> Strip:
        look, colours, chosen = self.look, self.session.colours, self.segment
        gap = look.style("accent")
        marks: dict[int, str] = {}  # what stands in the gaps around the selected segment
        for piece in pieces:
            if piece.segment == chosen:
                marks[piece.x] = "▐"
                marks[piece.x + piece.count + 1] = "▌"
        segments: list[Segment] = []
        at = 0
        for piece in pieces:
            first = piece.x + 1
            segments += [Segment(marks.get(x, " "), gap) for x in range(at, first)]
            behind = "select" if piece.segment == chosen else ""
            cells, base = self._cells[piece.segment]
            part = slice(base + piece.first, base + piece.first + piece.count)
            for fill, code, odd in zip(
                cells.fill[part].tolist(), cells.code[part].tolist(), cells.odd[part].tolist(), strict=True
            ):
                segments.append(cell_segment(look, colours, fill, code, odd, behind))
            at = first + piece.count
        segments.append(Segment(marks.get(at, " "), gap))
        return Strip(segments).simplify().adjust_cell_length(self.size.width, look.style("text"))


_LABEL = 12


class BlockMap(MapWidget):
    """One segment over the whole widget; left and right go from block to block, plus and minus change the range."""

    BINDINGS = keys("""
        left right        step(±1)   Block / Next block         ←→↑↓
        up,k down,j       row(±1)    -Row up / Row down
        n                 hole(1)    Next hole                  n N
        N                 hole(-1)   -Previous hole
        home              edge(0)    -First block
        end               edge(-1)   -Last block
        plus,equals_sign  zoom(0.5)  Zoom                       +-
        minus             zoom(2.0)  -Zoom out
        0                 zoom(0)    -Whole segment
        escape            turn       Back
    """)

    segment_address = -1
    start, stop = 0, 0
    _key: tuple[object, ...] = ()
    _cells: MapCells | None = None

    # -- state

    @property
    def segment(self) -> int:
        """The segment looked into; -1 if it isn't there at this event."""
        layout = self.layout_now
        at = int(layout.address.searchsorted(self.segment_address, side="right")) - 1
        return at if at >= 0 and self.segment_address < int(layout.address[at] + layout.total_bytes[at]) else -1

    @property
    def block(self) -> int:
        """The selected block's row in the layout; -1 if the segment isn't there."""
        if self.segment < 0:
            return -1
        first, end = self._span()
        at = int(self.layout_now.block_address[first:end].searchsorted(self.address, side="right")) - 1
        return first + max(at, 0)

    def enter(self, segment_address: int, address: int) -> None:
        """Look into another segment."""
        self.segment_address, self.address = segment_address, address
        self.start = self.stop = 0
        self.show()

    def show(self) -> None:
        """The cursor, colours or selection changed."""
        layout, segment = self.layout_now, self.segment
        if segment >= 0:
            low = int(layout.address[segment])
            high = low + int(layout.total_bytes[segment])
            if not low <= self.start < self.stop <= high:
                self.start, self.stop = low, high
            self.segment_address = low
        self.refresh()

    def _prepare(self) -> MapCells | None:
        segment, codes = self.segment, self.session.colours.codes
        key = (self.session.colours, segment, self.start, self.stop, self._count)
        if segment < 0:
            return None
        if key != self._key:
            self._cells = range_cells(self.layout_now, codes, segment, self.start, self.stop, self._count)
            self._key = key
        return self._cells

    @property
    def _row(self) -> int:
        return max(self.size.width - _LABEL - 1, 1)

    @property
    def _count(self) -> int:
        """Cells in all; no more than there are units of 512 bytes."""
        return max(min(self._row * self.size.height, (self.stop - self.start) // 512), 1)

    # -- actions

    def choose(self, block: int) -> None:
        """Select a block; the range moves so that it shows."""
        self.address = int(self.layout_now.block_address[block])
        if not self.start <= self.address < self.stop:
            size = self.stop - self.start
            self._range(self.address - size // 4, size)
        self.refresh()
        self.post_message(self.Chosen())

    def _range(self, start: int, size: int) -> None:
        layout, segment = self.layout_now, self.segment
        low, total = int(layout.address[segment]), int(layout.total_bytes[segment])
        size = max(min(size, total), min(total, 512 * self._row))
        self.start = max(min(start, low + total - size), low) // 512 * 512
        self.stop = self.start + size
        self.refresh()

    def _span(self) -> tuple[int, int]:
        layout, segment = self.layout_now, self.segment
        return int(layout.first_block[segment]), int(layout.first_block[segment + 1])

    def action_step(self, by: int) -> None:
        if self.block >= 0:
            first, end = self._span()
            self.choose(max(min(self.block + by, end - 1), first))

    def action_edge(self, which: int) -> None:
        if self.block >= 0:
            first, end = self._span()
            self.choose(first if which == 0 else end - 1)

    def action_row(self, by: int) -> None:
        cells = self._prepare()
        if cells is None:
            return
        mine = np.flatnonzero(cells.block == self.block)
        at = int(mine[0]) if len(mine) else self._cell_of(self.address)
        while 0 <= at + by * self._row < len(cells):
            at += by * self._row
            if int(cells.block[at]) not in (self.block, -1):
                self.choose(int(cells.block[at]))
                return

    def action_hole(self, by: int) -> None:
        if self.block < 0:
            return
        first, end = self._span()
        holes = first + np.flatnonzero(self.layout_now.block_state[first:end] == State.FREE)
        beyond = holes[holes > self.block] if by > 0 else holes[holes < self.block][::-1]
        if len(beyond):
            self.choose(int(beyond[0]))

    def action_zoom(self, factor: float) -> None:
        """Show a shorter or longer range around the selected block; 0 the whole segment."""
        if self.segment < 0:
            return
        size = round((self.stop - self.start) * factor) if factor else 1 << 62
        share = (self.address - self.start) / max(self.stop - self.start, 1)
        self._range(round(self.address - share * min(size, 1 << 60)), size)

    def _cell_of(self, address: int) -> int:
        return int((address - self.start) * self._count // max(self.stop - self.start, 1))

    def on_click(self, event: events.MouseEvent) -> None:
        cells = self._prepare()
        at = event.y * self._row + event.x - _LABEL
        if cells is not None and _LABEL <= event.x < _LABEL + self._row and at < len(cells) and cells.block[at] >= 0:
            self.choose(int(cells.block[at]))

    def wheel(self, by: int) -> None:
        self.action_zoom(1.25 if by > 0 else 0.8)

    # -- drawing

    def draw_line(self, y: int) -> Strip:
        look, colours, cells = self.look, self.session.colours, self._prepare()
        if cells is None:
            text = " this segment does not exist at this event" if y == 1 else ""
            return look.spans([(text, "dim")], self.size.width)
        row = self._row
        first = y * row
        if first >= len(cells):
            return self.blank()
        base = int(self.layout_now.address[self.segment])
        offset = self.start + first * (self.stop - self.start) // len(cells) - base
        segments = list(look.spans([(f"{'+' + format_bytes(offset):>{_LABEL - 1}} ", "dim")], _LABEL))
        part = slice(first, min(first + row, len(cells)))
        shown = cells.block[part] == self.block
        if not shown.any() and part.start <= self._cell_of(self.address) < part.stop:
            shown[self._cell_of(self.address) - part.start] = True  # smaller than a cell: still mark where it is
        columns = (each.tolist() for each in (cells.fill[part], cells.code[part], cells.odd[part], shown))
        for fill, code, odd, mine in zip(*columns, strict=True):
            if mine:
                letter, behind = (colours.letters[code], "select") if look.plain else ("▄", "strong")
                segments.append(Segment(letter, look.style(colours.roles[code] if fill else "hole", behind)))
            else:
                segments.append(cell_segment(look, colours, fill, code, odd))
        return Strip(segments).simplify().adjust_cell_length(self.size.width, look.style("text"))
