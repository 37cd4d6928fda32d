"""A difference as text and as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import PurePath

from memtrace.answers.diff.comparison import Difference, SiteDelta, Story
from memtrace.answers.report import Report
from memtrace.attribution.categories import Category, category_name
from memtrace.render.text import Text, columns, heading, table, warning_lines
from memtrace.render.words import STYLE, clip, moment_line
from memtrace.units import format_bytes, format_delta

_LINE = re.compile(r":\d+ ")
_HOW = {
    "function": "same function", "caller": "same caller", "operator": "same operator",
    "purpose": "no stack on one side",
}  # fmt: skip


def render_diff(answer: Difference, width: int = 100, sites: int = 12) -> Iterator[Text]:
    """The sentence, the causes, the two heads, the budget side by side and the call sites that changed most."""
    yield from (Text(part, style="bold") for part in textwrap.wrap(answer.sentence, width))
    yield Text()
    if answer.story is not None:
        yield from _cause_lines(answer, answer.story, width)
    sides = (("before", answer.before), ("after", answer.after))
    for name, budget in sides:
        yield Text(f"{name:<7} {_head(budget)}")
    if answer.before.moment != answer.after.moment:
        yield Text("compared at moments that are not alike", style="yellow")
    yield Text()
    rows = list(_budget_rows(answer))
    colours = STYLE | {"trained": STYLE[Category.LORA]}
    styles = [colours.get(row[0].strip(), "dim" if row[0].startswith("  ") else "bold") for row in rows]
    yield from table([("", "before", "after", "change"), *rows], [False, True, True, True], styles)
    yield Text()
    yield heading("call sites that changed most")
    changed = _changed(answer)
    yield from _site_lines(changed[:sites], width, answer.lora_meaning)
    if len(changed) > sites:
        rest = sum(site.delta_bytes for site in changed[sites:])
        yield Text(f"  {format_delta(rest):>11}  in {len(changed) - sites} more", style="dim")
    if not changed:
        yield Text("  none")
    gone = [site.before_bytes for site in answer.unmatched if not site.after_count]
    new = [site.after_bytes for site in answer.unmatched if site.after_count]
    if gone or new:
        before = f"{format_bytes(sum(gone))} in {len(gone)} sites only before"
        yield Text(f"unmatched: {before}, {format_bytes(sum(new))} in {len(new)} sites only after")
    warnings = [f"{name}: {line}" for name, budget in sides for line in budget.warnings]
    if warnings:
        yield Text()
        yield from warning_lines(warnings)


def _changed(answer: Difference) -> list[SiteDelta]:
    """Call sites that changed; kinds of fragmentation have none."""
    return [site for site in answer.sites if site.delta_bytes and site.category != Category.FRAGMENTATION]


def _note(site: SiteDelta) -> str:
    """How the two sides of a site were found to be one."""
    return _HOW.get(site.match, "") if site.match is not None else "only after" if site.after_count else "only before"


def _moments(answer: Difference, story: Story) -> str:
    """Where the causes look at each run; empty without history."""
    here, table_at = story.events, (answer.before.at.event, answer.after.at.event)
    if min(here) < 0:
        return ""
    both = " in the steps that both ran" if any(c.id == "later_steps" and c.bytes for c in story.causes) else ""
    text = f"compared at the peaks of allocated memory{both}: event {here[0]:,} before, {here[1]:,} after"
    other = f"; the table below is of events {table_at[0]:,} and {table_at[1]:,}" if table_at != here else ""
    return text + other


def _cause_lines(answer: Difference, story: Story, width: int) -> Iterator[Text]:
    """Causes with their bytes, and what is unlike in the two runs."""
    what = story.explains.removesuffix("_bytes").replace("_", " ")
    yield heading(f"why the {what} changed by {format_delta(story.change_bytes)}")
    if story.change_bytes:
        yield from (Text(part, style="dim") for part in textwrap.wrap(_moments(answer, story), width))
    for cause in story.causes:
        if cause.bytes:
            yield Text.assemble((f"  {format_delta(cause.bytes):>11}  ", "bold"), cause.title)
            for part in textwrap.wrap(cause.evidence, max(width - 17, 20)):
                yield Text(f"{'':15}{part}", style="dim")
    rows = [(name, a or "?", b or "?") for name, (a, b) in story.unlike.items()]
    if rows:
        first, *rest = columns([("unlike in the two runs", "before", "after"), *rows], [False] * 3)
        yield from (Text(), heading(clip(first, width)), *(Text(clip(line, width)) for line in rest))
    yield Text()


def _head(budget: Report) -> str:
    return (
        f"{PurePath(budget.file).name} · {budget.device_name} · {moment_line(budget)} · peak allocated "
        f"{format_bytes(budget.peaks['allocated_bytes'])}, reserved {format_bytes(budget.peaks['reserved_bytes'])}"
    )


def _budget_rows(answer: Difference) -> Iterator[tuple[str, str, str, str]]:
    before, after, delta = answer.before, answer.after, answer.delta
    for name, change in delta.categories.items():
        if not (before.categories.get(name) or after.categories.get(name)):
            continue
        called = category_name(name, answer.lora_meaning)
        yield _row(called, before.categories.get(name, 0), after.categories.get(name, 0), change)
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


def _site_lines(sites: list[SiteDelta], width: int, meaning: str) -> Iterator[Text]:
    for site in sites:
        head, kind, note = (
            f"  {format_delta(site.delta_bytes):>11}  ",
            category_name(f"{site.category}/{site.subcategory}", meaning),
            _note(site),
        )
        tail = f"  [{note}]" if note else ""
        place = clip(_place(site), max(20, width - len(head) - 30 - len(tail)))
        yield Text.assemble(head, (f"{kind:<29} ", STYLE[site.category]), place, (tail, "dim"))


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
        lines += ["", _escape(_moments(answer, answer.story))]
        before, after = answer.story.curves
        lines += ["", "Allocated memory over each run:", "```", f"before {before}", f"after  {after}", "```", ""]
    lines += [f"- before: {_escape(_head(answer.before))}", f"- after: {_escape(_head(answer.after))}", ""]
    lines += ["| | before | after | change |", "|---|---:|---:|---:|"]
    for name, before, after, change in _budget_rows(answer):
        label = f"&nbsp;&nbsp;{name.strip()}" if name.startswith("  ") else f"**{name}**"
        lines.append(f"| {label} | {before} | {after} | {change} |")
    changed = _changed(answer)
    if changed:
        lines += ["", "| change | before | after | what for | call site | |", "|---:|---:|---:|---|---|---|"]
        for site in changed[:sites]:
            sizes = (format_delta(site.delta_bytes), format_bytes(site.before_bytes), format_bytes(site.after_bytes))
            kind = category_name(f"{site.category}/{site.subcategory}", answer.lora_meaning)
            place = _place(site).replace("`", "'").replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {' | '.join(sizes)} | {kind} | `{place}` | {_note(site)} |")
        if len(changed) > sites:
            rest = sum(site.delta_bytes for site in changed[sites:])
            lines.append(f"| {format_delta(rest)} | | | in {len(changed) - sites} more | | |")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    for special in "\\`*_{}[]<>|#":
        text = text.replace(special, f"\\{special}")
    return text
