"""Segments: the map of segments and blocks at the cursor, and inside one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.containers import Container, Vertical

from memtrace.history.layout import State
from memtrace_tui.data.coloring import MODES, legend_lines
from memtrace_tui.data.details import block_lines, segment_lines
from memtrace_tui.data.flow import SORTS
from memtrace_tui.data.lines import Goto, Line
from memtrace_tui.views import View
from memtrace_tui.widgets.base import Lines, keys
from memtrace_tui.widgets.segmap import BlockMap, SegMap


def _after(name: str, names: tuple[str, ...]) -> str:
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]


class SegmentsView(View):
    """The map at the left or above, the details of what is selected at the right or below."""

    about = (
        "Each segment is as long as it is large. A cell's colour is what most of it holds, its height how much of it "
        "is in use, and the rest of it is the hole. Play the cursor (space) and watch the layout move."
    )
    BINDINGS = keys("""
        c    coloring        Colour
        s    sort            Sort
        w    pins            What pins
    """)

    def compose(self) -> ComposeResult:
        with Container(id="segments-split"):
            with Vertical(id="maps"):
                yield Lines(id="legend", classes="summary")
                yield SegMap(self.session)
                blocks = BlockMap(self.session)
                blocks.display = False
                yield blocks
            yield Lines(id="details", classes="pane")

    @property
    def is_inside(self) -> bool:
        """Whether one segment is looked into."""
        return bool(self.query_one(BlockMap).display)

    def main(self) -> SegMap | BlockMap:
        return self.query_one(BlockMap) if self.is_inside else self.query_one(SegMap)

    def show(self) -> None:
        segments, blocks = self.query_one(SegMap), self.query_one(BlockMap)
        if segments.address < 0 and len(segments.layout_now):
            pinned = self.session.report.fragmentation.pinned_segments  # begin with that of most free bytes
            segments.address = pinned[0].address if pinned else int(segments.layout_now.address[0])
        if self.is_inside:
            blocks.show()
        segments.refresh()
        self._legend()
        self._details()

    def _legend(self) -> None:
        legend, order = self.query_one("#legend", Lines), SORTS.get(self.session.segment_sort, "")
        width = self.app.size.width - (self.side_width + 4 if self.wide else 0)
        lines = legend_lines(self.session.colours, order, width, legend.look.plain)
        legend.styles.height = len(lines)
        legend.show(lines)

    def _details(self) -> None:
        details = self.query_one("#details", Lines)
        segments, blocks = self.query_one(SegMap), self.query_one(BlockMap)
        layout, provider = segments.layout_now, self.session.provider
        width = self.side_width if self.wide else max(self.app.size.width - 3, 20)
        lines: list[Line] = []
        if self.is_inside and blocks.block >= 0:
            lines = block_lines(provider, layout, blocks.block, width, self.session.settings.fold)
        elif not self.is_inside and segments.segment >= 0:
            lines = segment_lines(provider, layout, segments.segment, width)
        details.show(lines, keep=False)

    # -- actions

    def action_coloring(self) -> None:
        session = self.session
        session.coloring = session.settings.coloring = _after(session.coloring, MODES)
        self.show()

    def action_pins(self) -> None:
        """Colour by what pins holes, most free segments first; again for what was chosen. Not remembered: a look."""
        session = self.session
        chosen = session.settings.coloring, session.settings.segment_sort
        look = "pins", "free"
        if (session.coloring, session.segment_sort) == look:
            look = chosen if chosen != look else ("category", "address")
        session.coloring, session.segment_sort = look
        self.show()

    def action_sort(self) -> None:
        session, segments = self.session, self.query_one(SegMap)
        session.segment_sort = session.settings.segment_sort = _after(session.segment_sort, tuple(SORTS))
        self.show()
        segments.choose(segments.segment)

    def _look_inside(self, address: int | None = None) -> None:
        segments, blocks = self.query_one(SegMap), self.query_one(BlockMap)
        layout, segment = segments.layout_now, segments.segment
        if segment < 0:
            return
        first, end = int(layout.first_block[segment]), int(layout.first_block[segment + 1])
        if address is None:  # begin at the largest hole
            free = layout.block_bytes[first:end] * (layout.block_state[first:end] == State.FREE)
            address = int(layout.block_address[first + int(free.argmax())])
        segments.display, blocks.display = False, True
        blocks.enter(int(layout.address[segment]), address)
        blocks.focus()
        self._details()

    def on_map_widget_chosen(self) -> None:
        self._details()

    def on_map_widget_turned(self) -> None:
        if not self.is_inside:
            self._look_inside()
            return
        segments, blocks = self.query_one(SegMap), self.query_one(BlockMap)
        segments.display, blocks.display = True, False
        segments.focus()
        self.show()

    def arrive(self, goto: Goto) -> None:
        if goto.address is not None:
            self.query_one(SegMap).address = goto.address
            self.show()
            self._look_inside(goto.address)

    def address(self) -> int | None:
        return self.query_one(BlockMap).address if self.is_inside else None

    def addresses(self) -> tuple[int, int] | None:
        segments, block = self.query_one(SegMap), self.query_one(BlockMap).block
        layout, segment = segments.layout_now, segments.segment
        address, size, at = layout.address, layout.total_bytes, segment
        if self.is_inside and block >= 0:
            address, size, at = layout.block_address, layout.block_bytes, block
        return (int(address[at]), int(address[at] + size[at])) if at >= 0 else None

    def csv(self) -> Iterable[Sequence[str]]:
        layout, provider = self.query_one(SegMap).layout_now, self.session.provider
        rules = provider.analysis.attribution.rule
        yield "segment", "stream", "pool", "address", "bytes", "state", "category", "subcategory", "frame"
        for block in range(len(layout.block_address)):
            segment, row = int(layout.segment[block]), int(layout.row[block])
            purpose = provider.purposes[int(rules[row])].split("/") if row >= 0 else ["", ""]
            frame = provider.site(row) if row >= 0 else ""
            yield (
                f"{int(layout.address[segment]):#x}", str(int(layout.stream[segment])),
                "small" if layout.is_small[segment] else "large", f"{int(layout.block_address[block]):#x}",
                str(int(layout.block_bytes[block])), State(int(layout.block_state[block])).name.lower(), *purpose,
                frame,
            )  # fmt: skip

    def copy_text(self) -> str:
        return self.query_one("#details", Lines).text
