"""What stands before the screens: dialogs (details, questions, errors), which Escape closes, and how loading goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static

from memtrace.errors import MemtraceError
from memtrace.render.words import bar, clip
from memtrace.snapshot.model import Device
from memtrace.units import printable
from memtrace_tui.data.lines import BLANK, Line, line
from memtrace_tui.data.overview import file_lines
from memtrace_tui.widgets.base import Lines, Open, keys


class Awaited(Screen[Any]):
    """Drawn when a key is done, not while it is under way."""

    def _compositor_refresh(self) -> None:
        if not getattr(self.app, "is_busy", False):
            super()._compositor_refresh()


class Dialog(Awaited, ModalScreen[str | None]):
    """A box in the middle; Escape, q and a click outside close it."""

    BINDINGS = keys("escape,q  dismiss_none  Close")

    def action_dismiss_none(self) -> None:
        self.dismiss(None)

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.dismiss(None)


def boxed(title: str, hint: str, role: str) -> Vertical:
    """The frame around a dialog."""
    box = Vertical(classes=f"box {role}".strip())
    box.border_title, box.border_subtitle = title, hint
    return box


class Details(Dialog):
    """Lines to read; those that lead somewhere can be opened. ``make`` gives them for a width, library frames folded or
    not."""

    BINDINGS = keys("""
        question_mark,f1  dismiss_none  -Close
        f                 fold          -Library frames
        y                 copy          -Copy
    """)

    def __init__(self, title: str, make: Callable[[int, bool], Sequence[Line]], role: str = "") -> None:
        super().__init__()
        self.heading, self._make, self.role = title, make, role
        self._fold = True

    def compose(self) -> ComposeResult:
        with boxed(self.heading, "esc closes  y copies", self.role):
            yield Lines(id="dialog-lines")

    def on_mount(self) -> None:
        self._show()
        self.set_focus(self.query_one(Lines))

    def _show(self) -> None:
        """As high as the text, as far as there is room."""
        width = min(self.app.size.width * 94 // 100 - 5, 80 if self.role == "error" else 100)
        lines, content = self.query_one("#dialog-lines", Lines), self._make(max(width, 20), self._fold)
        lines.styles.height = max(min(len(content), max(self.app.size.height - 4, 3)), 1)
        lines.show(content)

    def action_fold(self) -> None:
        self._fold = not self._fold
        self._show()

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self.query_one("#dialog-lines", Lines).text)
        self.notify("Copied.", timeout=2)

    def on_open(self, message: Open) -> None:
        """Close, then go there."""
        self.dismiss(None)
        self.app.screen_stack[-2 if self.app.screen is self else -1].post_message(Open(message.goto))


class OneKey(ModalScreen[str]):
    """Waits for one key, which is the answer."""

    def __init__(self, hint: str) -> None:
        super().__init__()
        self.hint = hint

    def on_mount(self) -> None:
        self.notify(self.hint, timeout=3)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.app.clear_notifications()
        self.dismiss(event.character or event.key)


class Ask(Dialog):
    """One line to write. The answer is tried at once; what is wrong with it is said here, and it can be changed."""

    def __init__(self, title: str, hint: str, value: str, accept: Callable[[str], None]) -> None:
        super().__init__()
        self.heading, self.hint, self.value = title, hint, value
        self._accept = accept

    def compose(self) -> ComposeResult:
        with boxed(self.heading, "enter: do it   esc: leave", "ask"):
            yield Input(self.value, id="answer", compact=True)
            yield Static(self.hint, id="hint", markup=False)

    def on_mount(self) -> None:
        for answer in self.query("#answer"):
            self.set_focus(answer)  # at once: keys typed ahead are for this line

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            self._accept(event.value)
        except (MemtraceError, OSError) as error:
            hint = self.query_one("#hint", Static)
            hint.update(str(error))
            hint.add_class("-wrong")
            return
        self.dismiss(event.value)


class LoadingScreen(Screen[None]):
    """How far loading is, and a way out of it; shown while a worker thread loads."""

    ENDS = ("escape", "q", "ctrl+c", "ctrl+q")
    BINDINGS = keys(f"{','.join(ENDS)}  app.cancel_loading  Cancel")

    def __init__(self, name: str) -> None:
        super().__init__()
        self._file = printable(name)
        self.share = 0.0  # of the work done
        self._device: Device | None = None  # what the file holds of it, as soon as that is known

    def compose(self) -> ComposeResult:
        yield Lines(id="loading")

    def on_mount(self) -> None:
        self.show(0.0)

    def show(self, share: float, device: Device | None = None) -> None:
        """File name, bar, what is being done; and what the file itself says."""
        self.share, self._device = share, device or self._device
        width = min(self.app.size.width * 96 // 100, 64)
        what = "reading" if share < 0.7 else "replaying the allocator, attributing allocations"
        self.query_one(Lines).show([
            line(("memtrace", "title"), "  " + clip(self._file, width - 12, True)), BLANK,
            line((f"{bar(share, width - 6):<{width - 6}}", "accent"), (f"{share:>6.0%}", "strong")), BLANK,
            line((what, "dim"), ("   esc cancels", "dim")),
            *([BLANK, *file_lines(self._device, width)] if self._device is not None else ()),
        ])  # fmt: skip
