"""``memtrace live``: a running program's memory as it moves, and from there the browser on a snapshot of now."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from textual.app import ComposeResult
from textual.message import Message
from textual.screen import Screen

from memtrace.live.alarms import SOON_STEPS
from memtrace.live.state import LiveView
from memtrace.live.watch import Watch, Watched
from memtrace.render.live_text import live_lines
from memtrace.units import format_count
from memtrace_tui.app import BrowseApp
from memtrace_tui.data.lines import Line, line
from memtrace_tui.dialogs import Ask, Details
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.provider import BrowsedRecording, StartView
from memtrace_tui.views import key_lines
from memtrace_tui.widgets.bars import KeyBar
from memtrace_tui.widgets.base import Lines, keys


class Answered(Message):
    """There may be answers to an order."""


class LiveScreen(Screen[None]):
    """One page of lines that is written anew with every refresh."""

    BINDINGS = keys("""
        s                 snapshot        Snapshot       s      Walk a snapshot of now in the browser; q comes back
        b                 blocks          Blocks now     b      Look at the blocks: categories, fragmentation, growth
        e                 stacks          Stacks on/off  e      Record stacks, or stop: what was recorded goes to a file
        m                 phase           Mark a phase   m      Mark a phase of the program by name
        space             hold            Hold           space  Hold the picture still, or go on
        t                 app.next_theme  -Theme         t      Next theme
        question_mark,f1  help            -Help
        q                 app.quit        -Quit          q      Leave; the program runs on
    """)

    def __init__(self, watched: Watched, dies: int | None) -> None:
        super().__init__()
        self.watched = watched
        self.dies = dies  # the step in which a forecast of the run's lengths dies
        self.is_held = False
        self.view: LiveView | None = None
        self._sounded: set[object] = set()

    def compose(self) -> ComposeResult:
        yield Lines(id="live")
        yield KeyBar()

    def on_resize(self) -> None:
        if self.view is not None:
            self._draw(self.view)

    def show(self, view: LiveView) -> None:
        """A new view; what an alarm says is said once as a notification, too."""
        for alarm in view.alarms:
            if alarm.get("id") not in self._sounded:
                self._sounded.add(alarm.get("id"))
                self.notify(str(alarm.get("line")), title=f"Alarm: {alarm.get('id')}", severity="warning", markup=False)
        self.view = view
        if not self.is_held:
            self._draw(view)

    def _draw(self, view: LiveView) -> None:
        lines = [Line(tuple(spans)) for spans in live_lines(view, self.size.width - 1)]
        if self.dies is not None:
            role = "bad" if view.step <= self.dies <= view.step + SOON_STEPS else "dim"
            lines.append(line((f" by the forecast of its lengths it dies in step {format_count(self.dies)}", role)))
        self.query_one("#live", Lines).show(lines)

    def _order(self, do: str, **details: object) -> None:
        self.watched.order(do, **details)
        self.post_message(Answered())  # a recording answers at once, and has perhaps ended

    def action_snapshot(self) -> None:
        self.notify("Taking a snapshot…", timeout=3)
        self._order("snapshot")

    def action_blocks(self) -> None:
        if isinstance(self.watched, Watch):
            self.watched.ask_now("now")

    def action_stacks(self) -> None:
        self._order("stacks", on=not (self.view is not None and self.view.now.get("stacks")))

    def action_phase(self) -> None:
        hint = "The program is in this phase from now on, until it enters another one."
        self.app.push_screen(Ask("Mark a phase", hint, "", lambda name: self._order("phase", name=name)))

    def action_hold(self) -> None:
        self.is_held = not self.is_held
        self.notify("Held." if self.is_held else "Going on.", timeout=2)

    def action_help(self) -> None:
        self.app.push_screen(Details("Help", lambda *_: key_lines("keys", self.app, self.BINDINGS)))


class LiveApp(BrowseApp):
    """Watches one program; ``every_s`` between two pictures, ``poll_s`` for one turn of listening."""

    def __init__(self, watched: Watched, every_s: float, poll_s: float, dies: int | None = None) -> None:
        super().__init__(watched.state.name)
        self.watched = watched
        self._every_s, self._poll_s = every_s, poll_s
        self._live = LiveScreen(watched, dies)
        self._leaving = False

    def open_first(self) -> None:
        self.push_screen(self._live)
        self.run_worker(self._listen, thread=True, exit_on_error=False)

    def _listen(self) -> None:
        """In a thread: takes in what comes, and makes the views."""
        shown = 0.0
        goes_on = True
        try:
            while goes_on and not self._leaving:
                goes_on = self.watched.poll(self._poll_s)
                if self.watched.state.done:
                    self.post_message(Answered())
                if time.monotonic() - shown >= self._every_s or not goes_on:
                    shown = time.monotonic()
                    self.call_later(self._live.show, self.watched.state.view())
        except Exception as error:
            if not self._leaving:
                self.call_later(self.fail, error, "live")

    def on_answered(self, message: Answered) -> None:
        """Say or do what the answers ask for."""
        message.stop()
        for answer in self.watched.state.take_answers():
            self._answer(answer)

    def _answer(self, answer: dict[str, object]) -> None:
        do, wrong = str(answer.get("do")), answer.get("error")
        if wrong:
            self.notify(f"{do}: {wrong}", severity="warning", markup=False)
        elif do == "snapshot" and Path(str(answer.get("file"))).is_file():  # no address, and no pipe
            self.run_worker(partial(self._open, str(answer.get("file"))), thread=True, exit_on_error=False)
        elif do == "blocks" and "wait_s" in answer:
            self.notify(f"The blocks were looked at just now; again in {answer['wait_s']} s.", markup=False, timeout=2)
        elif do in ("stacks", "phase"):
            self.notify(f"{do}: {answer.get(do)}", markup=False, timeout=3)

    def _open(self, file: str) -> None:
        try:
            recording = BrowsedRecording.open(file, StartView(None, "end"))
        except Exception as error:
            self.call_later(self.fail, error, "opening the snapshot")
            return
        self.call_later(self._start, recording, None)

    async def action_quit(self) -> None:
        if any(isinstance(screen, MainScreen) for screen in self.screen_stack):
            while not isinstance(self.screen, LiveScreen):  # a snapshot's screen: back to the program
                self.pop_screen()
            return
        self._leaving = True
        await super().action_quit()
