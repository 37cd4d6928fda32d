"""Inside one segment: its blocks in rows of cells, one of them selected."""

from __future__ import annotations

import numpy as np
from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.strip import Strip

from memtrace.history.layout import State
from memtrace.units import format_bytes
from memtrace_tui.data.coloring import Coloring, coloring
from memtrace_tui.data.flow import MapCells, range_cells
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import Wheeled, keys
from memtrace_tui.widgets.segmap import cell_segment

_LABEL = 11


class BlockMap(Wheeled):
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
        escape            leave      Back
    """)

    class Chosen(Message):
        """Another block is selected."""

    class Leave(Message):
        """Back to the map of all segments."""

    def __init__(self, session: Session) -> None:
        super().__init__(id="blockmap")
        self.session = session
        self.address = -1  # some address inside the selected block: survives cursor moves
        self.segment_address = -1
        self.start, self.stop = 0, 0
        self._key: tuple[object, ...] = ()
        self._cells: MapCells | None = None
        self._colours: Coloring | None = None

    # -- state

    @property
    def segment(self) -> int:
        """The segment looked into; -1 if it isn't there at this event."""
        layout = self.session.provider.layout(self.session.event)
        at = int(layout.address.searchsorted(self.segment_address, side="right")) - 1
        if at < 0 or self.segment_address >= int(layout.address[at] + layout.total_bytes[at]):
            return -1
        return at

    @property
    def block(self) -> int:
        """The selected block's row in the layout; -1 if the segment isn't there."""
        layout, segment = self.session.provider.layout(self.session.event), self.segment
        if segment < 0:
            return -1
        first, end = int(layout.first_block[segment]), int(layout.first_block[segment + 1])
        at = int(layout.block_address[first:end].searchsorted(self.address, side="right")) - 1
        return first + max(at, 0)

    def enter(self, segment_address: int, address: int | None = None) -> None:
        """Look into another segment."""
        self.segment_address = segment_address
        self.start = self.stop = 0
        self.address = segment_address if address is None else address
        self.show()

    def show(self) -> None:
        """The cursor, colours or selection changed."""
        layout, segment = self.session.provider.layout(self.session.event), self.segment
        if segment >= 0:
            low = int(layout.address[segment])
            high = low + int(layout.total_bytes[segment])
            if not low <= self.start < self.stop <= high:
                self.start, self.stop = low, high
            self.segment_address = low
        self.refresh()

    def _prepare(self) -> MapCells | None:
        session, provider, size = self.session, self.session.provider, self.size
        segment = self.segment
        if segment < 0:
            return None
        key = (id(provider), self.session.event, segment, self.start, self.stop, size.width, size.height,
               session.coloring, session.shown_key, id(self.look))  # fmt: skip
        if self._cells is None or key != self._key:
            layout = provider.layout(self.session.event)
            self._colours = coloring(provider, layout, session.coloring, session.fitting, session.twins, session.ranks)
            self._cells = range_cells(layout, self._colours.codes, segment, self.start, self.stop, self._count)
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
        layout = self.session.provider.layout(self.session.event)
        self.address = int(layout.block_address[block])
        if not self.start <= self.address < self.stop:
            size = self.stop - self.start
            self._range(self.address - size // 4, size)
        self.refresh()
        self.post_message(self.Chosen())

    def _range(self, start: int, size: int) -> None:
        layout, segment = self.session.provider.layout(self.session.event), self.segment
        low, total = int(layout.address[segment]), int(layout.total_bytes[segment])
        size = max(min(size, total), min(total, 512 * self._row))
        self.start = max(min(start, low + total - size), low) // 512 * 512
        self.stop = self.start + size
        self.refresh()

    def _span(self) -> tuple[int, int]:
        layout, segment = self.session.provider.layout(self.session.event), self.segment
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
        layout = self.session.provider.layout(self.session.event)
        holes = first + np.flatnonzero(layout.block_state[first:end] == State.FREE)
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

    def action_leave(self) -> None:
        self.post_message(self.Leave())

    def _cell_of(self, address: int) -> int:
        return int((address - self.start) * self._count // max(self.stop - self.start, 1))

    def on_click(self, event: events.Click) -> None:
        cells = self._prepare()
        at = event.y * self._row + event.x - _LABEL
        if cells is not None and _LABEL <= event.x < _LABEL + self._row and at < len(cells) and cells.block[at] >= 0:
            self.choose(int(cells.block[at]))

    def wheel(self, by: int) -> None:
        self.action_zoom(1.25 if by > 0 else 0.8)

    # -- drawing

    def draw_line(self, y: int) -> Strip:
        look, cells = self.look, self._prepare()
        if cells is None or self._colours is None:
            text = " this segment does not exist at this event" if y == 1 else ""
            return look.spans([(text, "dim")], self.size.width)
        row = self._row
        first = y * row
        if first >= len(cells):
            return self.blank()
        layout = self.session.provider.layout(self.session.event)
        offset = self.start + first * (self.stop - self.start) // len(cells) - int(layout.address[self.segment])
        segments = list(look.spans([(f"{'+' + format_bytes(offset):>{_LABEL - 1}} ", "dim")], _LABEL))
        chosen = self.block
        part = slice(first, min(first + row, len(cells)))
        shown = cells.block[part] == chosen
        if not shown.any() and part.start <= self._cell_of(self.address) < part.stop:
            shown[self._cell_of(self.address) - part.start] = True  # smaller than a cell: still mark where it is
        for fill, code, odd, mine in zip(
            cells.fill[part].tolist(), cells.code[part].tolist(), cells.odd[part].tolist(), shown.tolist(), strict=True
        ):
            if mine:
                behind = "strong" if not look.plain else "select"
                role = self._colours.roles[code] if fill else "hole"
                segments.append(
                    Segment("▄" if not look.plain else self._colours.letters[code], look.style(role, behind))
                )
            else:
                segments.append(cell_segment(look, self._colours, fill, code, odd))
        return Strip(segments).simplify().adjust_cell_length(self.size.width, look.style("text"))
