"""The overview: what happened, the gauge, the budget by category, peaks, sites, warnings. All of it from one Report."""

from __future__ import annotations

import numpy as np

from memtrace.answers.report import Report
from memtrace.attribution.categories import Category, category_name
from memtrace.explain.answer import Explanation
from memtrace.render.words import MOMENTS, bar, clip, plain_name
from memtrace.snapshot.model import Action, BlockState, Device
from memtrace.units import counted, format_bytes, format_count, printable
from memtrace_tui.data.details import event_text, purpose_text
from memtrace_tui.data.findings import verdict_title
from memtrace_tui.data.lines import BLANK, Goto, Line, Span, line, stacked, wrap
from memtrace_tui.data.query import site_words
from memtrace_tui.provider import Provider


def file_lines(device: Device, width: int) -> list[Line]:
    """What the file itself says, before the allocator is replayed: what was refused, and the state it ends with."""
    segments, blocks, trace = device.segments, device.blocks, device.trace
    reserved, live = int(segments.total_size.sum()), int(blocks.size[blocks.state == BlockState.ALLOCATED].sum())
    free = blocks.size[blocks.state == BlockState.INACTIVE]
    lines = [line((format_count(len(trace)), "strong"), (" events; the file ends with", "dim"))
             if len(trace) else line(("the file ends with", "dim"))]  # fmt: skip
    lines += wrap([(format_bytes(reserved), "strong"), (f" reserved in {counted(len(segments), 'segment')}, ", "dim"),
                   (format_bytes(live), "strong"), (" of it allocated", "dim")], width)  # fmt: skip
    if len(free):
        pieces = f" free in {counted(len(free), 'piece')}, the largest "
        lines += wrap([(format_bytes(int(free.sum())), "strong"), (pieces, "dim"),
                       (format_bytes(int(free.max())), "strong")], width)  # fmt: skip
    lines.append(Line(tuple(stacked([(live, "accent"), (reserved - live, "hole")], reserved, width))))
    for event in np.flatnonzero(trace.action == Action.OOM)[-1:].tolist():
        refused = f"  {format_bytes(int(trace.size[event]))} refused at event {format_count(event)}"
        lines += [BLANK, line((" OUT OF MEMORY ", "alarm"), refused)]
    return lines


def banner_lines(provider: Provider, report: Report, width: int, answer: Explanation | None = None) -> list[Line]:
    """What this moment is, in two or three lines of facts; with the verdict, where it is about this moment."""
    at, unused = report.at, report.fragmentation
    where = event_text(provider, at.event)
    spans: list[Span] = [
        (MOMENTS[at.kind].capitalize(), "title"),
        ("  event " if at.event >= 0 else "  ", "dim"),
        (where, "text"),
    ]
    if at.kind == "oom" and unused.asked_bytes is not None:
        asked = format_bytes(unused.asked_bytes)
        spans = [
            (" OUT OF MEMORY ", "alarm"),
            ("  ", "text"),
            (asked, "strong"),
            (f" refused at event {where}", "text"),
        ]
    lines = wrap(spans, width, 2)
    free = unused.holes_bytes + unused.cached_segments_bytes
    if free:
        pieces = f" of reserved memory is free, in {format_count(unused.free_block_count)} pieces, the largest "
        fact: list[Span] = [(format_bytes(free), "strong"), (pieces, "text"),
                            (format_bytes(unused.largest_free_block_bytes), "strong")]  # fmt: skip
        if unused.asked_bytes is not None and unused.asked_bytes > unused.largest_free_block_bytes:
            fact.append((": too small for the request", "bad"))
        lines += wrap(fact, width, 2)
    if answer is not None and answer.verdict != "no_oom":
        lines.append(line((verdict_title(answer.verdict), "warn"), (f"  {answer.confidence}", "dim"),
                          target=Goto("findings")))  # fmt: skip
    return lines


def gauge_lines(provider: Provider, report: Report, width: int) -> list[Line]:
    """One stacked bar of the device's memory, or of the highest reserved where its size isn't known."""
    outside = report.outside_allocator or {}
    elsewhere = outside.get("not_this_allocator_bytes") or 0
    capacity = provider.capacity_bytes
    total = max(capacity or report.peaks["reserved_bytes"], report.reserved_bytes + max(elsewhere, 0), 1)
    parts = [(report.categories[str(c)], f"fill:cat|{c}") for c in Category]
    if elsewhere > 0:
        parts.append((elsewhere, "fill:outside"))
    parts.append((max(total - sum(size for size, _ in parts), 0), "fill:empty"))
    words: list[Span] = [("reserved ", "dim"), (format_bytes(report.reserved_bytes), "strong"), ("  allocated ", "dim"),
                         (format_bytes(report.allocated_bytes), "strong")]  # fmt: skip
    if elsewhere > 0:
        words += [("  outside this allocator ", "dim"), (format_bytes(elsewhere), "strong")]
    free = outside.get("device_free_bytes")
    if free is not None:
        words += [("  device free ", "dim"), (format_bytes(free), "strong")]
    whole = "capacity" if capacity else "peak reserved"
    words += [(f"  full bar: {whole} ", "dim"), (format_bytes(capacity or report.peaks["reserved_bytes"]), "strong")]
    return [Line(tuple(stacked(parts, total, width))), *wrap(words, width)]


def budget_lines(report: Report, width: int, categories: bool = True, parts: bool = True) -> list[Line]:
    """A line a category and (with ``parts``) a subcategory, with bars; Enter shows the allocations behind it."""
    reserved, bars = max(report.reserved_bytes, 1), max(width - 38, 6)
    lines = []
    for category, size in report.categories.items():
        if category == Category.UNATTRIBUTED and not size:
            continue
        called, role = category_name(category, report.lora["meaning"]), f"cat:{category}"
        own = {
            key.partition("/")[2]: part for key, part in report.subcategories.items() if key.startswith(f"{category}/")
        }
        own.pop(category, None)
        for sub, part in [*([("", size)] if categories else ()), *(own.items() if parts else ())]:
            share = part / reserved
            lines.append(line(
                (f"{plain_name(f'  {sub}' if sub else called):<20}", "dim" if sub and categories else role),
                (f"{format_bytes(part):>10}", "text" if sub else "strong"), (f"{share:>7.1%} ", "dim"),
                (("━" * round(share * bars) or "╸") if sub else bar(share, bars), role),
                target=Goto("segments") if category == Category.FRAGMENTATION
                else Goto("allocations", filter=site_words(called, sub)) if part else None,
            ))  # fmt: skip
    return lines


def facts_lines(provider: Provider, report: Report, width: int, height: int = 0) -> list[Line]:
    """Peaks, the biggest sites (eight, or as many as ``height`` lines have room for), warnings."""
    lines = [line(("peaks over the recording", "title"))]
    names = ("requested", "allocated", "reserved")
    moments = [(name, "dim", report.peaks[f"{name}_bytes"], peak.event, "timeline")
               for name, peak in zip(names, provider.peaks, strict=True)]  # fmt: skip
    moments += [("" if number else "OOM", "bad", int(provider.timeline.trace.size[event]), event, "segments")
                for number, event in enumerate(provider.ooms[:3])]  # fmt: skip
    for name, role, size, event, view in moments:
        lines.append(line((f"  {name:<10}", role), (f"{format_bytes(size):>10}", "strong"),
                          ("  " + clip(event_text(provider, event), width - 24), "dim"),
                          target=Goto(view, event)))  # fmt: skip
    if len(provider.ooms) > 3:
        lines.append(line((f"            and {len(provider.ooms) - 3} more refused requests", "dim")))
    tail: list[Line] = []
    lost = report.attribution
    if lost.unattributed_bytes:
        tail += [BLANK, line(("not attributed", "title"), (f"  {format_bytes(lost.unattributed_bytes)}", "strong"))]
        for reason in lost.unattributed:
            text = f"{format_bytes(reason.bytes)} in {format_count(reason.count)}: {reason.reason}"
            tail += wrap([("  " + text, "dim")], width, 4)
    if report.warnings:
        tail += [BLANK, line(("be aware", "warn"))]
        for warning in report.warnings:
            tail += wrap([("  ! ", "warn"), (printable(warning), "text")], width, 4)
    lines += [BLANK, line(("largest call sites", "title"))]
    for site in report.top[: max((height - len(lines) - len(tail)) // 2, 8)]:
        purpose = purpose_text(site.category, site.subcategory, report.lora["meaning"])
        words = site_words(category_name(site.category, report.lora["meaning"]), site.subcategory, site.frame)
        lines.append(line((f"{format_bytes(site.bytes):>12} ", "strong"),
                          (clip(purpose, width - 13), f"cat:{site.category}"),
                          target=Goto("allocations", filter=words)))  # fmt: skip
        where = printable(site.frame) or "no stack recorded"
        lines.append(line((" " * 13, "text"), (clip(where, max(width - 13, 8), keep_end=True), "dim")))
    return [*lines, *tail]
