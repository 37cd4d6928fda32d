"""The help overlay, made from the bindings themselves, so that it can't be wrong about a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding

from memtrace.attribution.categories import MEANING
from memtrace_tui.data.lines import BLANK, Line, line, wrap
from memtrace_tui.palette import LETTERS
from memtrace_tui.widgets.bars import KeyBar

if TYPE_CHECKING:
    from memtrace_tui.main_screen import MainScreen


def key_lines(title: str, bindings: list[Binding]) -> list[Line]:
    """A heading and one line an action. A binding that shows several keys stands for all of its kind."""
    lines = [line((title, "title"))]
    shown: dict[str, list[str]] = {}
    text: dict[str, str] = {}
    leaders = {_kind(b): b.action for b in bindings if b.key_display and len(b.key_display) > 1}
    for binding in bindings:
        leader = leaders.get(_kind(binding), binding.action)
        if leader != binding.action:
            continue
        names = [binding.key_display] if binding.key_display else [KeyBar.name_of(k) for k in binding.key.split(",")]
        shown.setdefault(leader, []).extend(names)
        text.setdefault(leader, binding.tooltip or binding.description)
    for action, keys in shown.items():
        lines.append(line((f"  {' '.join(dict.fromkeys(keys)):<14}", "key"), text[action]))
    return lines


def _kind(binding: Binding) -> str:
    """``zoom`` of ``zoom(0.5)``; for moves, what moves as well: ``neighbour('step'`` of ``neighbour('step', 1)``."""
    return binding.action.partition(",")[0] if "'" in binding.action else binding.action.partition("(")[0]


def help_lines(screen: MainScreen, width: int) -> list[Line]:
    """What this view is, its keys, the keys that work everywhere, and the colours."""
    view = screen.view
    lines = [line((view.title, "title")), *wrap([(view.about, "text")], width), BLANK]
    chain = [node for node in (view.main(), view) if node is not None]
    own = [b for node in chain for b in _bindings(node) if b.action != "app.focus_next"]  # said for all of them below
    lines += [*key_lines("keys of this screen", own), line(("  tab           ", "key"), "The next pane"), BLANK]
    lines += [*key_lines("keys everywhere", _bindings(screen)), BLANK]
    lines += [line(("  ctrl+p        ", "key"), "Everything by name"), BLANK, line(("colours", "title"))]
    for category, meaning in MEANING.items():
        mark = LETTERS[category] if screen.browser.look.plain else "■"
        lines += wrap(
            [(f"  {mark} {str(category).replace('_', ' '):<14} ", f"cat:{category}"), (meaning, "dim")], width, 19
        )
    lines += [line(("    ", "hole"), ("  free, but reserved: a hole", "dim"))]
    return lines


def _bindings(node: object) -> list[Binding]:
    """What the classes of memtrace declare for a widget, the nearest class first."""
    found: list[Binding] = []
    for cls in type(node).__mro__:
        if cls.__module__.startswith("memtrace_tui"):
            found += [b for b in vars(cls).get("BINDINGS", ()) if isinstance(b, Binding)]
    return found
