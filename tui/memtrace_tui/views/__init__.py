"""What the main screen asks of every view, their list, and the help on their keys. A screen's code, one file each, is
imported when it is first shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import ClassVar, NamedTuple

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widget import Widget

from memtrace.attribution.categories import MEANING, category_name
from memtrace.render.words import MARKS, plain_name
from memtrace_tui.data.lines import BLANK, Goto, Line, Span, line, wrap
from memtrace_tui.dialogs import Details
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import Drawn, Lines, keys
from memtrace_tui.widgets.table import Table, TableColumn


class View(Widget):
    """A screen below the tabs. ``show`` is called whenever it is visible and something it shows has changed."""

    view: ClassVar[str]  # its name, and its module's
    title: ClassVar[str]
    about: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.title = cls.__name__.removesuffix("View")
        cls.view = cls.title.lower()

    def __init__(self, session: Session) -> None:
        super().__init__(id=f"view-{self.view}")
        self.session = session

    @property
    def wide(self) -> bool:
        """Whether there is room for two panes side by side."""
        return self.app.size.width >= 118

    @property
    def side_width(self) -> int:
        """Cells for text in a pane at the side, without border, padding and scroll bar."""
        return max(min(self.app.size.width * 2 // 5, 72) - 4, 20)

    def show(self) -> None:
        """Show the state at the cursor."""

    def main(self) -> Widget:
        """The widget that takes the keys when the view comes up."""
        raise NotImplementedError

    def arrive(self, goto: Goto) -> None:
        """Come here by a jump; the cursor is already there."""

    def address(self) -> int | None:
        """The address that is selected, where one is, to come back to."""
        return None

    def addresses(self) -> tuple[int, int] | None:
        """The addresses of the selection, whose history ``h`` shows."""
        return None

    def filtered(self) -> None:
        """A filter was written to its end."""

    def csv(self) -> Iterable[Sequence[str]]:
        """What is on screen as rows of a table, the head first."""
        return ()

    def copy_text(self) -> str:
        """What ``y`` puts on the clipboard."""
        main = self.main()
        return main.text if isinstance(main, Lines) else ""


class TableView(View):
    """A table under a line that sums it up; what is known of the selected row beside it where there is room, and in a
    dialog on Enter."""

    columns: ClassVar[Sequence[TableColumn]] = ()

    def compose(self) -> ComposeResult:
        with Horizontal():
            with Vertical():
                yield Lines(id=f"{self.view}-summary", classes="summary")
                yield Table(self.columns, id=f"{self.view}-table")
            yield Lines(id=f"{self.view}-side", classes="side")

    def main(self) -> Table:
        return self.query_one(f"#{self.view}-table", Table)

    def details(self, width: int, fold: bool = True) -> list[Line]:
        """What is known of the selected row; ``fold`` leaves out library frames."""
        raise NotImplementedError

    def sum_up(self, *spans: Span) -> None:
        """The line above the table."""
        self.query_one(f"#{self.view}-summary", Lines).show([line(*spans)])

    def show_side(self) -> None:
        """The details beside the table."""
        side = self.query_one(f"#{self.view}-side", Lines)
        side.display = self.wide
        if self.wide:
            side.show(self.details(self.side_width, self.session.settings.fold), keep=False)

    def on_rows_opened(self, message: Table.Opened) -> None:
        self.opened(message.row)

    def opened(self, row: int) -> None:
        """Enter: everything about the row."""
        self.app.push_screen(Details(self.title.removesuffix("s"), self.details))

    def copy_text(self) -> str:
        return "\n".join(each.plain.rstrip() for each in self.details(120))


class Entry(NamedTuple):
    """A screen before its code is there: ``key`` shows it, its module is the title in lower case."""

    key: str
    title: str

    def load(self) -> type[View]:
        """The screen's class."""
        return getattr(import_module(f"memtrace_tui.views.{self.title.lower()}"), f"{self.title}View")


_TITLES = ("Overview", "Timeline", "Segments", "Allocations", "Stacks", "Findings", "Diff", "Events")
VIEWS = {title.lower(): Entry(str(number), title) for number, title in enumerate(_TITLES, 1)}


def key_lines(title: str, app: App[object], bindings: list[Binding]) -> list[Line]:
    """A heading and one line an action. A binding that shows several keys stands for all of its kind."""
    leaders = {_kind(each): each for each in bindings if each.key_display and len(each.key_display) > 1}
    found: dict[str, tuple[Binding, list[str]]] = {}
    for binding in bindings:
        shown = leaders.get(_kind(binding), binding)
        names = found.setdefault(shown.action, (shown, []))[1]
        if binding.action == shown.action:
            keys = [binding] if binding.key_display else [Binding(key, "", "") for key in binding.key.split(",")]
            names += [name for name in map(app.get_key_display, keys) if name not in names]
    lines = [line((title, "title"))]
    for shown, names in found.values():
        lines.append(line((f"  {' '.join(names):<14}", "key"), shown.tooltip or shown.description))
    return lines


def _kind(binding: Binding) -> str:
    """``zoom`` of ``zoom(0.5)``; for moves, what moves as well: ``neighbour('step'`` of ``neighbour('step', 1)``."""
    return binding.action.partition(",")[0] if "'" in binding.action else binding.action.partition("(")[0]


def help_lines(screen: Screen[None], view: View, width: int) -> list[Line]:
    """What this view is, its keys, the keys that work everywhere, and the colours."""
    lines = [line((view.title, "title")), *wrap([(view.about, "text")], width), BLANK]
    own = [*_bindings(view.main()), *_bindings(view), *keys("tab  focus  The next pane")]
    more = keys("1  view  The screens, in the order of the tabs  1 to 8\nctrl+p  palette  Everything by name")
    lines += [*key_lines("keys of this screen", screen.app, own), BLANK]
    lines += [*key_lines("keys everywhere", screen.app, [*_bindings(screen), *more]), BLANK, line(("colours", "title"))]
    kind, plain = view.session.report.lora["meaning"], screen.query_one("#keys", Drawn).look.plain
    for category, meaning in MEANING.items():
        mark = MARKS[category].letter if plain else "■"
        lines += wrap(
            [(f"  {mark} {plain_name(category_name(category, kind)):<14} ", f"cat:{category}"), (meaning, "dim")],
            width,
            19,
        )
    lines += [line(("    ", "hole"), ("  free, but reserved: a hole", "dim"))]
    return lines


def _bindings(node: object) -> list[Binding]:
    """What the classes of memtrace declare for a widget, the nearest class first."""
    ours = [cls for cls in type(node).__mro__ if cls.__module__.startswith("memtrace_tui")]
    return [binding for cls in ours for binding in vars(cls).get("BINDINGS", ())]
