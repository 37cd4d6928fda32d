"""The call tree as rows that open and close."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip

from memtrace.render.words import MARKS, bar, clip
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.calltree import Node, open_hot, visible
from memtrace_tui.data.lines import Span
from memtrace_tui.widgets.base import Rows

_LEAST = 24  # cells that a frame has at least, however deep it lies


class CallTree(Rows):
    """Frames by the bytes they answer for."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "expand(True)", "Open/close", key_display="←→"),
        Binding("left,h", "expand(False)", "Close", show=False),
        Binding("e", "expand_all", "All", show=False),
    ]

    @dataclass
    class Chosen(Message):
        """Another frame is selected."""

        node: Node

    def __init__(self) -> None:
        super().__init__(id="calltree")
        self.root: Node | None = None
        self.nodes: list[Node] = []
        self._open: set[int] = set()

    @property
    def node(self) -> Node | None:
        """The selected frame."""
        return self.nodes[self.selected] if self.selected < len(self.nodes) else None

    def show(self, root: Node) -> None:
        self.root = root
        self._open = open_hot(root, max(self.app.size.height - 8, 12))
        self._rebuild()

    def _rebuild(self) -> None:
        assert self.root is not None
        self.nodes = visible(self.root, self._open)
        self.reset(len(self.nodes))

    def choose(self, node: Node) -> None:
        """Select a frame, opening what leads to it."""
        path = _path(self.root, node) if self.root is not None else []
        self._open |= {id(each) for each in path[:-1]}
        self._rebuild()
        for row, each in enumerate(self.nodes):
            if each is node:
                self.selected = row
                self.show_selected()
                self.refresh()

    def action_expand(self, wanted: bool) -> None:
        """Open, or close; a closed frame's left key goes to its caller."""
        node = self.node
        if node is None:
            return
        if wanted and node.children:
            if id(node) in self._open:
                self.select(self.selected + 1)
                return
            self._open.add(id(node))
        elif not wanted and id(node) in self._open:
            self._open.discard(id(node))
        elif not wanted:
            above = [i for i in range(self.selected) if self.nodes[i].depth < node.depth]
            self.select(above[-1] if above else 0)
            return
        self._rebuild()

    def action_expand_all(self) -> None:
        """Open everything, or close everything again."""
        assert self.root is not None
        queue, everything = [self.root], set()
        while queue:
            node = queue.pop()
            everything.add(id(node))
            queue += node.children.values()
        self._open = {id(self.root)} if everything <= self._open else everything
        self._rebuild()

    def opened(self, row: int) -> None:
        node = self.nodes[row]
        self._open ^= {id(node)}
        self._rebuild()

    def selection_moved(self) -> None:
        if self.node is not None:
            self.post_message(self.Chosen(self.node))

    def draw_row(self, row: int, width: int, is_selected: bool) -> Strip:
        node = self.nodes[row]
        total = self.nodes[0].bytes or 1
        mark = ("▾ " if id(node) in self._open else "▸ ") if node.children else "  "
        place, _, name = node.label.partition(" ") if node.frame >= 0 else ("", "", node.label)
        share = node.bytes / total
        role = f"cat:{node.category}"
        count = f"  ×{format_count(node.count)}"
        spans: list[Span] = [(f"{format_bytes(node.bytes):>11}", "strong"), (f"{share:>7.1%} ", "dim")]
        if width >= 60:
            spans.append((f"{bar(share, 8):<8} ", role))
        if self.look.plain:
            mark += MARKS[node.category].letter + " "
        room = width - sum(len(text) for text, _ in spans) - len(mark) - len(count)
        indent = max(min(2 * node.depth, room - _LEAST), 0)
        spans += [(" " * indent, "text"), (mark, role)]
        name, place = _fitted(name, place, room - indent)
        spans += [(name, "text"), (place, "dim"), (count, "dim")]
        behind = ("select" if self.has_focus else "panel") if is_selected else "background"
        return self.look.spans(spans, width, behind)


def _fitted(name: str, place: str, room: int) -> tuple[str, str]:
    """Name and place of a frame in ``room`` cells. The line number is the last to go, and what is cut shows it."""
    if not place:
        return clip(name, room), ""
    name = clip(name, max(room - len(place) - 2, room // 2))
    return name, "  " + clip(place, room - len(name) - 2, keep_end=True)


def _path(root: Node, wanted: Node) -> list[Node]:
    """From the root to a node."""
    pending: list[list[Node]] = [[root]]
    while pending:
        path = pending.pop()
        if path[-1] is wanted:
            return path
        pending += [[*path, child] for child in path[-1].children.values()]
    return []
