"""An icicle: the call tree as rows of bricks, each as wide as its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.strip import Strip

from memtrace.render.words import MARKS, clip
from memtrace.units import format_bytes
from memtrace_tui.data.calltree import Brick, CallNode, icicle
from memtrace_tui.widgets.base import Drawn, keys


class Icicle(Drawn, can_focus=True):
    """Bricks under a root; the selected one can become the root."""

    BINDINGS = keys("""
        left right   side(±1)   Brick / Right   ←→↑↓
        up,k down,j  depth(±1)  -Up / Down
        enter        into       Zoom in
        escape       out        Zoom out
    """)

    @dataclass
    class Chosen(Message):
        """Another brick is selected."""

        node: CallNode

    def __init__(self) -> None:
        super().__init__(id="icicle")
        self.root = CallNode("", -1, 0)
        self.trail: list[CallNode] = []
        self.node = self.root

    def show(self, root: CallNode) -> None:
        self.root, self.trail, self.node = root, [], root
        self.refresh()

    def choose(self, node: CallNode) -> None:
        self.node = node
        self.refresh()

    def _rows(self) -> list[list[Brick]]:
        return icicle(self.root, self.size.width, self.size.height)

    def _place(self) -> tuple[int, int] | None:
        for depth, row in enumerate(self._rows()):
            for at, brick in enumerate(row):
                if brick.node is self.node:
                    return depth, at
        return None

    def _select(self, brick: Brick) -> None:
        self.node = brick.node
        self.refresh()
        self.post_message(self.Chosen(brick.node))

    def action_side(self, by: int) -> None:
        place = self._place()
        if place is not None:
            row = self._rows()[place[0]]
            self._select(row[max(min(place[1] + by, len(row) - 1), 0)])

    def action_depth(self, by: int) -> None:
        place = self._place()
        if place is None:
            return
        depth, at = place
        rows = self._rows()
        brick = rows[depth][at]
        if not 0 <= depth + by < len(rows):
            return
        near = [b for b in rows[depth + by] if b.x < brick.x + brick.width and b.x + b.width > brick.x]
        if near:
            self._select(max(near, key=lambda b: b.node.bytes))

    def action_into(self) -> None:
        """The selected brick becomes as wide as the screen."""
        if self.node is not self.root:
            self.trail.append(self.root)
            self.root = self.node
            self.refresh()

    def action_out(self) -> None:
        if self.trail:
            self.root = self.trail.pop()
            self.refresh()

    def on_click(self, event: events.Click) -> None:
        for brick in self._rows()[event.y]:
            if brick.x <= event.x < brick.x + brick.width:
                if brick.node is self.node:
                    self.action_into()
                else:
                    self._select(brick)

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
