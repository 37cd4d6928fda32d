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
    """A heading and one line an action."""
    lines = [line((title, "title"))]
    by_action: dict[str, list[str]] = {}
    text: dict[str, str] = {}
    for binding in bindings:
        by_action.setdefault(binding.action, []).append(binding.key_display or KeyBar.name_of(binding.key))
        text[binding.action] = binding.description
    for action, keys in by_action.items():
        names = " ".join(dict.fromkeys(keys))
        lines.append(line((f"  {names:<14}", "key"), text[action]))
    return lines


def help_lines(screen: MainScreen, width: int) -> list[Line]:
    """What this view is, its keys, the keys that work everywhere, and the colours."""
    view = screen.view
    lines = [line((view.title, "title")), *wrap([(view.about, "text")], width), BLANK]
    chain = [node for node in (view.main(), view) if node is not None]
    own = [binding for node in chain for binding in _bindings(node)]
    lines += [*key_lines("keys of this screen", own), BLANK]
    lines += [*key_lines("keys everywhere", _bindings(screen)), BLANK]
    lines += [line(("  ctrl+p        ", "key"), "Everything by name"), BLANK, line(("colours", "title"))]
    for category, meaning in MEANING.items():
        mark = LETTERS[category] if screen.browser.look.plain else "■"
        lines += wrap([(f"  {mark} {str(category).replace('_', ' '):<14} ", f"cat:{category}"), (meaning, "dim")], width, 19)
    lines += [line(("    ", "hole"), ("  free, but reserved: a hole", "dim"))]
    return lines


def _bindings(node: object) -> list[Binding]:
    """Bindings a widget's own class declares, keys of one declaration apart."""
    found: list[Binding] = []
    for bindings in getattr(node, "_bindings").key_to_bindings.values():
        found += [binding for binding in bindings if not binding.system]
    return found
