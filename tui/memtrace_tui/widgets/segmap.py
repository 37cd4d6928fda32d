"""The segment map: every segment of every pool as long as it is large, filled by what lives in it."""

from __future__ import annotations

import numpy as np
from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.strip import Strip

from memtrace.history.layout import Layout
from memtrace.render.words import clip, pool_name, stream_name
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.coloring import Coloring, coloring
from memtrace_tui.data.flow import Flow, Heading, MapCells, Piece, PoolKey, flow, packed_cells, scales
from memtrace_tui.data.lines import Span
from memtrace_tui.look import ScreenLook
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import Wheeled, keys

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def cell_segment(look: ScreenLook, colours: Coloring, fill: int, code: int, odd: bool, behind: str = "") -> Segment:
    """One cell: colour is what most of it is, height is how much of it is in use, the rest is the hole."""
    role = colours.roles[code]
    if look.plain:
        letter = colours.letters[code]
        return Segment(
            letter if fill >= 4 or not letter.isupper() else letter.lower(), look.style("text", behind or "background")
        )
    if fill == 0:
        return Segment(" ", look.style("text", "hole"))
    if odd and not role.startswith("heat"):
        role = "shade:" + role.replace(":", "|")
    if fill == 8:
        return Segment(" ", look.style("text", role))
    return Segment(_EIGHTHS[fill], look.style(role, "hole"))


class SegmentMapWidget(Wheeled):
    """Pools as paragraphs, segments as words. Arrows choose a segment, Enter looks inside."""

    BINDINGS = keys("""
        left right              step(±1)  Segment / Next segment         ←→↑↓
        up,k down,j             row(±1)   -Row up / Row down
        pageup pagedown         page(±1)  -Page up / Page down
        home                    edge(0)   -First segment
        end                     edge(-1)  -Last segment
        enter                   inside    Look inside
        plus,equals_sign        zoom(1)   Scale                          +-
        minus                   zoom(-1)  -Smaller scale
        0                       zoom(0)   -Fit
    """)

    class Chosen(Message):
        """Another segment is selected."""

    class Inside(Message):
        """Look inside the selected segment."""

    def __init__(self, session: Session) -> None:
        super().__init__(id="segmap")
        self.session = session
        self.address = -1  # of the selected segment; an index would not survive a cursor move
        self.top = 0
        self.scale = 0
        self._key: tuple[object, ...] = ()
        self._flow: Flow | None = None
        self._cells: dict[int, tuple[MapCells, int]] = {}  # segment -> its pool's cells, its first one
        self._colours: Coloring | None = None
        self._scales: tuple[tuple[int, int, int], dict[PoolKey, int]] | None = None
        self._strips: dict[tuple[int, bool], Strip] = {}

    # -- state

    @property
    def layout_now(self) -> Layout:
        """Segments and blocks at the cursor."""
        return self.session.provider.layout(self.session.event)

    @property
    def segment(self) -> int:
        """Row of the selected segment in the layout; -1 if there is none."""
        addresses = self.layout_now.address
        if not len(addresses):
            return -1
        at = int(addresses.searchsorted(self.address, side="right")) - 1
        return max(at, 0)

    @property
    def colours(self) -> Coloring:
        """What the colours mean now."""
        self.prepare()
        assert self._colours is not None
        return self._colours

    def prepare(self) -> Flow:
        """Geometry and cells for the cursor, size, colouring and sort in force."""
        session, size = self.session, self.size
        key = (
            id(session.provider), session.event, size.width, size.height, session.coloring, session.shown_key,
            session.segment_sort, self.scale, id(self.look),
        )  # fmt: skip
        if self._flow is None or key != self._key:
            layout = self.layout_now
            self._colours = coloring(
                session.provider, layout, session.coloring, session.fitting, session.twins, session.ranks
            )
            width = max(size.width - 3, 8)
            born = session.provider.timeline.allocations.alloc_event
            births = born[layout.row] if len(born) else np.zeros(len(layout.row), np.int64)
            self._flow = flow(layout, width, self._cell_bytes(width), births, session.segment_sort, self.scale)
            self._cells = {}
            for row in self._flow.rows:
                if isinstance(row, Heading):
                    counts = [self._flow.cells[segment] for segment in row.segments]
                    cells = packed_cells(layout, self._colours.codes, row.segments, counts, row.cell_bytes)
                    first = 0
                    for segment, count in zip(row.segments, counts, strict=True):
                        self._cells[segment] = (cells, first)
                        first += count
            self._key = key
            self._strips = {}
            self.top = max(min(self.top, len(self._flow.rows) - size.height), 0)
        return self._flow

    def _cell_bytes(self, width: int) -> dict[PoolKey, int]:
        """Scales that fit the moment of most reserved memory, for as long as the screen keeps its size."""
        provider = self.session.provider
        key = (id(provider), width, self.size.height)
        if self._scales is None or self._scales[0] != key:
            fullest = provider.layout(provider.peaks[2].event)
            self._scales = (key, scales(fullest, width, self.size.height))
        return self._scales[1]

    def show(self) -> None:
        self.refresh()

    def choose(self, segment: int) -> None:
        if segment < 0:
            return
        self.address = int(self.layout_now.address[segment])
        geometry = self.prepare()
        row = geometry.row_of.get(segment, 0)
        height = self.size.height
        if row < self.top + 1:
            self.top = max(row - 1, 0)
        elif row >= self.top + height:
            self.top = row - height + 1
        self.refresh()
        self.post_message(self.Chosen())

    # -- actions

    def action_step(self, by: int) -> None:
        order = self.prepare().order
        if order:
            at = order.index(self.segment)
            self.choose(order[max(min(at + by, len(order) - 1), 0)])

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
        order = self.prepare().order
        if order:
            self.choose(order[which])

    def action_zoom(self, by: int) -> None:
        """Half or twice as many bytes a cell; 0 fits everything again."""
        self.scale = 0 if by == 0 else max(min(self.scale + by, 12), -4)
        self.choose(self.segment)

    def action_inside(self) -> None:
        if self.segment >= 0:
            self.post_message(self.Inside())

    def wheel(self, by: int) -> None:
        self.top = max(min(self.top + 2 * by, len(self.prepare().rows) - self.size.height), 0)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        rows = self.prepare().rows
        row = self.top + event.y
        if row < len(rows) and not isinstance(pieces := rows[row], Heading):
            for piece in pieces:
                if piece.x <= event.x - 1 < piece.x + piece.count:
                    if piece.segment == self.segment:
                        self.action_inside()
                    else:
                        self.choose(piece.segment)

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
        has_selected = any(piece.segment == self.segment for piece in content)
        key = (row, has_selected)
        if has_selected:
            return self._pieces(content)
        if key not in self._strips:
            self._strips[key] = self._pieces(content)
        return self._strips[key]

    def _heading(self, heading: Heading) -> Strip:
        layout = self.layout_now
        members = list(heading.segments)
        total, free = int(layout.total_bytes[members].sum()), int(layout.free_bytes()[members].sum())
        kind = "" if heading.kind == "ordinary" else f" {heading.kind}"
        stream = stream_name(heading.stream)
        spans: list[Span] = [
            (f" {pool_name(heading.pool)}{kind}", "title"), (f"  {stream}  ", "dim"), (format_bytes(total), "strong"),
            (f" in {format_count(len(members))} segment{'s' if len(members) > 1 else ''}  ", "dim"),
            (format_bytes(free), "bad" if free else "strong"), (f" free ({free / total:.0%})", "dim"),
        ]  # fmt: skip
        used = sum(len(text) for text, _ in spans)
        scale = f"1 cell = {format_bytes(heading.cell_bytes).replace('.00', '').replace('.0', '')} "
        room = self.size.width - used
        spans.append((f"{clip(scale, max(room, 0)):>{max(room, 0)}}" if room > len(scale) else "", "dim"))
        return self.look.spans(spans, self.size.width, "surface")

    def _pieces(self, pieces: tuple[Piece, ...]) -> Strip:
        look, colours = self.look, self._colours
        assert colours is not None
        gap = look.style("accent")
        marks: dict[int, str] = {}  # what stands in the gaps around the selected segment
        for piece in pieces:
            if piece.segment == self.segment:
                marks[piece.x] = "▐"
                marks[piece.x + piece.count + 1] = "▌"
        segments: list[Segment] = []
        at = 0
        for piece in pieces:
            first = piece.x + 1
            segments += [Segment(marks.get(x, " "), gap) for x in range(at, first)]
            behind = "select" if piece.segment == self.segment else ""
            cells, base = self._cells[piece.segment]
            part = slice(base + piece.first, base + piece.first + piece.count)
            for fill, code, odd in zip(
                cells.fill[part].tolist(), cells.code[part].tolist(), cells.odd[part].tolist(), strict=True
            ):
                segments.append(cell_segment(look, colours, fill, code, odd, behind))
            at = first + piece.count
        segments.append(Segment(marks.get(at, " "), gap))
        return Strip(segments).simplify().adjust_cell_length(self.size.width, look.style("text"))
