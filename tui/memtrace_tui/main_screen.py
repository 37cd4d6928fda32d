"""The screen around all views: tabs, cursor line, the view, the scrubber, the keys; and what moves the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.timer import Timer

from memtrace.errors import MemtraceError
from memtrace_tui.actions import Actions
from memtrace_tui.data.goto import Goto
from memtrace_tui.memory import give_back
from memtrace_tui.messages import Failed, MoveCursor, Open
from memtrace_tui.session import Session
from memtrace_tui.views import DIFF, Entry, View
from memtrace_tui.widgets.bars import CursorLine, KeyBar, Scrubber, Tabs

if TYPE_CHECKING:
    from memtrace.explain.answer import Explanation
    from memtrace_tui.app import BrowseApp

TICK_S = 1 / 12


class MainScreen(Actions, Screen[None]):
    """Owner of the cursor: everything else posts :class:`MoveCursor` or :class:`Open`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("comma", "event(-1)", "Event", key_display=", .", tooltip="One event back or on"),
        Binding("full_stop", "event(1)", "Next event", show=False),
        Binding("less_than_sign", "percent(-1)", "A hundredth of the trace", show=False, key_display="< >"),
        Binding("greater_than_sign", "percent(1)", "On 1 %", show=False),
        Binding(
            "left_square_bracket",
            "neighbour('phase', -1)",
            "Phase",
            key_display="[ ]",
            tooltip="Previous or next phase",
        ),
        Binding("right_square_bracket", "neighbour('phase', 1)", "Next phase", show=False),
        Binding(
            "left_curly_bracket", "neighbour('step', -1)", "Step", key_display="{ }", tooltip="Previous or next step"
        ),
        Binding("right_curly_bracket", "neighbour('step', 1)", "Next step", show=False),
        Binding("p", "jump('peak')", "Peak", tooltip="To the peak of allocated memory"),
        Binding("P", "jump('reserved-peak')", "Peak of reserved", show=False),
        Binding("o", "oom", "OOM", tooltip="To the next refused request"),
        Binding("colon", "ask_event", "Go to", show=False, key_display=":"),
        Binding("space", "play(1)", "Play", tooltip="Play the cursor forward, or stop"),
        Binding("backspace", "play(-1)", "Play back", show=False),
        Binding("right_parenthesis", "speed(1)", "Play faster or slower", show=False, key_display=") ("),
        Binding("left_parenthesis", "speed(-1)", "Slower", show=False),
        Binding("d", "device", "Next GPU", show=False),
        Binding("y", "copy", "Copy", show=False),
        Binding("x", "export_csv", "Save CSV", show=False),
        Binding("X", "export_svg", "Save SVG", show=False),
        Binding("t", "theme", "Theme", show=False),
        Binding("question_mark,f1", "help", "Help", key_display="?"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, session: Session, views: Sequence[Entry], first: str = "overview") -> None:
        super().__init__()
        self.session = session
        self.view_types = {each.view: each for each in views}
        self.view_keys = {each.view: each.key for each in views}
        self.current = first
        self.direction = 0
        self.speed = max(session.provider.count // 600, 1)
        self._timer: Timer | None = None
        self._is_stale = False
        for each in {DIFF.view: DIFF, **self.view_types}.values():  # without a second file, 7 says what it needs
            self._bindings.bind(each.key, f"view('{each.view}')", each.title, show=False)

    @property
    def browser(self) -> BrowseApp:
        """The application."""
        return cast("BrowseApp", self.app)

    def compose(self) -> ComposeResult:
        """Four lines and the body."""
        yield Tabs([(self.view_keys[name], name, each.title) for name, each in self.view_types.items()])
        yield CursorLine(self.session)
        yield Container(id="body")
        yield Scrubber(self.session)
        yield KeyBar()

    async def on_mount(self) -> None:
        """Show the first view."""
        self._timer = self.set_interval(TICK_S, self._tick, pause=True)
        self.bindings_updated_signal.subscribe(self, lambda _: self.query_one(KeyBar).refresh())
        self.set_class(self.app.size.width >= 118, "wide")
        await self.action_view(self.current)
        self.set_timer(0.25, self.action_explain)  # after the first screen, with which it would compete

    # -- findings

    def action_explain(self) -> None:
        """Work out the findings in a thread, unless they are known."""
        if self.session.explanation is None:
            self.run_worker(self._explain, thread=True, exclusive=True, group="explain", exit_on_error=False)

    def _explain(self) -> None:
        try:
            for entry in self.view_types.values():  # so that the first key to a screen need not import it
                entry.load()
            give_back()
            key, explanation = self.session.explain()
        except Exception as error:
            self.call_later(self.browser.fail, error, "explain")
            return
        give_back()
        self.call_later(self._explained, key, explanation)

    def _explained(self, key: tuple[int, int], explanation: Explanation) -> None:
        self.session.keep(key, explanation)
        self.update()

    # -- views

    @property
    def view(self) -> View:
        """The view on screen."""
        return self.query_one(f"#view-{self.current}", View)

    async def action_view(self, name: str) -> None:
        """Show a view, made when it is first asked for."""
        if name not in self.view_types:
            self.notify("This screen compares two files: memtrace browse BEFORE AFTER", timeout=4)
            return
        body = self.query_one("#body")
        existing = body.query(f"#view-{name}")
        if not existing:
            await body.mount(self.view_types[name].load()(self.session))
        self.current = name
        with self.app.batch_update():  # one repaint
            for view in body.query(View):
                view.display = view.view == name
            self.query_one(Tabs).show(name)
            self.view.main().focus()
            self.view.show()

    def update(self) -> None:
        """Something that screens show has changed: draw once, however many changes there were."""
        if not self._is_stale:
            self._is_stale = True
            self.call_later(self._update_now)

    def _update_now(self) -> None:
        self._is_stale = False
        self.query_one(CursorLine).refresh()
        self.query_one(Scrubber).refresh()
        try:
            self.view.show()
        except Exception as error:
            self.browser.fail(error, self.current)

    # -- messages

    def on_move_cursor(self, message: MoveCursor) -> None:
        """The one place that moves the cursor."""
        message.stop()
        self.go(message.event)

    def go(self, event: int) -> None:
        """Put the cursor on an event."""
        if self.session.move(event):
            self.update()

    async def on_open(self, message: Open) -> None:
        """A jump: the cursor, then the view, then what to show there."""
        message.stop()
        await self.open(message.goto)

    async def open(self, goto: Goto) -> None:
        """Follow a jump."""
        if goto.event is not None:
            self.session.move(goto.event)
        try:
            await self.action_view(goto.view or self.current)
            self.view.arrive(goto)
        except MemtraceError as error:
            self.browser.fail(error, "jump")
        self.update()

    def on_failed(self, message: Failed) -> None:
        """A widget could not draw."""
        message.stop()
        self.browser.fail(message.error, message.where)

    def on_resize(self, event: events.Resize) -> None:
        """Wide or narrow."""
        self.set_class(event.size.width >= 118, "wide")
        self.update()

    # -- playing

    def _tick(self) -> None:
        event = self.session.event + self.direction * self.speed
        clamped = max(self.session.provider.clamp(event), 0)
        if clamped != event or not self.session.provider.count:
            self.stop()
        self.go(clamped)

    def stop(self) -> None:
        """Stop playing."""
        self.direction = 0
        if self._timer is not None:
            self._timer.pause()
        line = self.query_one(CursorLine)
        line.playing = 0
        line.refresh()

    def action_play(self, direction: int) -> None:
        """Play forward or back; the same key again stops."""
        if self.direction == direction or not self.session.provider.count:
            self.stop()
            return
        self.direction = direction
        line = self.query_one(CursorLine)
        line.playing = direction
        line.refresh()
        if self._timer is not None:
            self._timer.resume()
