"""The page itself: verdict, what to change first, map, budget, timeline, call sites, fragmentation, warnings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from html import escape
from pathlib import Path, PurePath

from memtrace._version import __version__
from memtrace.analysis import Analysis
from memtrace.answers.report import Report, report
from memtrace.answers.segment_map import segment_map
from memtrace.attribution.categories import MEANING, Category, category_words
from memtrace.explain.answer import Explanation, Finding
from memtrace.explain.causes import story_of
from memtrace.explain.explain import explain_snapshot
from memtrace.export.html.charts import segments_svg, timeline_data, timeline_svg
from memtrace.history.timeline import At
from memtrace.render.words import COLOUR, moment_name, plain_name, verdict_meaning, verdict_name
from memtrace.units import format_bytes, format_count

# The page may run what is written in it and load nothing at all.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_SITES, _PINNED = 60, 20


def html_report(
    analysis: Analysis, at: At, other: tuple[Analysis, At] | None = None, only: Collection[str] = ()
) -> str:
    """The whole page as text; with ``other``, both recordings side by side. Everything from the files is escaped.

    ``only``: these sections by name (``opening``, ``map``, ``budget``, ``memory``, ``sites``, ``fragmentation``,
    ``warnings``) instead of all of them.
    """
    sides = [_Side(*side) for side in ((analysis, at), other) if side is not None]
    first = sides[0]
    body = ['<p class="tools"><input type="search" id="search" placeholder="/ finds call sites and blocks"></p>']
    if len(sides) > 1:
        sentence = story_of(first.analysis, sides[1].analysis).sentence
        body.insert(0, f'<div class="verdict"><strong>{escape(sentence)}</strong></div>')
        for side in sides:
            side.top_bytes = max(side.budget.peaks["reserved_bytes"] for side in sides)
    for section in (_opening, _map, _budget, _memory, _sites, _fragmentation, _warnings):
        if only and section.__name__.removeprefix("_") not in only:
            continue
        parts = ["\n".join(section(side)) for side in sides]
        halves = "".join(f"<div>{part}</div>" for part in parts)
        body.append(parts[0] if other is None else f'<div class="pair">{halves}</div>')
    body.append(f'<p class="soft">Made by memtrace {__version__}. Nothing on this page is loaded from elsewhere.</p>')
    body.append('<div id="readout" class="soft" aria-live="polite">point at a chart, or tab to it and use ← →</div>')
    title = " and ".join(side.name for side in sides)
    data = json.dumps([timeline_data(side.analysis) for side in sides], separators=(",", ":"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} · memtrace</title><style>{_style()}</style></head>\n<body{' class=two' if other else ''}>\n"
        + "\n".join(body)
        + f"\n<script>const DATA = {data};\n{_beside('.js')}</script></body></html>\n"
    )


def _beside(ending: str) -> str:
    """What lies beside this file: the page's style (.css) or its script (.js)."""
    return Path(__file__).with_suffix(ending).read_text(encoding="utf-8")


def _style() -> str:
    of_categories = (f".{name} {{ fill: {colour}; background-color: {colour}; }}\n" for name, colour in COLOUR.items())
    return "\n" + _beside(".css") + "".join(of_categories)


class _Side:
    """One recording and what the page says of it."""

    def __init__(self, analysis: Analysis, at: At) -> None:
        self.analysis, self.at = analysis, at
        self.budget = report(analysis, at)
        self.explanation = explain_snapshot(analysis, at)
        self.top_bytes = 1  # where the scale of the timeline ends, at least
        self.name = escape(PurePath(self.budget.file).name)


def _opening(side: _Side) -> Iterable[str]:
    """What happened, and what to change first."""
    yield from _head(side.budget, side.name)
    yield from _verdict(side.explanation)
    yield from _findings(side.explanation.findings)


def _map(side: _Side) -> Iterable[str]:
    blocks = segments_svg(segment_map(side.analysis, side.at), side.budget.lora["meaning"], side.top_bytes)
    yield (
        '<h2>Segments and blocks</h2><p class="soft">Every reserved byte at this event, segment by segment; '
        'blank is free. <span class="point">Point at a block to see what it is for.</span></p>'
    )
    sizes = side.budget.categories  # holes are blank on the map
    shown = (c for c in Category if c != Category.FRAGMENTATION and sizes[c])
    yield _legend(shown, side.budget.lora["meaning"])
    yield blocks or '<p class="soft">Nothing is reserved at this event.</p>'


def _memory(side: _Side) -> Iterable[str]:
    chart = timeline_svg(side.analysis, side.at, side.top_bytes)
    chart = chart or '<p class="soft">No trace was recorded, only the final state.</p>'
    drawn = _legend((c for c in Category if f'<path class="{c}"' in chart), side.budget.lora["meaning"])
    yield f'<h2>Memory over time</h2>{drawn}<div class="chart">{chart}</div>'


def _head(budget: Report, name: str) -> Iterable[str]:
    moment = budget.moment
    parts = [budget.device_name, moment_name(budget.at)]
    if moment.step is not None:
        parts.append(f"step {moment.step}")
    if moment.phase != "unknown":
        parts.append(moment.phase)
    yield f"<h1>{name}</h1><p>{escape(' · '.join(parts))}</p>"
    peaks = " · ".join(f"{key.removesuffix('_bytes')} {format_bytes(size)}" for key, size in budget.peaks.items())
    yield f'<p class="soft">peaks over the recording: {peaks}</p>'


def _verdict(explanation: Explanation) -> Iterable[str]:
    if not explanation.because:
        return
    head = escape(f"{verdict_name(explanation.verdict)}: {verdict_meaning(explanation.verdict)}")
    lines = "".join(f"<li>{escape(line)}</li>" for line in explanation.because)
    yield f'<div class="verdict"><strong>{head}</strong> ({escape(explanation.confidence)})<ul>{lines}</ul></div>'


def _legend(categories: Iterable[Category], meaning: str) -> str:
    chips = (f'<span><i class="chip {c}"></i>{category_words(c, meaning)}</span>' for c in categories)
    return f'<p class="legend">{"".join(chips)}</p>'


def _budget(side: _Side) -> Iterable[str]:
    budget = side.budget
    yield '<h2>Budget</h2><table class="budget"><tbody>'
    largest = max(side.top_bytes, *budget.categories.values())
    for name, size in budget.categories.items():
        if name == Category.UNATTRIBUTED and not size:
            continue
        share = size / max(1, budget.reserved_bytes)
        called = category_words(name, budget.lora["meaning"])
        yield (
            f'<tr title="{escape(MEANING[Category(name)])}"><td>{called}</td>'
            f'<td class="n" data-value="{size}">{format_bytes(size)}</td><td class="n">{share:.1%}</td>'
            f'<td class="bars"><div class="bar {name}" style="width:{max(0.0, size / largest):.1%}"></div></td></tr>'
        )
        for key, part in budget.subcategories.items():
            category, _, sub = key.partition("/")
            if category == name and sub != name:
                yield (
                    f'<tr class="sub"><td>{escape(plain_name(sub))}</td>'
                    f'<td class="n" data-value="{part}">{format_bytes(part)}</td><td></td><td></td></tr>'
                )
    total = format_bytes(budget.reserved_bytes)
    yield f'<tr class="total"><td>reserved</td><td class="n" data-value="{budget.reserved_bytes}">{total}</td>'
    yield "<td></td><td></td></tr></tbody></table>"


def _findings(findings: Iterable[Finding]) -> Iterable[str]:
    for number, finding in enumerate(findings):
        if not number:
            yield "<h2>What to change first</h2>"
        size = (
            "" if finding.bytes is None else f" · {format_bytes(finding.bytes)}{' a step' if finding.per_step else ''}"
        )
        frame = f"<br><code>{escape(finding.frame)}</code>" if finding.frame else ""
        advice = "".join(
            f"<li>{escape(a.change)}"
            + ("" if a.saves_bytes is None else f" <strong>saves {format_bytes(a.saves_bytes)}</strong>")
            + f' <span class="soft">({escape(str(a.basis))})</span></li>'
            for a in finding.advice
        )
        yield (
            f'<p><strong>{escape(finding.title)}</strong>{size} <span class="soft">{escape(finding.id)}</span><br>'
            f"{escape(finding.evidence)}{frame}</p><ul>{advice}</ul>"
        )


def _sites(side: _Side) -> Iterable[str]:
    budget = side.budget
    if not budget.top:
        return
    yield (
        '<h2>Call sites</h2><table class="sites"><thead><tr><th class="n" data-sort>bytes</th>'
        '<th class="n" data-sort>count</th>'
        "<th data-sort>what for</th><th data-sort>where</th><th data-sort>evidence</th></tr></thead><tbody>"
    )
    for site in budget.top[:_SITES]:
        module = f"{escape(site.module)}: " if site.module else ""
        place = escape(site.frame or "(no stack recorded)")
        called = escape(category_words(site.category, budget.lora["meaning"]))
        yield (
            f'<tr><td class="n" data-value="{site.bytes}">{format_bytes(site.bytes)}</td>'
            f'<td class="n" data-value="{site.count}">{format_count(site.count)}</td>'
            f'<td><span class="kind"><i class="chip {site.category}"></i>{called}/</span>'
            f"<wbr>{escape(plain_name(site.subcategory))}</td>"
            f'<td class="code">{module}{place}</td>'
            f'<td class="soft">{escape(site.evidence)}: {escape(site.rule)}</td></tr>'
        )
    yield "</tbody></table>"
    rest = budget.top[_SITES:]
    if rest:
        yield f'<p class="soft">and {format_bytes(sum(site.bytes for site in rest))} in {len(rest)} more</p>'


def _fragmentation(side: _Side) -> Iterable[str]:
    f, meaning = side.budget.fragmentation, side.budget.lora["meaning"]
    if not f.reserved_bytes:
        return
    yield (
        f"<h2>Fragmentation</h2><p>{format_bytes(f.allocated_bytes)} of {format_bytes(f.reserved_bytes)} reserved are "
        f"allocated ({f.utilisation:.1%}); the largest free block has {format_bytes(f.largest_free_block_bytes)}"
    )
    yield f", and {format_bytes(f.asked_bytes)} were asked for.</p>" if f.asked_bytes is not None else ".</p>"
    if not f.pinned_segments:
        return
    yield (
        '<table class="pinned"><thead><tr><th data-sort>segment</th><th class="n" data-sort>size</th>'
        '<th class="n" data-sort>free in it</th><th>held by</th></tr></thead><tbody>'
    )
    for segment in f.pinned_segments[:_PINNED]:
        pins = "; ".join(
            f"{category_words(f'{pin.category}/{pin.subcategory}', meaning)} {format_bytes(pin.bytes)}"
            + (f" {pin.frame}" if pin.frame else "")
            for pin in segment.pinned_by[:3]
        )
        more = f"; {len(segment.pinned_by) - 3} more" if len(segment.pinned_by) > 3 else ""
        yield (
            f'<tr><td class="code">0x{segment.address:x}</td>'
            f'<td class="n" data-value="{segment.total_bytes}">{format_bytes(segment.total_bytes)}</td>'
            f'<td class="n" data-value="{segment.free_bytes}">{format_bytes(segment.free_bytes)}</td>'
            f'<td class="code">{escape(pins + more)}</td></tr>'
        )
    yield "</tbody></table>"


def _warnings(side: _Side) -> Iterable[str]:
    for number, line in enumerate(side.budget.warnings):
        if not number:
            yield "<h2>What to be wary of</h2>"
        yield f'<p class="warning">{escape(line)}</p>'
