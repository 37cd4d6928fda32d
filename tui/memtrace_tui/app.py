"""The application: loading, palettes, errors, the command palette."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.console import RenderableType
from textual import events
from textual._compositor import CompositorUpdate
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import ANSIToTruecolor, LineFilter
from textual.geometry import Size
from textual.markup import escape
from textual.message_pump import MessagePump
from textual.screen import Screen

from memtrace.attribution.user_rules import UserRule
from memtrace.errors import MemtraceError
from memtrace.snapshot.model import Device
from memtrace.units import printable
from memtrace_tui.data.lines import BLANK, line, wrap
from memtrace_tui.dialogs import Details, LoadingScreen
from memtrace_tui.look import THEMES, ScreenLook
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.palette import DARK, PALETTES, SIXTEEN
from memtrace_tui.provider import BrowsedRecording, Cancelled, StartView
from memtrace_tui.session import Session
from memtrace_tui.settings import Settings
from memtrace_tui.terminal import Changes, Terminal, speaks_utf8
from memtrace_tui.views import VIEWS
from memtrace_tui.widgets.base import Drawn, Failed, Lines

_UNNAMED = ("view(", "app.focus", "screen.", "step(", "dismiss")  # actions that the command palette leaves out


class BrowseApp(App[int]):
    """``memtrace browse``: over files that it loads itself, or recordings that are loaded already.

    ``plain`` (default: whether ``NO_COLOR`` is set) uses no colours at all, ``few_colours`` (default: what the terminal
    can show) the palette of sixteen. ``run`` returns the exit code: 0, 130 when loading was given up, or what a file
    that can't be read gives.
    """

    CSS_PATH = Path(__file__).with_name("browse.tcss")  # also for applications that are made from this one
    TITLE = "memtrace"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "Quit", show=False, priority=True)]

    def __init__(
        self,
        source: str = "",
        other: str | None = None,
        view: StartView | None = None,
        recording: BrowsedRecording | None = None,
        settings: Settings | None = None,
        plain: bool | None = None,
        few_colours: bool | None = None,
        remember: bool = True,
        rules: Sequence[UserRule] = (),
        use_index: bool = True,
    ) -> None:
        super().__init__()
        self.source, self.other = source, other
        self.view = view or StartView()
        self.settings = settings or Settings.load()
        self.remember = remember
        self.rules = rules
        self.use_index = use_index
        self.error: Exception | None = None  # the last one that was shown
        self._faults: set[str] = set()
        self._recording = recording
        self._is_cancelled = False
        self._plain = bool(os.environ.get("NO_COLOR")) if plain is None else plain
        self._few_colours = few_colours
        self.look = ScreenLook(PALETTES.get(self.settings.theme, DARK), self._plain)
        self.animation_level = "none"
        self.crash: Exception | None = None  # what ended the browser, if anything did
        self._terminal = Terminal(not speaks_utf8())
        self._waiting: deque[events.Key] = deque()  # keys typed while the one before them is under way
        self._under_way = 0  # the number of the key that is; 0 for none
        self._keys = 0
        self._shown = Size()  # of what is on screen

    # -- starting

    def on_mount(self) -> None:
        sys.setswitchinterval(0.0005)  # what works in the background hands over sooner: a key waits dozens of times
        for theme in THEMES:
            self.register_theme(theme)
        few = self.console.color_system in ("standard", "windows") if self._few_colours is None else self._few_colours
        self.set_look(SIXTEEN.name if few else self.look.palette.name)
        self.open_first()

    def open_first(self) -> None:
        """The first screen."""
        if self._recording is not None:
            self._start(self._recording)
        else:
            self.push_screen(LoadingScreen(self.source))
            self.run_worker(self._load, thread=True, exit_on_error=False)

    def _load(self) -> None:
        """In the worker thread. Only messages go back to the screen."""
        files = [file for file in (self.source, self.other) if file]
        recordings: list[BrowsedRecording] = []
        shown = -1.0

        def progress(share: float) -> None:
            nonlocal shown
            if self._is_cancelled:
                raise Cancelled
            done = (len(recordings) + share) / len(files)
            if done - shown >= 0.01:
                shown = done
                self.call_later(self._progress, done)

        try:
            for number, file in enumerate(files):
                view = self.view if number == 0 else StartView(self.view.device)
                read = partial(self.call_later, self._read)
                recordings.append(BrowsedRecording.open(file, view, progress, self.rules, self.use_index, read))
            if self.other is None:  # what the first screen needs is worked out here, off the interface's thread
                provider = recordings[0].provider()
                provider.report(provider.start.event)
            gc.freeze()  # what was loaded stays: the collector need not look at it again and again
        except Exception as error:
            if not self._is_cancelled:
                self.call_later(self._loading_failed, error)
            return
        if not self._is_cancelled:
            self.call_later(self._start, *recordings)

    def _progress(self, share: float) -> None:
        if isinstance(self.screen, LoadingScreen):
            self.screen.show(share)

    def _read(self, device: Device) -> None:
        if isinstance(self.screen, LoadingScreen):
            self.screen.show(self.screen.share, device)

    def action_cancel_loading(self) -> None:
        """The thread stops at its next report of progress; the application leaves at once."""
        self._is_cancelled = True
        self.exit(130)

    def _loading_failed(self, error: Exception) -> None:
        self.error = error
        self._waiting.clear()
        code = error.exit_code if isinstance(error, MemtraceError) else 1
        if isinstance(self.screen, LoadingScreen):
            self.screen.query_one(Lines).display = False  # nothing is under way any more
        self.push_screen(self._error_dialog(error, "loading"), lambda _: self.exit(code))

    def _start(self, recording: BrowsedRecording, other: BrowsedRecording | None = None) -> None:
        session = Session(recording, other, self.settings)
        main = MainScreen(session, "diff" if other is not None else "overview")
        if isinstance(self.screen, LoadingScreen):
            self.switch_screen(main)
            self.call_after_refresh(self._next_key)  # what was typed ahead
        else:
            self.push_screen(main)
        if recording.why_device:
            self.notify(recording.why_device, timeout=6)

    # -- keys and the terminal

    async def on_event(self, event: events.Event) -> None:
        """One key after the other: what a key opens must be there before the next one, typed ahead, is handed on. While
        a file is read, keys wait for it."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            loads = isinstance(self.screen, LoadingScreen)
            if loads and event.key in LoadingScreen.ENDS:
                self._waiting.clear()
                loads = False
            self._waiting.append(event)
            if not self._under_way and not loads:
                await self._next_key()
        else:
            await super().on_event(event)

    async def _next_key(self) -> None:
        if not self._waiting:
            return
        self._keys += 1
        number = self._under_way = self._keys
        node: MessagePump = self.focused or self.screen
        event = self._waiting.popleft()
        if not isinstance(node, Drawn):
            await super().on_event(event)
            self._follow(node, number, node)
        else:
            self.screen.call_later(self._bound, event.key, node, number)
        self.set_timer(2, partial(self._done, number))  # should a widget go away with the key

    async def _bound(self, key: str, node: MessagePump, number: int) -> None:
        """Of a widget whose keys are all bindings: behind what the screen is doing, not through the queue of each
        widget between."""
        if not await self._check_bindings(key, priority=True):
            await self._check_bindings(key)
        self._follow(node, number, None)

    def _follow(self, node: MessagePump, number: int, again: MessagePump | None) -> None:
        """Behind what a key made a widget say, through the queue of each widget between; where the key itself goes from
        that widget (``again``) up to here, once more behind it."""
        parent = node._parent
        if node is not self and parent is not None:
            node.call_later(self._follow, parent, number, again)
        elif again is not None:
            self.call_later(self._follow, again, number, None)
        else:
            self.call_later(self._settle, number)

    async def _settle(self, number: int) -> None:
        """Wait until no widget has anything to do, the layout that a key asked for is there, and what that made the
        widgets do is done: then it is drawn, once and at once, where Textual draws up to three times, at 60 Hz."""
        await asyncio.sleep(0)
        if number != self._under_way:
            return
        if not any(node.message_queue_size for node in self.screen.walk_children(with_self=True)):
            if not self.screen._layout_required:
                await self._done(number)
                return
            self._draw()
        self.call_later(self._settle, number)

    def _draw(self) -> None:
        screen = self.screen
        with screen._context():
            screen._on_timer_update()
            if screen._compositor._dirty_regions:  # of a layout that was made, but not drawn
                screen._compositor_refresh()

    @property
    def is_busy(self) -> bool:
        """Whether a key is under way, with whose end the screen is drawn."""
        return self._under_way > 0 and not self._exit

    async def _done(self, number: int) -> None:
        if number == self._under_way:
            self._under_way = 0
            self._draw()
            await self._next_key()

    def _display(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        if isinstance(renderable, CompositorUpdate) and not self.is_headless:
            if screen.size != self._shown:
                self._terminal.forget()
                self._shown = screen.size
                renderable = screen._compositor.render_full_update()
            renderable = Changes(self._terminal, renderable)
        super()._display(screen, renderable)

    def _handle_exception(self, error: Exception) -> None:
        """What nothing else caught ends the browser: exit code 1, and one line once the terminal is as it was."""
        self.crash = self.crash or error
        self._return_code = 1
        self._exception = self._exception or error
        self._exception_event.set()
        self._close_messages_no_wait()

    # -- colours

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Without the one for the terminal's own colours, which nothing here uses: it would look at every cell."""
        return [each for each in super().get_line_filters() if not isinstance(each, ANSIToTruecolor)]

    def set_look(self, name: str) -> None:
        """Use a palette."""
        self.look = ScreenLook(PALETTES[name], self._plain)
        self.theme = name
        if isinstance(self.screen, MainScreen):
            self.screen.query(Drawn).refresh()
            self.screen.update()

    def action_next_theme(self) -> None:
        names = list(PALETTES)
        name = names[(names.index(self.look.palette.name) + 1) % len(names)]
        self._choose(name)
        self.notify(f"Theme: {PALETTES[name].title}", timeout=1.5)

    # -- errors

    def on_failed(self, message: Failed) -> None:
        """Something that goes on failed in a widget or a thread."""
        self.fail(message.error, message.where)

    def fail(self, error: Exception, where: str) -> None:
        """Show an error in a dialog and go on.

        A fault of memtrace is shown once: a widget that can't draw fails again with every repaint, and a dialog that
        came back each time would lock everyone out of the other screens.
        """
        self.error = error
        if not isinstance(error, MemtraceError):
            key = f"{where}: {type(error).__name__}: {error}"
            if key in self._faults:
                return
            self._faults.add(key)
        self.push_screen(self._error_dialog(error, where))

    def _error_dialog(self, error: Exception, where: str) -> Details:
        text = printable(str(error))
        if isinstance(error, MemtraceError):
            return Details("Error", lambda width, _: wrap([(text, "text")], width), "error")
        trail = traceback.extract_tb(error.__traceback__)[-6:]
        about = "This is a fault of memtrace, not of the recording. Other screens go on working. A report should name:"
        return Details("Something went wrong", lambda width, _: [
            *wrap([(f"{type(error).__name__} in {where}: {text}", "strong")], width), BLANK,
            *wrap([(about, "text")], width),
            *(line((f"  {Path(f.filename).name}:{f.lineno} {f.name}", "dim")) for f in trail),
        ], "error")  # fmt: skip

    async def run_action(self, *args: object, **kwargs: object) -> bool:
        """Every key passes here: what an action raises becomes a dialog."""
        try:
            return await super().run_action(*args, **kwargs)  # type: ignore[arg-type]
        except Exception as error:
            self.fail(error, str(args[0]) if args else "action")
            return True

    # -- the rest

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The command palette: every screen, jump, palette and export by name."""
        if not isinstance(screen, MainScreen):
            return
        for name, view in VIEWS.items():
            yield SystemCommand(f"Show {view.title}", escape(view.load().about), self._doing(f"view('{name}')"))
        seen = set()  # several keys may do one thing
        for node in (screen.view.main(), screen.view, screen):
            where = "Everywhere" if node is screen else f"On {screen.view.title}"
            for bindings in node._bindings.key_to_bindings.values():
                for binding in bindings:
                    if binding.action.startswith(_UNNAMED) or binding.system or binding.action in seen:
                        continue
                    seen.add(binding.action)
                    title = escape(f"{binding.description}  ({self.get_key_display(binding)})")  # keys such as [ and /
                    about = where if not binding.tooltip else f"{where}: {binding.tooltip}"
                    yield SystemCommand(title, escape(about), self._doing(binding.action, node))
        for palette in PALETTES.values():
            yield SystemCommand(f"Theme: {palette.title}", "colours", lambda name=palette.name: self._choose(name))

    def _choose(self, name: str) -> None:
        self.settings.theme = name
        self.set_look(name)

    def _doing(self, action: str, node: object = None):  # type: ignore[no-untyped-def]
        async def run() -> None:
            await self.run_action(action, node or self.screen)

        return run

    async def action_quit(self) -> None:
        if self.remember:
            self.settings.save()
        self.exit(0)
