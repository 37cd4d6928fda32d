"""What the colour of a block in the segment map can mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Category, category_name
from memtrace.history.layout import Layout, State
from memtrace.render.words import FREE, MARKS, clip, plain_name, short_name
from memtrace.render.words import PENDING as PENDING_LETTER
from memtrace.snapshot.model import I8, U1, Bool
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.lines import Line, Span
from memtrace_tui.provider import Provider

HOLE, PENDING, OTHERS, FIRST = range(4)  # codes of free and pending blocks, and what the filter leaves out
MODES = ("category", "age", "step", "stack", "stream", "size", "pins", "compared")


@dataclass(frozen=True, slots=True, eq=False)
class Coloring:
    """``codes`` has one entry a block; code ``i`` has role ``roles[i]`` and means ``labels[i]``.

    Holes and pending blocks come first. ``letters`` stand for the colours where there are none. ``short`` are labels
    for narrow screens, whose common words are in ``heading``.
    """

    mode: str
    codes: U1
    roles: tuple[str, ...]
    labels: tuple[str, ...]
    letters: str
    heading: str
    short: tuple[str, ...]


NO_COLOURS = Coloring("", np.zeros(0, np.uint8), (), (), "", "", ())


def coloring(
    provider: Provider,
    layout: Layout,
    mode: str,
    fits: Bool | None = None,
    twins: Bool | None = None,
    ranks: tuple[int, int] | None = None,
) -> Coloring:
    """Colour the blocks of a layout by one of ``MODES``; those whose rows a filter doesn't fit look all alike.

    ``twins``: which rows are on the other side of a comparison, too. ``ranks``: of this side and of the other one.
    """
    make = _MODES.get(mode, _category)
    numbers, roles, labels, letters, short = (
        _compared(layout, twins, ranks) if mode == "compared" else make(provider, layout)
    )
    codes = (numbers + FIRST).astype(np.uint8)
    if fits is not None:
        codes[~fits[layout.row]] = OTHERS
    codes[layout.block_state == State.PENDING_FREE] = PENDING
    codes[layout.block_state == State.FREE] = HOLE
    name = "rank" if ranks is not None and mode == "compared" else mode
    return Coloring(
        name, codes, ("hole", "pending", "empty", *roles), ("free", "pending free", "others", *labels),
        FREE + PENDING_LETTER + "-" + letters, _HEADINGS.get(name, "category"), ("free", "pending", "others", *short),
    )  # fmt: skip


def legend_lines(colours: Coloring, order: str, width: int, plain: bool) -> list[Line]:
    """What the colours on screen mean, and what the segments are ordered by; with short names where they save a line.

    ``plain``: letters stand for the colours.
    """
    present = set(colours.codes.tolist())
    for heading, labels in ((colours.mode, colours.labels), (colours.heading, colours.short)):
        lines: list[list[Span]] = [[(f" {heading}", "title"), (f", {order}  ", "dim")]]
        used = len(heading) + len(order) + 5
        for code, (role, label) in enumerate(zip(colours.roles, labels, strict=True)):
            text = f" {clip(label, width - 4)} "
            if code in present:
                if used + len(text) + 1 > width:
                    lines.append([(" ", "text")])
                    used = 1
                lines[-1] += [(colours.letters[code] if plain else "█", role), (text, "text")]
                used += len(text) + 1
        if len(lines) == 1:
            break
    return [Line(tuple(spans)) for spans in lines]


_Answer = tuple[I8, list[str], list[str], str, list[str]]
_HEADINGS = {
    "category": "category", "age": "age in events", "step": "made in step", "stack": "call site",
    "compared": "compared", "rank": "rank", "stream": "stream", "size": "size", "pins": "free per live byte",
}  # fmt: skip


def _of(column: NDArray[Any], layout: Layout) -> I8:
    """A column of the allocation table for each block."""
    return column[layout.row].astype(np.int64) if len(column) else np.zeros(len(layout.row), np.int64)


def _category(provider: Provider, layout: Layout) -> _Answer:
    names = list(Category)
    attribution = provider.analysis.attribution
    meaning = attribution.lora_meaning
    code = np.array([names.index(rule.category) for rule in attribution.rules])
    return (
        code[_of(attribution.rule, layout)],
        [f"cat:{name}" for name in names],
        [plain_name(category_name(name, meaning)) for name in names],
        "".join(MARKS[name].letter for name in names),
        [short_name(name, meaning) for name in names],
    )


def _numbered(kind: str, labels: list[str]) -> list[str]:
    return [f"{kind}:{i}" for i in range(len(labels))]


def _ramp(values: I8, edges: list[int], above: str, name: Callable[[int], str], unit: str) -> _Answer:
    """Steps of a scale: below each edge, and ``above`` all of them."""
    below = [name(edge) for edge in edges]
    short = [*(f"<{edge}".replace(" ", "").replace(".0", "") for edge in below), above]
    codes = np.searchsorted(np.array(edges), values, side="right")
    return codes, _numbered("ramp", short), [*(f"< {edge}{unit}" for edge in below), above], "012345", short


def _age(provider: Provider, layout: Layout) -> _Answer:
    ages = layout.event - _of(provider.timeline.allocations.alloc_event, layout)
    return _ramp(ages, [10, 100, 1_000, 10_000, 100_000], "older", format_count, " events")


def _size(provider: Provider, layout: Layout) -> _Answer:
    return _ramp(layout.block_bytes, [size << 20 for size in (1, 4, 16, 64, 256)], "larger", format_bytes, "")


def _stream(provider: Provider, layout: Layout) -> _Answer:
    streams, number = np.unique(layout.stream, return_inverse=True)
    codes = np.minimum(number, 7)[layout.segment] if len(layout) else np.zeros(0, np.int64)
    short = [f"{stream:#x}" if stream > 9 else str(stream) for stream in streams[:8].tolist()]
    return codes, _numbered("hue", short), [f"stream {name}" for name in short], "01234567", short


def _most(layout: Layout, values: I8, name: Callable[[int], str], rest: str) -> _Answer:
    """The seven values that hold most bytes each have a colour, all others share one."""
    sizes = np.where(layout.row >= 0, layout.block_bytes, 0)
    found, inverse = np.unique(values, return_inverse=True)
    sums = np.bincount(inverse, weights=sizes, minlength=len(found))
    top = [int(at) for at in np.argsort(-sums, kind="stable")[:7] if sums[at] > 0]
    code = np.full(len(found), len(top), np.int64)
    code[top] = np.arange(len(top))
    labels = [*(name(int(found[at])) for at in top), rest]
    numbers = "1234567"[: len(top)] + "0"
    return code[inverse] if len(values) else values, _numbered("hue", labels), labels, numbers, labels


def _step(provider: Provider, layout: Layout) -> _Answer:
    steps = _of(provider.analysis.attribution.facts.step, layout)
    return _most(layout, steps, lambda step: str(step) if step >= 0 else "before", "others")


def _stack(provider: Provider, layout: Layout) -> _Answer:
    names, number = np.unique(provider.sites, return_inverse=True)
    shown = lambda site: str(names[site]).rpartition("/")[2] or "no stack"  # noqa: E731
    return _most(layout, number[_of(provider.timeline.allocations.stack, layout)], shown, "others")


def _compared(layout: Layout, twins: Bool | None, ranks: tuple[int, int] | None) -> _Answer:
    """Whether a block is on the other side, too: at event A, or in the second file (same call site and size)."""
    if twins is None:
        return np.zeros(len(layout.row), np.int64), ["hue:7"], ["nothing to compare with (A)"], "0", ["no A"]
    numbers = _of(~twins, layout)
    if ranks is None:
        return numbers, ["hue:0", "hue:1"], ["there, too", "only here"], "=+", ["both", "here"]
    low, high = sorted(ranks)
    labels = [f"ranks {low} and {high}", f"rank {ranks[0]} only"]
    return numbers, ["hue:0", "hue:1"], labels, "=+", [f"{low}+{high}", f"{ranks[0]} only"]


def _pins(provider: Provider, layout: Layout) -> _Answer:
    """Free bytes of the segment for each byte that is live in it: few live bytes that hold much free space burn."""
    used, free = layout.used_bytes() + layout.pending_bytes(), layout.free_bytes()
    leverage = np.divide(free, np.maximum(used, 1), dtype=np.float64)
    step = np.searchsorted(np.array([1e-9, 0.1, 0.3, 1.0, 3.0]), leverage, side="right")
    labels = ["holds nothing free", "< 0.1 free per live byte", "< 0.3", "< 1", "< 3", "≥ 3: pins it"]
    codes = step[layout.segment].astype(np.int64) if len(layout) else np.zeros(0, np.int64)
    short = ["none", "<0.1", "<0.3", "<1", "<3", "≥3"]
    return codes, _numbered("heat", short), labels, "012345", short


_MODES: dict[str, Callable[[Provider, Layout], _Answer]] = {
    "category": _category, "age": _age, "step": _step, "stack": _stack, "stream": _stream, "size": _size, "pins": _pins,
}  # fmt: skip
