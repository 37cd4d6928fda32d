"""What the keys of the main screen do, apart from drawing: cursor moves, jumps, copying, exports, themes, help."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from memtrace.errors import UsageError
from memtrace.units import format_count
from memtrace_tui.dialogs import Ask, Details, text_width
from memtrace_tui.helptext import help_lines
from memtrace_tui.provider import PLACES
from memtrace_tui.widgets.bars import Scrubber

if TYPE_CHECKING:
    from memtrace_tui.main_screen import MainScreen


class Actions:
    """Mixed into the main screen; ``self`` is that screen."""

    @property
    def _screen(self) -> MainScreen:
        return cast("MainScreen", self)

    # -- the cursor

    def action_event(self, by: int) -> None:
        """One event on or back."""
        self._screen.go(self._screen.session.event + by)

    def action_percent(self, by: int) -> None:
        """A hundredth of the recording on or back."""
        session = self._screen.session
        self._screen.go(max(session.event + by * max(session.provider.count // 100, 1), min(0, session.event)))

    def action_neighbour(self, what: str, direction: int) -> None:
        """The next or previous start of a phase or step."""
        session = self._screen.session
        target = session.provider.neighbour(session.event, direction, what)
        if target == session.event:
            self._screen.notify(f"No {'later' if direction > 0 else 'earlier'} {what}.", timeout=2)
        self._screen.go(target)

    def action_jump(self, where: str) -> None:
        """To a named event."""
        self._screen.go(self._screen.session.provider.named(where))

    def action_oom(self) -> None:
        """The next refused request, around the end."""
        session = self._screen.session
        ooms = session.provider.ooms
        if not ooms:
            self._screen.notify("No request was refused in this recording.", timeout=3)
            return
        later = [event for event in ooms if event > session.event]
        self._screen.go(later[0] if later else ooms[0])

    def action_ask_event(self) -> None:
        """Ask where to go."""
        session = self._screen.session

        def accept(text: str) -> None:
            self._screen.go(session.provider.named(text))

        self._screen.app.push_screen(Ask("Go to", PLACES, str(session.event), accept))

    def action_speed(self, by: int) -> None:
        """Play twice or half as fast."""
        screen = self._screen
        screen.speed = max(min(round(screen.speed * 2.0**by), max(screen.session.provider.count // 20, 1)), 1)
        screen.notify(f"{format_count(screen.speed)} events a frame", timeout=1.5)

    def action_device(self) -> None:
        """The next device."""
        screen, session = self._screen, self._screen.session
        devices = session.recording.devices
        if session.other is not None:
            screen.notify("With two files each keeps the device it was opened at.", timeout=3)
            return
        if len(devices) < 2:
            screen.notify("This recording has one device.", timeout=2)
            return
        screen.stop()
        session.look_at(devices[(devices.index(session.provider.device) + 1) % len(devices)])
        self.action_refresh_all()

    def action_refresh_all(self) -> None:
        """Another device or file: everything is new."""
        self._screen.query_one(Scrubber).refresh()
        self._screen.action_explain()
        self._screen.update()

    # -- getting things out

    def action_copy(self) -> None:
        """The selection as text, through the terminal (OSC 52), so that it works over SSH."""
        text = self._screen.view.copy_text()
        if text:
            self._screen.app.copy_to_clipboard(text)
            self._screen.notify(f"Copied {len(text.splitlines())} line{'s' if chr(10) in text else ''}.", timeout=2)
        else:
            self._screen.notify("Nothing to copy here.", timeout=2)

    def action_export_csv(self) -> None:
        """Save what the view shows as a table."""
        view = self._screen.view

        def accept(text: str) -> None:
            buffer = io.StringIO()
            writer = csv.writer(buffer, lineterminator="\n")
            rows = sum(1 for row in view.csv() if writer.writerow(row))
            path = _write(text, buffer.getvalue())
            self._screen.notify(f"{format_count(max(rows - 1, 0))} rows in {path}", timeout=4)

        self._screen.app.push_screen(Ask("Save as CSV", "file to write", f"memtrace-{view.view}.csv", accept))

    def action_export_svg(self) -> None:
        """Save the screen as a picture."""
        screen = self._screen
        svg = screen.app.export_screenshot(title=f"memtrace {screen.session.provider.source}")

        def accept(text: str) -> None:
            path = _write(text, svg)
            screen.notify(f"saved {path}", timeout=4)

        screen.app.push_screen(Ask("Save as SVG", "file to write", f"memtrace-{screen.view.view}.svg", accept))

    def action_theme(self) -> None:
        """The next palette."""
        self._screen.browser.next_theme()

    def action_help(self) -> None:
        """Keys and colours."""
        screen = self._screen
        width = text_width(screen.app.size.width)
        screen.app.push_screen(Details("Help", help_lines(screen, width)))


def _write(text: str, content: str) -> Path:
    """Write a new file. Raises UsageError where that is refused, or would replace a file."""
    if not text.strip():
        raise UsageError("no file name")
    path = Path(os.path.expandvars(text.strip())).expanduser()
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(content)
    except FileExistsError:
        raise UsageError(f"{path} exists already; choose another name") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    return path
