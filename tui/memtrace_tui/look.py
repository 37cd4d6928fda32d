"""Roles to Rich styles, for the palette in use, and lines to strips."""

from __future__ import annotations

from collections.abc import Iterable

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.theme import Theme

from memtrace.render.words import MARKS
from memtrace_tui.palette import PALETTES, Palette, colour

_BOLD = {"strong", "title", "alarm", "key", "accent"}


class ScreenLook:
    """The palette as styles. ``plain`` (NO_COLOR): no colours at all, letters and attributes stand in for them."""

    def __init__(self, palette: Palette, plain: bool = False) -> None:
        self.palette = palette
        self.plain = plain
        self._styles: dict[tuple[str, str], Style] = {}

    def style(self, role: str, behind: str = "background") -> Style:
        """Style of a role in front of another role's colour."""
        key = (role, behind)
        if key not in self._styles:
            self._styles[key] = self._plain(role, behind) if self.plain else self._coloured(role, behind)
        return self._styles[key]

    def _coloured(self, role: str, behind: str) -> Style:
        back = self.palette.bad if role == "alarm" else colour(self.palette, behind)
        return Style(color=colour(self.palette, role), bgcolor=back, bold=role in _BOLD or behind == "select" or None)

    @staticmethod
    def _plain(role: str, behind: str) -> Style:
        return Style(
            bold=role in _BOLD or role in ("warn", "bad") or None,
            dim=role in ("dim", "hole") or None,
            reverse=role == "alarm" or behind == "select" or None,
            underline=behind == "mark" or None,
        )

    def spans(self, spans: Iterable[tuple[str, str]], width: int, behind: str = "background") -> Strip:
        """Spans as a strip of exactly ``width`` cells; where something had to be cut, ``…`` says so."""
        if self.plain:
            spans = [(_letters(text, role), role) for text, role in spans]
        segments = [Segment(text, self.style(role, behind)) for text, role in spans if text]
        strip = Strip(segments)
        if strip.cell_length > width > 0:
            kept = list(strip.crop(0, width - 1))
            return Strip([*kept, Segment("…", (kept or segments)[-1].style)], width)
        return strip.adjust_cell_length(width, self.style("text", behind))


def _letters(text: str, role: str) -> str:
    """A part of a stacked bar as letters: without colours its blocks would all look alike."""
    if not role.startswith("fill:"):
        return text
    special = {"fill:outside": "x", "fill:empty": "·"}
    return (special.get(role) or MARKS[role.rpartition("|")[2]].letter) * len(text)


# Textual's own widgets (dialogs, inputs, command palette) in the same colours.
THEMES = [
    Theme(
        name=palette.name, dark=palette.dark, primary=palette.accent, secondary=palette.select, accent=palette.accent,
        foreground=palette.text, background=palette.background, surface=palette.surface, panel=palette.panel,
        success=palette.good, warning=palette.warn, error=palette.bad,
        variables={
            "block-cursor-background": palette.select, "block-cursor-foreground": palette.strong,
            "input-selection-background": palette.select,
        },
    )
    for palette in PALETTES.values()
]  # fmt: skip
