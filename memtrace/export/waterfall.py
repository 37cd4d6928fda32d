"""The ladder of options as a waterfall: an SVG, or one HTML page that holds it. Nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from memtrace.estimate.ladder import Rung
from memtrace.units import format_bytes, format_delta
from memtrace.writing import whole_file

_LEFT, _WIDTH, _ROW, _TEXT = 190, 520, 26, 12


def waterfall_svg(rungs: Sequence[Rung]) -> str:
    """Bars from the smallest configuration to the whole."""
    whole = sum(rung.adds_bytes for rung in rungs)
    edges = [0]
    for rung in rungs:
        edges.append(edges[-1] + rung.adds_bytes)
    low, high = min(edges), max(*edges, 1)
    scale = _WIDTH / (high - low)
    height = _ROW * (len(rungs) + 1) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 110}" height="{height}" '
        f'font-family="sans-serif" font-size="{_TEXT}" role="img" aria-label="what each option adds">'
    ]
    rows = [(rung.option, edges[i], edges[i + 1], format_delta(rung.adds_bytes)) for i, rung in enumerate(rungs)]
    rows.append(("the whole", 0, whole, format_bytes(whole)))
    for number, (name, start, stop, told) in enumerate(rows):
        y = 4 + _ROW * number
        x, width = _LEFT + (min(start, stop) - low) * scale, max(abs(stop - start) * scale, 1)
        colour = "#4c72b0" if number in (0, len(rungs)) else "#c44e52" if stop >= start else "#55a868"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}"/>')
        parts.append(f'<text x="{x + width + 6:.1f}" y="{y + 15}">{escape(told)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def write_waterfall(rungs: Sequence[Rung], target: Path) -> None:
    """As .svg, or as .html around it."""
    text = waterfall_svg(rungs)
    if target.suffix == ".html":
        title = "What each option adds"
        text = f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n<h1>{title}</h1>\n{text}'
    with whole_file(target) as out:
        out.write(text.encode())
