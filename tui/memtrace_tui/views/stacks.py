"""Stacks: live bytes by who called whom, as a tree and as an icicle, with the source where it is at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.containers import Container, Vertical

from memtrace.attribution.sites import frame_label
from memtrace.units import format_bytes, printable
from memtrace_tui.data.calltree import CallNode, call_tree, visible
from memtrace_tui.data.lines import Goto, Line, line
from memtrace_tui.data.query import exactly
from memtrace_tui.data.source import source_lines
from memtrace_tui.views import View
from memtrace_tui.widgets.base import Lines, Open, keys
from memtrace_tui.widgets.tree import CallTree, Icicle


class StacksView(View):
    """The tree at the left, the icicle at the right (or in its place), the source below."""

    about = (
        "Bytes live at the cursor under each caller; inverted, by the frame that allocated them first. Enter shows the "
        "allocations made through a frame. Folded frames (f) only pass the call on; e opens every frame, or closes all."
    )
    BINDINGS = keys("""
        v         invert          Invert
        i         icicle          Icicle
        z,enter   focus_frame(1)  Focus        z    Only what the selected frame called, or everything again (Z)
        Z,escape  focus_frame(0)  -Whole tree
        n         next(1)         Next         n N  To the next frame that the filter names
        N         next(-1)        -Previous
    """)

    on_icicle = False
    root = CallNode("", -1)
    _within: tuple[int, ...] = ()  # frames on the way to the subtree in focus
    _key: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines(id="stacks-summary", classes="summary")
            with Container(id="stacks-split"):
                yield CallTree()
                yield Icicle()
            yield Lines(id="source", classes="below")

    def main(self) -> CallTree | Icicle:
        return self.query_one(Icicle) if self.on_icicle else self.query_one(CallTree)

    def show(self) -> None:
        session, tree, bricks = self.session, self.query_one(CallTree), self.query_one(Icicle)
        tree.display, bricks.display = self.wide or not self.on_icicle, self.wide or self.on_icicle
        settings = session.settings
        key = (session.provider, session.event, session.filter, settings.inverted, settings.fold, *self._within)
        if key != self._key:
            self._key = key
            self.root = call_tree(session.provider, session.live(), settings.inverted, settings.fold)
            for frame in self._within:
                self.root = self.root.children.get(frame, self.root)
            tree.show(self.root)
            bricks.show(self.root)
        order = "allocating frame first" if settings.inverted else "callers first"
        self.query_one("#stacks-summary", Lines).show([line(
            (f" {format_bytes(self.root.bytes)}", "strong"),
            (f" requested by {self.root.count:,} live allocations, ", "dim"),
            (order, "accent"), (", folded" if settings.fold else ", every frame", "dim"),
        )])  # fmt: skip
        self._source(tree.node)

    def _source(self, node: CallNode | None) -> None:
        below = self.query_one("#source", Lines)
        room = max(min(self.app.size.height // 3, 12), 5)
        lines: list[Line] = []
        if node is not None and node.frame >= 0:
            frame = self.session.provider.timeline.snapshot.stacks.frames[node.frame]
            lines = source_lines(frame, room - 1)
            if lines or self.app.size.height >= 36:
                where = printable(f"{frame.filename}:{frame.line}")
                note = "" if lines else "   (the file is not on this machine)"
                lines = [line((f" {where}", "title"), (note, "dim")), *lines]
        below.display = bool(lines)
        below.show(lines, keep=False)

    # -- actions

    def action_invert(self) -> None:
        self.session.settings.inverted = not self.session.settings.inverted
        self.show()

    def action_icicle(self) -> None:
        self.on_icicle = not self.on_icicle
        self.show()
        self.main().focus()

    def action_focus_frame(self, closer: int) -> None:
        node = self.main().node if closer else None
        self._within = () if node is None else tuple(each.frame for each in node.way if each.frame >= 0)
        self.show()

    def action_next(self, by: int) -> None:
        """To the next frame that a word of the filter is in, around the end."""
        patterns = [term.pattern for term in self.session.terms if term.pattern is not None and not term.negated]
        if not patterns:
            self.notify("Filter for something first (/).", severity="warning")
        else:
            self.query_one(CallTree).find(lambda label: any(each.search(label) for each in patterns), by)

    def on_rows_opened(self) -> None:
        """Enter on a frame: what was allocated through it."""
        node = self.query_one(CallTree).node
        if node is not None and node.frame >= 0:
            frame = self.session.provider.timeline.snapshot.stacks.frames[node.frame]
            word = f"stack:/{exactly(printable(frame_label(frame)))}/"
            self.post_message(Open(Goto("allocations", self.session.event, f"{self.session.filter} {word}".strip())))

    def on_rows_moved(self) -> None:
        """The same frame in the icicle, and its source."""
        node = self.query_one(CallTree).node
        if node is not None:
            self.query_one(Icicle).choose(node)
            self._source(node)

    def on_icicle_chosen(self, message: Icicle.Chosen) -> None:
        """The same frame in the tree, and its source."""
        self.query_one(CallTree).choose(message.node)
        self._source(message.node)

    def csv(self) -> Iterable[Sequence[str]]:
        yield "depth", "bytes", "self_bytes", "count", "category", "frame"
        for node in visible(self.root):
            yield str(node.depth), str(node.bytes), str(node.self_bytes), str(node.count), node.category, node.label

    def copy_text(self) -> str:
        node = self.query_one(CallTree).node
        return f"{node.bytes} B  {node.label}" if node is not None else ""
