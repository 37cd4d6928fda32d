"""The call tree as rows that open and close."""

from __future__ import annotations

from collections.abc import Callable

from textual.strip import Strip

from memtrace.render.words import MARKS, bar, clip
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.calltree import CallNode, open_hot, path, visible
from memtrace_tui.data.lines import Span
from memtrace_tui.widgets.base import Rows, keys

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
        self.root = CallNode("", -1, 0)
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
        way = path(self.root, node)
        self._open |= {id(each) for each in way[:-1]}
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
        total = self.nodes[0].bytes or 1
        mark = ("▾ " if id(node) in self._open else "▸ ") if node.children else "  "
        place, _, name = node.label.partition(" ") if node.frame >= 0 else ("", "", node.label)
        share = node.bytes / total
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
        indent = max(min(int((node.depth - self.nodes[0].depth) * step), room - _LEAST), 0)
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
