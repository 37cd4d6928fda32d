"""Colours by role, in four palettes; no Textual here.

``dark`` and ``light`` are for 24-bit and 256-colour terminals, ``safe`` uses the Okabe-Ito colours, which people with
any common colour vision can tell apart, and ``sixteen`` uses exact ANSI colours, so that nothing is left to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memtrace.render.words import COLOUR, MARKS

PHASE_LETTERS: Mapping[str, str] = {
    "unknown": "?", "load": "L", "forward": "F", "backward": "B", "optimizer": "O", "between": "-", "evaluation": "E",
    "generation": "G",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Palette:
    """One look. ``flat``: no shades between colours can be told apart, so none are used."""

    name: str
    title: str
    dark: bool
    background: str
    surface: str
    panel: str
    text: str
    dim: str
    strong: str
    accent: str
    good: str
    warn: str
    bad: str
    hole: str
    unused: str
    select: str
    category: Mapping[str, str]
    phase: Mapping[str, str]
    ramp: tuple[str, ...]
    heat: tuple[str, ...]
    hue: tuple[str, ...]
    flat: bool = False


def _categories(base: str, lora: str, act: str, temp: str, run: str, frag: str, lost: str) -> dict[str, str]:
    return dict(zip(MARKS, (base, lora, act, temp, run, frag, lost), strict=True))


def _phases(*colours: str) -> dict[str, str]:
    return dict(zip(PHASE_LETTERS, colours, strict=True))


DARK = Palette(
    "memtrace-dark", "Dark", True,
    background="#101418", surface="#161b21", panel="#1f262e", text="#c9d1d9", dim="#838e99", strong="#f0f4f8",
    accent="#7cc4ff", good="#7fc98b", warn="#e8b64c", bad="#ff6b72", hole="#7d2b45", unused="#40202c", select="#2c4a6b",
    category=_categories("#5b8ff0", "#d186b8", "#3fb68b", "#e6d352", "#6cc3ee", "#e8663c", "#98a1ab"),
    phase=_phases("#4a535d", "#5f7488", "#3f7cc4", "#9a5fc9", "#3f9d6a", "#39424b", "#2f9aa8", "#a8863a"),
    ramp=("#f6e08a", "#f2b35f", "#dd7f5b", "#b3557a", "#7a4493", "#46388a"),
    heat=("#2b3138", "#3d4650", "#6b6a3c", "#c79a3a", "#f07f3a", "#ff4d4d"),
    hue=("#5b8ff0", "#f0a03c", "#45c0a8", "#e0526a", "#b784f5", "#e6e05c", "#8fbf5a", "#93a0ae"),
)  # fmt: skip
LIGHT = Palette(
    "memtrace-light", "Light", False,
    background="#fbfbf9", surface="#f3f3ef", panel="#e6e7e2", text="#2a2f35", dim="#5f676f", strong="#0b0f14",
    accent="#0b62b0", good="#187636", warn="#905a00", bad="#c1121f", hole="#f0a3b3", unused="#f7dbe1", select="#bcd7f2",
    category=_categories("#0b62b0", "#b0548a", "#0b8a68", "#a78f00", "#2f93cc", "#cf4f00", "#7a828a"),
    phase=_phases("#c8ccd0", "#b7c4d0", "#8fbbe8", "#d0aee8", "#98d3ae", "#dcdfe2", "#95d3da", "#e3cb94"),
    ramp=("#f3c846", "#ee9a3d", "#d6653f", "#a93f68", "#6c3385", "#37297a"),
    heat=("#e0e3e6", "#c9ced3", "#d8cf9a", "#e2ac3f", "#e86f1f", "#d00f1d"),
    hue=("#2f6bd8", "#d97e06", "#0e8f78", "#c92b4b", "#8a4fd0", "#9a8f00", "#4f8a1e", "#6c7a88"),
)  # fmt: skip
SAFE = Palette(
    "memtrace-safe", "Colour-blind safe", True,
    background="#0e1114", surface="#151a1f", panel="#20272e", text="#d0d7de", dim="#86919c", strong="#ffffff",
    accent="#56b4e9", good="#56b4e9", warn="#f0e442", bad="#ff8c42", hole="#7a3d10", unused="#3b2614", select="#2a4a66",
    category=COLOUR,
    phase=_phases("#4a4f55", "#6b747d", "#0072b2", "#cc79a7", "#009e73", "#33383d", "#56b4e9", "#e69f00"),
    ramp=("#fde725", "#90d743", "#35b779", "#21918c", "#31688e", "#443983"),
    heat=("#2b3138", "#48505a", "#6f6a56", "#b89a3c", "#e6c229", "#fff7a8"),
    hue=("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"),
)  # fmt: skip
SIXTEEN = Palette(
    "memtrace-16", "16 colours", True,
    background="#000000", surface="#000000", panel="#0000aa", text="#aaaaaa", dim="#aaaaaa", strong="#ffffff",
    accent="#55ffff", good="#55ff55", warn="#ffff55", bad="#ff5555", hole="#aa0000", unused="#aa0000", select="#0000aa",
    category=_categories("#5555ff", "#ff55ff", "#55ff55", "#ffff55", "#55ffff", "#ff5555", "#aaaaaa"),
    phase=_phases("#555555", "#aaaaaa", "#5555ff", "#ff55ff", "#55ff55", "#555555", "#55ffff", "#ffff55"),
    ramp=("#ffffff", "#ffff55", "#55ff55", "#55ffff", "#5555ff", "#aa00aa"),
    heat=("#555555", "#aaaaaa", "#00aa00", "#ffff55", "#ff5555", "#ff55ff"),
    hue=("#5555ff", "#ffff55", "#55ffff", "#ff5555", "#ff55ff", "#55ff55", "#ffffff", "#aaaaaa"),
    flat=True,
)  # fmt: skip
PALETTES: Mapping[str, Palette] = {p.name: p for p in (DARK, LIGHT, SAFE, SIXTEEN)}


def blend(one: str, other: str, share: float) -> str:
    """``share`` of ``one`` over ``other``; both ``#rrggbb``."""
    a, b = (tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in (one, other))
    return "#" + "".join(f"{round(x * share + y * (1 - share)):02x}" for x, y in zip(a, b, strict=True))


# How much is left of a colour: for a block's neighbour of the same category, for what was only reached within a column,
# and (all of it) for a part of a stacked bar, for which a letter stands where there are no colours.
_SHARES = {"shade": 0.8, "faded": 0.45, "fill": 1.0}


def colour(palette: Palette, role: str) -> str:
    """Foreground of a role as ``#rrggbb``."""
    kind, _, name = role.partition(":")
    table = {"cat": palette.category, "phase": palette.phase}.get(kind)
    if table is not None:
        return table.get(name, palette.text)
    if kind in _SHARES:
        share = 1.0 if palette.flat else _SHARES[kind]
        return blend(colour(palette, name.replace("|", ":")), palette.background, share)
    if kind in ("ramp", "heat", "hue"):
        colours: tuple[str, ...] = getattr(palette, kind)
        return colours[int(name) % len(colours)]
    special = {
        "title": palette.accent, "alarm": palette.background, "pending": palette.warn, "empty": palette.panel,
        "outside": palette.dim, "key": palette.accent,
    }  # fmt: skip
    return special.get(kind) or str(getattr(palette, kind, palette.text))
