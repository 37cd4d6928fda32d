"""A difference as text and as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import PurePath

from rich.text import Text

from memtrace.answers.diff.comparison import Difference, SiteDelta, Story
from memtrace.answers.report import Report
from memtrace.attribution.categories import Category
from memtrace.render.text import columns, heading, warning_lines
from memtrace.render.words import STYLE, clip, moment_name
from memtrace.units import format_bytes, format_delta

_LINE = re.compile(r":\d+ ")
_HOW = {
    "line": "",
    "kind": "",
    "function": "same function",
    "caller": "same caller",
    "operator": "same operator",
    "no stack": "",
    "purpose": "no stack on one side",
    None: "unmatched",
}


def render_diff(answer: Difference, width: int = 100, sites: int = 12) -> list[Text]:
    """The sentence, the causes, the two heads, the budget side by side and the call sites that changed most."""
    lines = [*(Text(part, style="bold") for part in textwrap.wrap(answer.sentence, width)), Text()]
    if answer.story is not None:
        lines += _cause_lines(answer.story, width)
    for name, budget in (("before", answer.before), ("after", answer.after)):
        lines.append(Text(f"{name:<7} {_head(budget)}"))
    if answer.before.moment != answer.after.moment:
        lines.append(Text("compared at moments that are not alike", style="yellow"))
    lines.append(Text())
    rows = [("", "before", "after", "change"), *_budget_rows(answer)]
    styles = ["bold", *(STYLE.get(row[0].strip(), "dim" if row[0].startswith("  ") else "bold") for row in rows[1:])]
    lines += [
        Text(line, style=style) for line, style in zip(columns(rows, [False, True, True, True]), styles, strict=True)
    ]
    lines += [Text(), heading("call sites that changed most")]
    changed = [site for site in answer.sites if site.delta_bytes and site.category != Category.FRAGMENTATION]
    lines += _site_lines(changed[:sites], width)
    if len(changed) > sites:
        rest = sum(site.delta_bytes for site in changed[sites:])
        lines.append(Text(f"  {format_delta(rest):>11}  in {len(changed) - sites} more", style="dim"))
    if not changed:
        lines.append(Text("  none"))
    gone = [site for site in answer.unmatched if not site.after_count]
    new = [site for site in answer.unmatched if site.after_count]
    if gone or new:
        lines.append(
            Text(
                f"unmatched: {format_bytes(sum(s.before_bytes for s in gone))} in {len(gone)} sites only before, "
                f"{format_bytes(sum(s.after_bytes for s in new))} in {len(new)} sites only after"
            )
        )
    warnings = [
        f"{name}: {line}" for name, b in (("before", answer.before), ("after", answer.after)) for line in b.warnings
    ]
    if warnings:
        lines += [Text(), *warning_lines(warnings)]
    return lines


def _cause_lines(story: Story, width: int) -> list[Text]:
    """Causes with their bytes, and what is unlike in the two runs."""
    what = story.explains.removesuffix("_bytes").replace("_", " ")
    lines = [heading(f"why the {what} changed by {format_delta(story.change_bytes)}")]
    for cause in story.causes:
        if cause.bytes:
            lines.append(Text.assemble((f"  {format_delta(cause.bytes):>11}  ", "bold"), cause.title))
            told = textwrap.wrap(cause.evidence, max(width - 17, 20))
            lines += [Text(f"{'':15}{part}", style="dim") for part in told]
    rows = [(name, a or "?", b or "?") for name, (a, b) in story.unlike.items()]
    if rows:
        first, *rest = columns([("unlike in the two runs", "before", "after"), *rows], [False] * 3)
        lines += [Text(), heading(clip(first, width)), *(Text(clip(line, width)) for line in rest)]
    return [*lines, Text()]


def _head(budget: Report) -> str:
    step = "" if budget.moment.step is None else f", step {budget.moment.step}"
    phase = "" if budget.moment.phase == "unknown" else f", {budget.moment.phase}"
    return (
        f"{PurePath(budget.file).name} · GPU {budget.device} · {moment_name(budget.at)}{step}{phase} · peak allocated "
        f"{format_bytes(budget.peaks['allocated_bytes'])}, reserved {format_bytes(budget.peaks['reserved_bytes'])}"
    )


def _budget_rows(answer: Difference) -> Iterator[tuple[str, str, str, str]]:
    before, after, delta = answer.before, answer.after, answer.delta
    for name, change in delta.categories.items():
        if not (before.categories.get(name) or after.categories.get(name)):
            continue
        yield _row(name, before.categories.get(name, 0), after.categories.get(name, 0), change)
        for key, part in delta.subcategories.items():
            category, _, sub = key.partition("/")
            if category == name and part and sub != name:
                yield _row(f"  {sub}", before.subcategories.get(key, 0), after.subcategories.get(key, 0), part)
    yield _row("reserved", before.reserved_bytes, after.reserved_bytes, delta.reserved_bytes)
    for name in ("allocated", "reserved"):
        a, b = before.peaks[f"{name}_bytes"], after.peaks[f"{name}_bytes"]
        yield _row(f"peak {name}", a, b, b - a)


def _row(name: str, before: int, after: int, change: int) -> tuple[str, str, str, str]:
    return name, format_bytes(before), format_bytes(after), format_delta(change) if change else "="


def _place(site: SiteDelta) -> str:
    renamed = _LINE.sub("", site.frame) != _LINE.sub("", site.frame_before)
    place = f"{site.frame_before} → {site.frame}" if renamed else site.frame
    return f"{site.module}: {place}" if site.module else place


def _site_lines(sites: list[SiteDelta], width: int) -> list[Text]:
    lines = []
    for site in sites:
        head = f"  {format_delta(site.delta_bytes):>11}  "
        kind = f"{site.category}/{site.subcategory}"
        note = _HOW[site.match]
        if site.match is None:
            note = "only after" if site.after_count else "only before"
        tail = f"  [{note}]" if note else ""
        room = max(20, width - len(head) - 30 - len(tail))
        lines.append(
            Text.assemble(head, (f"{kind:<29} ", STYLE[site.category]), clip(_place(site), room), (tail, "dim"))
        )
    return lines


def diff_markdown(answer: Difference, sites: int = 12) -> str:
    """The same answer for a pull request."""
    lines = [f"**{_escape(answer.sentence)}**", ""]
    if answer.story is not None:
        lines += ["| change | cause | evidence |", "|---:|---|---|"]
        lines += [
            f"| {format_delta(cause.bytes)} | {_escape(cause.title)} | {_escape(cause.evidence)} |"
            for cause in answer.story.causes
            if cause.bytes
        ]
        before, after = answer.story.curves
        lines += ["", "Allocated memory over each run:", "```", f"before {before}", f"after  {after}", "```", ""]
    lines += [f"- before: {_escape(_head(answer.before))}", f"- after: {_escape(_head(answer.after))}", ""]
    lines += ["| | before | after | change |", "|---|---:|---:|---:|"]
    for name, before, after, change in _budget_rows(answer):
        label = f"&nbsp;&nbsp;{name.strip()}" if name.startswith("  ") else f"**{name}**"
        lines.append(f"| {label} | {before} | {after} | {change} |")
    changed = [site for site in answer.sites if site.delta_bytes and site.category != Category.FRAGMENTATION]
    if changed:
        lines += ["", "| change | before | after | what for | call site | |", "|---:|---:|---:|---|---|---|"]
        for site in changed[:sites]:
            note = ("only after" if site.after_count else "only before") if site.match is None else _HOW[site.match]
            sizes = (format_delta(site.delta_bytes), format_bytes(site.before_bytes), format_bytes(site.after_bytes))
            lines.append(
                f"| {' | '.join(sizes)} | {site.category}/{site.subcategory} | {_code(_place(site))} | {note} |"
            )
        if len(changed) > sites:
            rest = sum(site.delta_bytes for site in changed[sites:])
            lines.append(f"| {format_delta(rest)} | | | in {len(changed) - sites} more | | |")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    for special in "\\`*_{}[]<>|#":
        text = text.replace(special, f"\\{special}")
    return text


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"
