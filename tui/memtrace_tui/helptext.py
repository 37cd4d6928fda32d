"""The help overlay, made from the bindings themselves, so that it can't be wrong about a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding

from memtrace.attribution.categories import MEANING
from memtrace.render.words import MARKS, plain_name
from memtrace_tui.data.lines import BLANK, Line, line, wrap

if TYPE_CHECKING:
    from textual.app import App
    from textual.screen import Screen

    from memtrace_tui.views.base import View


def key_lines(title: str, app: App[object], bindings: list[Binding]) -> list[Line]:
    """A heading and one line an action. A binding that shows several keys stands for all of its kind."""
    lines = [line((title, "title"))]
    shown: dict[str, list[str]] = {}
    text: dict[str, str] = {}
    leaders = {_kind(b): b.action for b in bindings if b.key_display and len(b.key_display) > 1}
    for binding in bindings:
        leader = leaders.get(_kind(binding), binding.action)
        if leader != binding.action:
            continue
        keys = [binding] if binding.key_display else [Binding(k, "", "") for k in binding.key.split(",")]
        shown.setdefault(leader, []).extend(app.get_key_display(key) for key in keys)
        text.setdefault(leader, binding.tooltip or binding.description)
    for action, names in shown.items():
        lines.append(line((f"  {' '.join(dict.fromkeys(names)):<14}", "key"), text[action]))
    return lines


def _kind(binding: Binding) -> str:
    """``zoom`` of ``zoom(0.5)``; for moves, what moves as well: ``neighbour('step'`` of ``neighbour('step', 1)``."""
    return binding.action.partition(",")[0] if "'" in binding.action else binding.action.partition("(")[0]


def help_lines(screen: Screen[None], view: View, width: int) -> list[Line]:
    """What this view is, its keys, the keys that work everywhere, and the colours."""
    lines = [line((view.title, "title")), *wrap([(view.about, "text")], width), BLANK]
    own = [b for node in (view.main(), view) for b in _bindings(node) if b.action != "app.focus_next"]
    lines += [*key_lines("keys of this screen", screen.app, own)]
    lines += [line(("  tab           ", "key"), "The next pane"), BLANK]
    lines += [*key_lines("keys everywhere", screen.app, _bindings(screen))]
    lines += [line(("  1 to 8        ", "key"), "The screens, in the order of the tabs")]
    lines += [line(("  ctrl+p        ", "key"), "Everything by name"), BLANK, line(("colours", "title"))]
    for category, meaning in MEANING.items():
        mark = MARKS[category].letter if view.look.plain else "■"
        lines += wrap([(f"  {mark} {plain_name(category):<14} ", f"cat:{category}"), (meaning, "dim")], width, 19)
    lines += [line(("    ", "hole"), ("  free, but reserved: a hole", "dim"))]
    return lines


def _bindings(node: object) -> list[Binding]:
    """What the classes of memtrace declare for a widget, the nearest class first."""
    found: list[Binding] = []
    for cls in type(node).__mro__:
        if cls.__module__.startswith("memtrace_tui"):
            found += [b for b in vars(cls).get("BINDINGS", ()) if isinstance(b, Binding)]
    return found
