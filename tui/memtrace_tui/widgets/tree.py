"""The call tree: as rows that open and close, and as an icicle, rows of bricks each as wide as its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.strip import Strip

from memtrace.render.words import MARKS, bar, clip
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.calltree import Brick, CallNode, icicle, open_hot, visible
from memtrace_tui.data.lines import Span
from memtrace_tui.widgets.base import Drawn, Rows, keys

_LEAST = 18  # cells that a frame has at least, however deep it lies


class CallTree(Rows):
    """Frames by the bytes they answer for."""

    BINDINGS = keys("""
        right  expand(True)   Open/close                       ←→
        left   expand(False)  -Close
        e      expand_all     -Open all frames, or close them
        enter  open           Allocations
    """)

    def __init__(self) -> None:
        super().__init__(id="calltree")
        self.root = CallNode("", -1)
        self.nodes: list[CallNode] = []
        self._open: set[int] = set()
        self._deepest = 0

    @property
    def node(self) -> CallNode | None:
        """The selected frame."""
        return self.nodes[self.selected] if self.selected < len(self.nodes) else None

    def show(self, root: CallNode) -> None:
        self.root = root
        self._open = open_hot(root, max(self.app.size.height - 8, 12))
        self._rebuild()

    def _rebuild(self) -> None:
        self.nodes = list(visible(self.root, self._open))
        self._deepest = max(node.depth for node in self.nodes) - self.root.depth
        self.reset(len(self.nodes))

    def choose(self, node: CallNode) -> None:
        """Select a frame, opening what leads to it."""
        self._open |= {id(each) for each in node.way[:-1]}
        self._rebuild()
        if node in self.nodes:
            self.selected = self.nodes.index(node)
            self.show_selected()
            self.refresh()

    def action_expand(self, wanted: bool) -> None:
        """Open, or close; a closed frame's left key goes to its caller."""
        node = self.node
        if node is None:
            return
        if wanted and id(node) in self._open:
            self.select(self.selected + 1)
        elif not wanted and id(node) not in self._open:
            self.select(self.nodes.index(node.parent) if node.parent in self.nodes else 0)
        elif node.children:
            self._open ^= {id(node)}
            self._rebuild()

    def action_expand_all(self) -> None:
        """Open everything, or close everything again."""
        everything = {id(node) for node in visible(self.root)}
        self._open = {id(self.root)} if everything <= self._open else everything
        self._rebuild()

    def find(self, fits: Callable[[str], bool], by: int) -> None:
        """Select the next frame (-1: the one before) whose label fits, wherever in the tree, around the end."""
        everything = list(visible(self.root))
        here = next((i for i, node in enumerate(everything) if node is self.node), 0)
        for step in range(1, len(everything) + 1):
            node = everything[(here + step * by) % len(everything)]
            if fits(node.label):
                self.choose(node)
                self.post_message(self.Moved(self))
                return

    def draw_row(self, row: int, width: int, is_selected: bool) -> Strip:
        node = self.nodes[row]
        mark = ("▾ " if id(node) in self._open else "▸ ") if node.children else "  "
        place, _, name = node.label.partition(" ") if node.frame >= 0 else ("", "", node.label)
        share = node.bytes / (self.root.bytes or 1)
        role = f"cat:{node.category}"
        count = f"  ×{format_count(node.count)}"
        spans: list[Span] = [(f"{format_bytes(node.bytes):>11}", "strong"), (f"{share:>7.1%} ", "dim")]
        if width >= 72:
            spans.append((f"{bar(share, 8):<8} ", role))
        if self.look.plain:
            mark += MARKS[node.category].letter + " "
        room = width - sum(len(text) for text, _ in spans) - len(mark) - len(count)
        # One indent for all rows, as wide as the deepest of them leaves room for.
        spare = width - (28 if width >= 72 else 19) - 10 - _LEAST
        step = max(min(2.0, spare / max(self._deepest, 1)), 0.25)
        indent = max(min(int((node.depth - self.root.depth) * step), room - _LEAST), 0)
        spans += [(" " * indent, "text"), (mark, role)]
        # The line number is the last to go, and what is cut shows it.
        name = clip(name, max(room - indent - len(place) - 2, (room - indent) // 2) if place else room - indent)
        place = "  " + clip(place, room - indent - len(name) - 2, keep_end=True) if place else ""
        spans += [(name, "text"), (place, "dim"), (count, "dim")]
        behind = ("select" if self.has_focus else "panel") if is_selected else "background"
        return self.look.spans(spans, width, behind)


class Icicle(Drawn, can_focus=True):
    """Bricks under a root, each as wide as its bytes."""

    BINDINGS = keys("""
        left right   side(±1)   Brick / Right   ←→↑↓
        up,k down,j  depth(±1)  -Up / Down
    """)

    @dataclass
    class Chosen(Message):
        """Another brick is selected."""

        node: CallNode

    def __init__(self) -> None:
        super().__init__(id="icicle")
        self.root = self.node = CallNode("", -1)

    def show(self, root: CallNode) -> None:
        self.root = self.node = root
        self.refresh()

    def choose(self, node: CallNode) -> None:
        self.node = node
        self.refresh()

    def _rows(self) -> list[list[Brick]]:
        return icicle(self.root, self.size.width, self.size.height)

    def _select(self, node: CallNode) -> None:
        self.choose(node)
        self.post_message(self.Chosen(node))

    def action_side(self, by: int) -> None:
        for row in self._rows():
            nodes = [brick.node for brick in row]
            if self.node in nodes:
                self._select(nodes[max(min(nodes.index(self.node) + by, len(nodes) - 1), 0)])

    def action_depth(self, by: int) -> None:
        """Down to the widest brick below, or up to the caller."""
        shown = [brick.node for row in self._rows() for brick in row]
        below = [self.node.parent] if by < 0 else self.node.ordered()
        found = next((node for node in below if node in shown), None)
        if found is not None:
            self._select(found)

    def on_click(self, event: events.Click) -> None:
        for brick in self._rows()[event.y]:
            if brick.x <= event.x < brick.x + brick.width:
                self._select(brick.node)

    def draw_line(self, y: int) -> Strip:
        rows = self._rows()
        look = self.look
        segments: list[Segment] = []
        at = 0
        for number, brick in enumerate(rows[y]):
            if brick.x > at:
                segments.append(Segment(" " * (brick.x - at), look.style("text")))
            name = brick.node.label.rpartition(" ")[2] if brick.node.frame >= 0 else brick.node.label
            if look.plain:
                name = f"{MARKS[brick.node.category].letter} {name}"
            text = f"{name}  {format_bytes(brick.node.bytes)}"
            if len(text) + 2 > brick.width:
                text = name
            body = f"{clip(' ' + text, brick.width - 1):<{brick.width - 1}}"
            role = f"cat:{brick.node.category}" if number % 2 else f"shade:cat|{brick.node.category}"
            is_selected = brick.node is self.node
            style = look.style("background", "strong" if is_selected else role)
            if look.plain:
                style = look.style("text", "select" if is_selected else "background")
            segments.append(Segment(body + ("▕" if brick.width > 1 else " ")[: brick.width - len(body)], style))
            at = brick.x + brick.width
        return Strip(segments).adjust_cell_length(self.size.width, look.style("text"))
