"""The budget as text."""

from __future__ import annotations

from pathlib import PurePath

from rich.text import Text

from memtrace.answers.report import Report
from memtrace.attribution.categories import Category
from memtrace.attribution.sites import NO_STACK
from memtrace.render.text import heading, warning_lines
from memtrace.render.words import STYLE, bar, clip, moment_name
from memtrace.units import counted, format_bytes, format_count

_SMALL_SHARE = 0.001
_SMALL_REST = 0.005  # what is left of a category is named where its parts would not seem to add up


def render_report(report: Report, width: int = 80, sites: int = 8) -> list[Text]:
    """The budget as lines of at most about ``width`` characters."""
    lines = _head(report)
    lines.append(Text())
    lines += _budget(report, width)
    lines.append(Text())
    lines += _fragmentation(report)
    peaks = report.peaks
    if report.at.event >= 0 or report.at.kind != "end":  # without history there are no peaks
        lines.append(
            Text(
                f"peaks over {_where(report)}: requested {format_bytes(peaks['requested_bytes'])} · allocated "
                f"{format_bytes(peaks['allocated_bytes'])} · reserved {format_bytes(peaks['reserved_bytes'])}"
            )
        )
    lines += _outside(report)
    lines.append(Text())
    lines += _sites(report, width, sites)
    lost = report.attribution
    if lost.unattributed_bytes:
        lines.append(Text())
        lines.append(heading(f"unattributed {format_bytes(lost.unattributed_bytes)}"))
        lines += [Text(f"  {format_bytes(r.bytes):>10}  {r.count:>5}×  {r.reason}") for r in lost.unattributed]
    if report.warnings:
        lines.append(Text())
        lines += warning_lines(report.warnings)
    return lines


def _where(report: Report) -> str:
    if report.window is None:
        return "the recording"
    first, stop = report.window
    return f"events {format_count(first)} to {format_count(stop - 1)}"


def _head(report: Report) -> list[Text]:
    moment = report.moment
    parts = [moment_name(report.at)]
    if moment.step is not None:
        parts.append(f"step {moment.step}")
    if moment.phase != "unknown":
        parts.append(moment.phase)
    head = Text.assemble((PurePath(report.file).name, "bold"), f" · GPU {report.device} · ", (", ".join(parts), "bold"))
    asked = report.fragmentation.asked_bytes
    total = f"{format_bytes(report.reserved_bytes)} reserved, {format_bytes(report.allocated_bytes)} allocated"
    if asked is not None:
        total = f"asked for {format_bytes(asked)} more; {total}"
    return [head, Text(total)]


def _title(report: Report, category: str) -> str:
    """What people call a category: without adapters, the key ``lora`` holds whatever is trained."""
    return report.lora["meaning"] if category == Category.LORA and report.lora["meaning"] == "trained" else category


def _budget(report: Report, width: int) -> list[Text]:
    reserved = max(report.reserved_bytes, 1)
    room = max(10, min(40, width - 40))
    largest = max(report.categories.values(), default=1) or 1
    lines = []
    for name, size in report.categories.items():
        if name == Category.UNATTRIBUTED and not size:
            continue
        lines.append(
            Text.assemble(
                (f"  {_title(report, name):<16}", f"bold {STYLE[name]}"),
                f"{format_bytes(size):>11}  {size / reserved:6.1%}  ",
                (bar(size / largest, room), STYLE[name]),
            )
        )
        subs = [(k.split("/")[1], v) for k, v in report.subcategories.items() if k.startswith(name + "/")]
        shown = [(sub, part) for sub, part in subs if part >= _SMALL_SHARE * reserved]
        if len(subs) > 1 or (shown and shown[0][0] != name):
            lines += [Text(f"    {sub:<18}{format_bytes(part):>11}", style="dim") for sub, part in shown]
            rest = sum(part for _, part in subs) - sum(part for _, part in shown)
            if shown and rest > size * _SMALL_REST:
                lines.append(Text(f"    {'other':<18}{format_bytes(rest):>11}", style="dim"))
    share = f"{1:6.1%}" if report.reserved_bytes else ""
    lines.append(Text(f"  {'reserved':<16}{format_bytes(report.reserved_bytes):>11}  {share}", style="bold"))
    return lines


def _fragmentation(report: Report) -> list[Text]:
    f = report.fragmentation
    if f.asked_bytes is None or not f.total_bytes:
        return []
    free = f.holes_bytes + f.cached_segments_bytes
    return [
        Text(
            f"free inside reserved memory: {format_bytes(free)} in {counted(f.free_block_count, 'block')}, "
            f"the largest {format_bytes(f.largest_free_block_bytes)}"
        )
    ]


def _outside(report: Report) -> list[Text]:
    outside = report.outside_allocator
    if outside is None:
        return []
    names = {
        "device_total_bytes": "device total",
        "device_used_bytes": "in use on the device",
        "not_this_allocator_bytes": "of it outside this allocator",
        "device_free_bytes": "free on the device",
        "limit_bytes": "limit of this process",
    }
    known = [f"{label} {format_bytes(size)}" for key, label in names.items() if (size := outside.get(key)) is not None]
    lines = [Text(" · ".join(known))]
    asked, free = report.fragmentation.asked_bytes, outside.get("device_free_bytes")
    if asked is not None and free is not None and free > asked and outside.get("limit_bytes") is None:
        lines.append(Text("the card had room, so a limit of this process refused the request, or the driver did"))
    return lines


def _sites(report: Report, width: int, count: int) -> list[Text]:
    if not report.top:
        return []
    lines = [heading("biggest call sites")]
    for site in report.top[:count]:
        kind = f"{_title(report, site.category)}/{site.subcategory}"
        head = f"  {format_bytes(site.bytes):>10} {site.count:>6}×  "
        module = f"{site.module}: " if site.module else ""
        room = max(20, width - len(head) - 30) - len(module)
        place = module + clip(site.frame or NO_STACK, room, keep_end=True)
        lines.append(Text.assemble(head, (f"{kind:<30}", STYLE[site.category]), place))
    rest = report.top[count:]
    if rest:
        lines.append(
            Text(f"  {format_bytes(sum(s.bytes for s in rest)):>10}          in {len(rest)} more", style="dim")
        )
    return lines
