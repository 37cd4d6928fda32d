"""The page's drawings as SVG text: memory over time, and the map of segments."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.answers.curves import category_curves, pick_events
from memtrace.answers.segment_map import BlockView, SegmentMap, SegmentView
from memtrace.attribution.categories import Category, category_words
from memtrace.attribution.phases import Phase
from memtrace.history.timeline import At, Window
from memtrace.units import format_bytes, format_count

I8 = NDArray[np.int64]
_WIDTH, _HEIGHT, _BOTTOM, _TOP = 1120, 330, 38, 24
_POINTS, _READ_POINTS = 5000, 1200
_LINE, _GAP, _LINES = 16, 4, 56  # of the segment map: height of a line, space below it, lines aimed at
_MIN_LINE_BYTES = 32 << 20


def timeline_svg(analysis: Analysis, at: At, top_bytes: int = 1) -> str:
    """Stacked categories, reserved and allocated levels, phases, refusals and the chosen event; "" without a trace.
    The scale ends at the most reserved, or at ``top_bytes`` where that is more: charts side by side share a scale."""
    timeline = analysis.timeline
    if not len(timeline):
        return ""
    span = timeline.span
    curves = category_curves(analysis, timeline.window)
    events = pick_events(curves, _POINTS)
    place = events - span.first
    top_bytes = max(top_bytes, int(curves.reserved_bytes.max(initial=1)))
    scale = _Scale(span, top_bytes)
    parts = [
        f'<svg class="time" tabindex="0" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory over time">'
    ]
    base, meaning = np.zeros(len(events), dtype=np.int64), analysis.attribution.lora_meaning
    for number, category in enumerate(Category):
        layer = curves.categories[number, place]
        if layer.any():
            upper = base + layer
            peak = int(curves.categories[number].max())
            title = f"{category_words(category, meaning)}: at most {format_bytes(peak)}"
            parts.append(
                f'<path class="{category}" d="{_area(scale, events, base, upper)}"><title>{title}</title></path>'
            )
            base = upper
    for name, curve in (("reserved", curves.reserved_bytes), ("allocated", curves.allocated_bytes)):
        parts.append(f'<path class="curve" d="{_steps(scale, events, curve[place])}"><title>{name}</title></path>')
    parts += _phase_strip(analysis, scale)
    for event in timeline.oom_events:
        asked = format_bytes(int(timeline.trace.size[event]))
        title = f"<title>out of memory at event {format_count(event)}: {asked} refused</title>"
        parts.append(_upright("mark", scale.x(event), title))
    if at.event >= 0:
        parts.append(_upright("chosen", scale.x(at.event)))
    parts.append(_upright("pointer", -9))
    for share in (0.25, 0.5, 0.75, 1.0):
        y = scale.y(top_bytes * share)
        parts.append(f'<line class="grid" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="3" y="{y - 4:.1f}">{format_bytes(int(top_bytes * share))}</text>')
    parts.append(f'<text x="3" y="{_HEIGHT - 5}">event {format_count(span.first)}</text>')
    parts.append(
        f'<text x="{_WIDTH - 3}" y="{_HEIGHT - 5}" text-anchor="end">{format_count(span.stop - 1)}</text></svg>'
    )
    return "".join(parts)


def timeline_data(analysis: Analysis) -> dict[str, object]:
    """What the pointer reads out: some events that keep every extreme, with their phase, step and bytes by category."""
    timeline = analysis.timeline
    if not len(timeline):
        return {"event": []}
    curves = category_curves(analysis, timeline.window)
    events = pick_events(curves, _READ_POINTS)
    phases = analysis.attribution.facts.phases
    spans = phases.span_of(events)
    known = len(phases) > 0
    return {
        "width": _WIDTH, "first": timeline.span.first, "stop": timeline.span.stop,
        "event": events.tolist(),
        "phase": [Phase(int(phases.phase[span])).label if known and span >= 0 else "" for span in spans.tolist()],
        "step": [int(phases.step[span]) if known and span >= 0 else -1 for span in spans.tolist()],
        "bytes": {
            category_words(c, analysis.attribution.lora_meaning): curves.categories[i, events - curves.first].tolist()
            for i, c in enumerate(Category)
        },
    }  # fmt: skip


def _upright(style: str, x: float, inside: str = "") -> str:
    """A vertical line through the whole chart."""
    return f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">{inside}</line>'


def _rect(style: str, x: float, y: float, width: float, height: float, title: str) -> str:
    box = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"'
    return f'<rect class="{style}" {box}><title>{title}</title></rect>'


class _Scale:
    """Events and bytes to pixels."""

    def __init__(self, span: Window, top_bytes: int) -> None:
        self.span = span
        self._per_event = _WIDTH / max(1, span.stop - span.first)
        self._per_byte = (_HEIGHT - _TOP - _BOTTOM) / top_bytes

    def x(self, event: float) -> float:
        return (event - self.span.first) * self._per_event

    def y(self, size_bytes: float) -> float:
        return _HEIGHT - _BOTTOM - size_bytes * self._per_byte


def _points(scale: _Scale, events: I8, values: I8) -> list[str]:
    """Corners of a step curve: each value holds until the next event."""
    corners: list[str] = []
    last_y = ""
    for event, value in zip(events.tolist(), values.tolist(), strict=True):
        x, y = f"{scale.x(event):.1f}", f"{scale.y(value):.1f}"
        if last_y and y != last_y:
            corners.append(f"{x},{last_y}")
        if y != last_y:
            corners.append(f"{x},{y}")
        last_y = y
    corners.append(f"{_WIDTH},{last_y}")
    return corners


def _steps(scale: _Scale, events: I8, values: I8) -> str:
    return "M" + "L".join(_points(scale, events, values))


def _area(scale: _Scale, events: I8, lower: I8, upper: I8) -> str:
    return "M" + "L".join([*_points(scale, events, upper), *reversed(_points(scale, events, lower))]) + "Z"


def _phase_strip(analysis: Analysis, scale: _Scale) -> Iterator[str]:
    phases = analysis.attribution.facts.phases
    for i in range(len(phases)):
        phase = Phase(int(phases.phase[i]))
        if phase is Phase.UNKNOWN:
            continue
        first, stop = max(int(phases.start[i]), scale.span.first), min(int(phases.start[i + 1]), scale.span.stop)
        if first >= stop:
            continue
        x, end = scale.x(first), scale.x(stop)
        step = f", step {int(phases.step[i])}" if phases.step[i] >= 0 else ""
        yield _rect(f"phase-{phase.label}", x, _HEIGHT - _BOTTOM + 3, max(end - x, 0.3), 9, f"{phase.label}{step}")


def segments_svg(answer: SegmentMap, meaning: str, top_bytes: int = 1) -> str:
    """Segments laid out like text, largest pool first: one frame a segment, its blocks in colour. "" without any.
    ``top_bytes`` as in :func:`timeline_svg`."""
    if not answer.segments:
        return ""
    reserved_bytes = max(answer.reserved_bytes, top_bytes)
    line_bytes = max(_MIN_LINE_BYTES, reserved_bytes // _LINES, max(s.total_bytes for s in answer.segments) // 8)
    per_byte = _WIDTH / line_bytes
    ordered = sorted(answer.segments, key=lambda s: (s.pool, s.stream, -s.total_bytes, s.address))
    x, line = 0.0, 0
    parts: list[str] = []
    for segment in ordered:
        width = segment.total_bytes * per_byte
        if x > 0 and x + width > _WIDTH and width <= _WIDTH:
            x, line = 0.0, line + 1
        x, line, drawn = _segment(segment, meaning, x, line, per_byte)
        parts += drawn
        x += 2
        if x >= _WIDTH:
            x, line = 0.0, line + 1
    height = (line + 1) * (_LINE + _GAP)
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="segments and blocks">'
    return head + "".join(parts) + "</svg>"


def _segment(segment: SegmentView, meaning: str, x: float, line: int, per_byte: float) -> tuple[float, int, list[str]]:
    """Draw one segment from (x, line), wrapping where a line ends; returns where it ends."""
    kind = "expandable range" if segment.is_expandable else "segment"
    about = (
        f"{segment.pool} {kind} 0x{segment.address:x}, {format_bytes(segment.total_bytes)}, "
        f"{format_bytes(segment.free_bytes)} free"
    )
    parts: list[str] = []
    alike = groupby(segment.blocks, key=attrgetter("state", "category", "subcategory", "frame"))
    for label, style, size in (_run(tuple(run), meaning) for _, run in alike):
        left = size * per_byte
        while left > 1e-9:
            width = min(left, _WIDTH - x)
            if width > 0.05:
                framed = "free frame" if style == "free" else style
                parts.append(_rect(framed, x, line * (_LINE + _GAP), width, _LINE, escape(f"{label} · {about}")))
            left -= width
            x += width
            if x >= _WIDTH - 1e-9:
                x, line = 0.0, line + 1
    return x, line, parts


def _run(run: tuple[BlockView, ...], meaning: str) -> tuple[str, str, int]:
    """(text, style, bytes) of neighbouring blocks that are alike, drawn as one."""
    size, first = sum(block.block_bytes for block in run), run[0]
    if first.state == "free":
        return f"free {format_bytes(size)}", "free", size
    many = f" in {len(run)} blocks" if len(run) > 1 else ""
    what = category_words(f"{first.category}/{first.subcategory}", meaning) if first.category else "in use"
    waiting = "pending free: " if first.state == "pending_free" else ""
    place = f" · {first.frame}" if first.frame else ""
    style = "pending_free" if waiting else (first.category or str(Category.UNATTRIBUTED))
    return f"{waiting}{what} {format_bytes(size)}{many}{place}", style, size
