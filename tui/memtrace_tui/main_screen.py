"""The screen around all views: tabs, cursor line, filter, the view, the scrubber, the keys; and what the keys that work
everywhere do. It owns the cursor: everything else posts :class:`MoveCursor` or :class:`Open`."""

from __future__ import annotations

import csv
import gc
import io
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.reactive import Reactive
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input

from memtrace.errors import MemtraceError, UsageError
from memtrace.ranges import PLACES
from memtrace.units import counted, format_count, spreadsheet_text
from memtrace.writing import check_target, whole_file
from memtrace_tui.data.details import frame_lines, history_lines
from memtrace_tui.data.layers import layer_of_rows
from memtrace_tui.data.lines import Goto, Line
from memtrace_tui.dialogs import Ask, Awaited, Details, OneKey
from memtrace_tui.session import Session
from memtrace_tui.settings import is_served
from memtrace_tui.views import VIEWS, View, help_lines
from memtrace_tui.widgets.bars import Cursor, FilterBar, KeyBar, Scrubber, TabBar
from memtrace_tui.widgets.base import Changed, Failed, MoveCursor, Open, keys


class MainScreen(Awaited, Screen[None]):
    """One view at a time, and the keys that work on all of them."""

    focused = Reactive(None, repaint=False)  # what changes with the focus are two widgets, not the whole screen

    BINDINGS = keys("""
        comma full_stop     event(±1)               Event / Next event              , .      One event back or on
        < >                 percent(±1)             -A hundredth of the trace / On 1 %  < >
        [ ]                 neighbour('phase', ±1)  Phase / Next phase              [ ]      Previous or next phase
        { }                 neighbour('step', ±1)   Step / Next step                { }      Previous or next step
        p                   jump('peak')            Peak                            p        To the peak of allocated
        P                   jump('reserved-peak')   -Peak of reserved
        o                   oom                     OOM                             o        To the next refused request
        :                   ask_event               -Go to                          :
        h                   history                 History                         h        All owners of the addresses
        alt+left alt+right  trail(±1)               -Back and forward through jumps / Forward  alt+← alt+→
        m                   mark_place              -Mark this place with a letter, return to it  m x, ' x
        '                   return_to               -Return to a marked place
        A                   mark_event              -Mark event A, to compare (7) with where the cursor goes
        f                   fold                    -Library frames, in all stacks
        /                   filter                  Filter                          /        Filter all screens
        space               play(1)                 Play                            space    Play forward, or stop
        backspace           play(-1)                -Play back
        ( )                 speed(±1)               -Play slower or faster / Faster    ( )
        d                   device                  -Next GPU
        y                   copy                    -Copy
        x                   export_csv              -Save CSV
        X                   export_svg              -Save SVG
        t                   app.next_theme          -Theme
        question_mark,f1    help                    -Help                           ?
        q                   app.quit                -Quit
    """)

    def __init__(self, session: Session, first: str = "overview") -> None:
        super().__init__()
        self.session = session
        self.current = first
        self.speed = max(session.provider.count // 600, 1)
        self._cursor, self._scrubber = Cursor(session), Scrubber(session)
        self._filter, self._key_bar = FilterBar(), KeyBar()
        self._tabs = TabBar({name: f"{each.key} {each.title}" for name, each in VIEWS.items()})
        self._is_stale = False
        self._trail: list[Goto] = []  # places before the present one; and those that alt+left came from
        self._ahead: list[Goto] = []
        self._places: dict[str, Goto] = {}
        for name, each in VIEWS.items():
            self._bindings.bind(each.key, f"view('{name}')", each.title, show=False)

    def compose(self) -> ComposeResult:
        """A line of tabs, the cursor, the filter while it is written, the body, and two lines below."""
        yield self._tabs
        yield self._cursor
        yield self._filter
        yield Container(id="body")
        yield self._scrubber
        yield self._key_bar

    async def on_mount(self) -> None:
        self._timer: Timer = self.set_interval(1 / 12, self._tick, pause=True)
        self.bindings_updated_signal.subscribe(self, lambda _: self._key_bar.refresh())
        await self.action_view(self.current)
        self.set_timer(0.25, self.action_explain)  # after the first screen, with which it would compete

    # -- findings

    def action_explain(self) -> None:
        """Work out the findings in a thread, unless they are known."""
        if self.session.explanation is None:
            self.run_worker(self._explain, thread=True, exclusive=True, group="explain", exit_on_error=False)

    def _explain(self) -> None:
        from memtrace_tui.data.flow import groups
        from memtrace_tui.widgets.chart import Chart

        provider = self.session.provider
        try:
            for entry in VIEWS.values():  # so that the first key to a screen need not import it
                entry.load()
            provider.prepare()
            _ = self.session.log.row_of_event
            layer_of_rows(provider)  # for the details of an allocation
            _ = provider.step_peaks
            Chart.columns_of(self.session, provider.window, self.size.width)
            self.session.table.sorted(None, "size", True)  # with all rows, and their sizes
            groups(provider.layout(provider.peaks[2].event))  # what the map's scales are worked out from
            self.session.explain()
            gc.freeze()  # as after loading
        except Exception as error:
            self.post_message(Failed(error, "explain"))
        self.call_later(self.update)

    # -- views

    @property
    def view(self) -> View:
        """The view on screen."""
        return self.query_one(f"#view-{self.current}", View)

    async def action_view(self, name: str) -> None:
        """Show a view, made when it is first asked for."""
        if name == "diff" and not self.session.compares:
            self.notify("This screen compares: A here, 7 elsewhere; or memtrace browse BEFORE AFTER", timeout=4)
            return
        body = self.query_one("#body")
        if not body.query(f"#view-{name}"):
            made = VIEWS[name].load()(self.session)
            made.display = False  # beside the present one it would halve the room, and what is selected would scroll
            await body.mount(made)
        self.current = name
        for view in body.query(View):
            view.display = view.view == name
        self._tabs.current = name
        self._tabs.refresh()
        self.set_focus(self.view.main())
        self.view.show()

    def update(self) -> None:
        """Something that screens show has changed: draw once, however many changes there were."""
        if not self._is_stale:
            self._is_stale = True
            self.call_later(self._update_now)

    def _update_now(self) -> None:
        self._is_stale = False
        self._cursor.refresh()
        self._scrubber.refresh()
        try:
            self.view.show()
        except Exception as error:
            self.post_message(Failed(error, self.current))

    def on_move_cursor(self, message: MoveCursor) -> None:
        self.go(message.event)

    def go(self, event: int) -> None:
        if self.session.move(event):
            self.update()

    async def on_open(self, message: Open) -> None:
        await self.open(message.goto)

    async def open(self, goto: Goto, is_new: bool = True) -> None:
        """A jump: the cursor, then the view, then what to show there. A new one can be gone back from."""
        session = self.session
        if goto.frame is not None:
            self._details("Frame", partial(frame_lines, session.provider, goto.frame, session.live()))
            return
        if goto.history is not None:
            self._details("Who was here", partial(history_lines, session.provider, *goto.history, session.event))
            return
        if is_new:
            self._trail.append(self.place())
            self._ahead.clear()
        if goto.event is not None:
            session.move(goto.event)
        try:
            if goto.filter is not None:
                session.filter_by(goto.filter)
            await self.action_view(goto.view or self.current)
            self.view.arrive(goto)
        except MemtraceError as error:
            self.post_message(Failed(error, "jump"))
        self.update()

    def place(self) -> Goto:
        """What is on screen, as a place to come back to."""
        return Goto(self.current, self.session.event, self.session.filter, self.view.address())

    async def action_trail(self, by: int) -> None:
        behind, before = (self._trail, self._ahead) if by < 0 else (self._ahead, self._trail)
        if not behind:
            self.notify(f"Nothing {'before' if by < 0 else 'after'} this.", timeout=2)
            return
        before.append(self.place())
        await self.open(behind.pop(), is_new=False)

    async def action_mark_place(self) -> None:
        place = self.place()
        mark = OneKey("mark this place: a letter")
        await self.app.push_screen(mark, lambda key: self._places.update({str(key): place}))

    async def action_return_to(self) -> None:
        def back(key: str | None) -> None:
            if key in self._places:
                self.post_message(Open(self._places[key]))
            else:
                self.notify("No such mark: m and a letter make one.", timeout=3)

        await self.app.push_screen(OneKey(f"return to: {' '.join(self._places) or 'no marks'}"), back)

    def action_mark_event(self) -> None:
        """Event A, with which from now on 7 compares where the cursor goes."""
        self.session.mark = self.session.event
        self.notify("A is here. Go elsewhere; 7 compares.", timeout=3)
        self.update()

    async def action_history(self) -> None:
        """Who had the addresses of the selection."""
        found = self.view.addresses()
        if found is None:
            self.notify("Select a block, an allocation or an event with an address.", timeout=3)
        else:
            await self.open(Goto(history=found))

    def action_fold(self) -> None:
        """Show or fold library frames."""
        self.session.settings.fold = not self.session.settings.fold
        self.update()

    def on_changed(self, message: Changed) -> None:
        self.update()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= 118, "wide").set_class(event.size.height < 16, "low")
        self.update()

    # -- the filter

    def action_filter(self) -> None:
        self._filter.begin(self.session.filter)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while writing; what is wrong with a half-written one is said, and the last good one stays."""
        complaint = ""
        try:
            self.session.filter_by(event.value)
        except UsageError as error:
            complaint = str(error)
        self._filter.set_class(bool(complaint), "-wrong")
        self._cursor.complain(complaint)
        self.update()

    def on_filter_bar_closed(self, message: FilterBar.Closed) -> None:
        """Written, or given up: the keys are the view's again."""
        self._cursor.complain("")
        self.set_focus(self.view.main())
        if message.is_kept:
            self.view.filtered()
        self.update()

    # -- the cursor

    def action_event(self, by: int) -> None:
        self.go(self.session.event + by)

    def action_percent(self, by: int) -> None:
        """A hundredth of the recording on or back."""
        session = self.session
        self.go(max(session.event + by * max(session.provider.count // 100, 1), min(0, session.event)))

    def action_neighbour(self, what: str, direction: int) -> None:
        """The next or previous start of a phase or step."""
        target = self.session.provider.neighbour(self.session.event, direction, what)
        if target == self.session.event:
            self.notify(f"No {'later' if direction > 0 else 'earlier'} {what}.", timeout=2)
        self.go(target)

    def action_jump(self, where: str) -> None:
        self.go(self.session.provider.named(where))

    def action_oom(self) -> None:
        """The next refused request, around the end."""
        ooms = self.session.provider.ooms
        if ooms:
            self.go(next((event for event in ooms if event > self.session.event), ooms[0]))
        else:
            self.notify("No request was refused in this recording.", timeout=3)

    async def action_ask_event(self) -> None:
        """Ask where to go; ``A .. B`` compares two places of one file."""
        provider = self.session.provider

        def accept(text: str) -> None:
            first, dots, second = text.partition("..")
            mark, event = provider.named(first), provider.named(second if dots else text)
            self._trail.append(self.place())
            self.go(event)
            if dots:
                self.session.mark = mark
                self.post_message(Open(Goto("diff")))

        await self.app.push_screen(Ask("Go to", f"{PLACES}; A .. B compares two", str(self.session.event), accept))

    def action_device(self) -> None:
        session, devices = self.session, self.session.recording.devices
        if session.other is not None:
            self.notify("With two files each keeps the device it was opened at.", timeout=3)
        elif len(devices) < 2:
            self.notify("This recording has one device.", timeout=2)
        else:
            self.stop()
            session.look_at(devices[(devices.index(session.provider.device) + 1) % len(devices)])
            self.action_refresh_all()

    def action_refresh_all(self) -> None:
        """Another device or file: everything is new."""
        self.action_explain()
        self.update()

    # -- playing

    def _tick(self) -> None:
        event = self.session.event + self.session.playing * self.speed
        clamped = max(self.session.provider.clamp(event), 0)
        if clamped != event or not self.session.provider.count:
            self.stop()
        self.go(clamped)

    def stop(self) -> None:
        self._play(0)

    def _play(self, direction: int) -> None:
        self.session.playing = direction
        (self._timer.resume if direction else self._timer.pause)()
        self._cursor.refresh()

    def action_play(self, direction: int) -> None:
        """Play forward or back; the same key again stops. At the end it begins anew."""
        session, count = self.session, self.session.provider.count
        if direction > 0 and session.playing != direction and session.event >= count - 1:
            self.go(0)
        self._play(0 if session.playing == direction or not count else direction)

    def action_speed(self, by: int) -> None:
        self.speed = max(min(round(self.speed * 2.0**by), max(self.session.provider.count // 20, 1)), 1)
        self.notify(f"{format_count(self.speed)} events a frame", timeout=1.5)

    # -- getting things out

    def action_copy(self) -> None:
        """The selection as text, through the terminal (OSC 52), so that it works over SSH."""
        text = self.view.copy_text()
        if text:
            self.app.copy_to_clipboard(text)
        self.notify(
            f"Copied {counted(len(text.splitlines()), 'line')}." if text else "Nothing to copy here.", timeout=2
        )

    async def action_export_csv(self) -> None:
        view = self.view

        def accept(text: str) -> None:
            buffer = io.StringIO()
            writer = csv.writer(buffer, lineterminator="\n")
            rows = sum(1 for row in view.csv() if writer.writerow([spreadsheet_text(str(cell)) for cell in row]))
            self.notify(f"{format_count(max(rows - 1, 0))} rows in {_write(text, buffer.getvalue())}", timeout=4)

        await self.app.push_screen(Ask("Save as CSV", "file to write", f"memtrace-{view.view}.csv", accept))

    async def action_export_svg(self) -> None:
        svg = self.app.export_screenshot(title=f"memtrace {self.session.provider.source}")

        def accept(text: str) -> None:
            self.notify(f"saved {_write(text, svg)}", timeout=4)

        await self.app.push_screen(Ask("Save as SVG", "file to write", f"memtrace-{self.view.view}.svg", accept))

    def action_help(self) -> None:
        self._details("Help", partial(help_lines, self, self.view))

    def _details(self, title: str, make: Callable[[int], Sequence[Line]]) -> None:
        self.app.push_screen(Details(title, lambda width, _: make(width)))


def _write(text: str, content: str) -> Path:
    """Write a new file. Raises UsageError where that is refused, or would replace a file."""
    if is_served():
        raise UsageError("in a web page the browser writes no files; memtrace export does")
    if not text.strip():
        raise UsageError("no file name")
    path = Path(os.path.expandvars(text.strip())).expanduser()
    if path.exists():
        raise UsageError(f"{path} exists already; choose another name")
    check_target(path, False)
    with whole_file(path) as file:
        file.write(content.encode("utf-8", "backslashreplace"))
    return path
