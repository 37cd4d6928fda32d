"""A comparison as lines: the sentence, categories with signed bars, call sites with their part of the change."""

from __future__ import annotations

import math

from memtrace.answers.diff.comparison import Difference
from memtrace.attribution.categories import Category, category_name
from memtrace.render.words import clip, plain_name
from memtrace.units import format_bytes, format_delta, printable
from memtrace_tui.data.details import purpose_text
from memtrace_tui.data.lines import BLANK, Goto, Line, line, wrap
from memtrace_tui.data.query import site_words

_HEAD = 21


def role_of_delta(size: int) -> str:
    """More memory is bad, less is good."""
    return "bad" if size > 0 else "good" if size < 0 else "dim"


def category_lines(answer: Difference, width: int) -> list[Line]:
    """Before, after, change and a bar for reserved bytes and each category."""
    rows = [("reserved", "strong", answer.before.reserved_bytes, answer.after.reserved_bytes)]
    for category in Category:
        before, after = answer.before.categories[str(category)], answer.after.categories[str(category)]
        if before or after or category is not Category.UNATTRIBUTED:
            rows.append((plain_name(category_name(category, answer.lora_meaning)), f"cat:{category}", before, after))
    changes = [after - before for *_, before, after in rows]
    most, least = max(0, *changes), min(0, *changes)  # the axis stands where the longest bars to both sides need it
    scale = min(max(width - _HEAD - 38, 8), 80) / max(most - least, 1)
    room = math.ceil(-least * scale)
    lines = [line((f"{'':<{_HEAD}}{'before':>11}{'after':>11}{'change':>13}", "dim"))]
    for name, role, before, after in rows:
        change = after - before
        delta = format_delta(change) if change else "="
        cells = math.ceil(abs(change) * scale)
        left, right = f"{'█' * cells * (change < 0):>{room}}", "█" * cells * (change > 0)
        lines.append(line(
            (f"{name:<{_HEAD}}", role), (f"{format_bytes(before):>11}{format_bytes(after):>11}", "text"),
            (f"{delta:>13} ", role_of_delta(change)), (left, "good"), ("│", "dim"), (right, "bad"),
        ))  # fmt: skip
    return lines


def difference_lines(answer: Difference, said: str, width: int, sites: int = 200) -> list[Line]:
    """All of it, below what is said of it."""
    lines = [*wrap([(printable(said), "strong")], width), BLANK] if said else []
    if answer.story is not None and answer.story.change_bytes:
        what = answer.story.explains.removesuffix("_bytes").replace("_", " ")
        where = "  of the whole runs, wherever the cursors are"
        lines.append(line((f"why the {what} changed", "title"), (where, "dim")))
        for cause in answer.story.causes:
            if cause.bytes:
                figure = (f"{format_delta(cause.bytes):>12} ", role_of_delta(cause.bytes))
                lines.append(line(figure, (clip(printable(cause.title), max(width - 13, 8)), "text")))
        lines.append(BLANK)
    lines += [*category_lines(answer, width), BLANK]
    lines.append(line(("call sites", "title"), ("  by size of change; their changes add up to the categories'", "dim")))
    for site in answer.sites[:sites]:
        if not site.delta_bytes:
            continue
        what = purpose_text(site.category, site.subcategory, answer.lora_meaning)
        note = "" if site.match is not None else "  only after" if site.after_count else "  only before"
        where = printable(site.frame) or ("" if site.match == "kind" else "no stack recorded")
        column = 25 if width < 110 else 32
        column = column if where else max(width - 15 - len(note), 8)  # nothing beside it
        room = max(width - 15 - column - len(note), 8)
        known = site.frame if site.frame and not site.frame.startswith("(") else None
        words = site_words(category_name(site.category, answer.lora_meaning), site.subcategory, known)
        lines.append(line(
            (f"{format_delta(site.delta_bytes):>12} ", role_of_delta(site.delta_bytes)),
            (f"{clip(what, column):<{column}}  ", f"cat:{site.category}"), (clip(where, room, keep_end=True), "text"),
            (note, "warn"),
            target=Goto("segments" if site.match == "kind" else "allocations", filter=words),
        ))  # fmt: skip
    return lines
