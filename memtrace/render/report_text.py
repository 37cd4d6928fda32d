"""The budget as text, and the decisions behind it (``--why``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from memtrace.answers.outside import OWNERS
from memtrace.answers.report import Report
from memtrace.attribution.categories import Category, category_name
from memtrace.attribution.sites import NO_STACK
from memtrace.render.text import Text, heading, more_line, warning_lines
from memtrace.render.words import STYLE, bar, clip, moment_line, moment_name
from memtrace.units import counted, format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.answers.why import Why

_STACK_LINES = 6
_SMALL_SHARE = 0.001
_SMALL_REST = 0.005  # what is left of a category is named where its parts would not seem to add up


def render_report(report: Report, width: int = 80, sites: int = 8) -> Iterator[Text]:
    """The budget as lines of at most about ``width`` characters."""
    yield from _head(report)
    yield Text()
    yield from _budget(report, width)
    yield Text()
    yield from _fragmentation(report)
    if report.at.event >= 0 or report.at.kind != "end":  # without history there are no peaks
        levels = (f"{key.removesuffix('_bytes')} {format_bytes(size)}" for key, size in report.peaks.items())
        where = "the recording"
        if report.window is not None:
            where = f"events {format_count(report.window[0])} to {format_count(report.window[1] - 1)}"
        yield Text(f"peaks over {where}: {' · '.join(levels)}")
    yield from _outside(report)
    yield Text()
    yield from _sites(report, width, sites)
    lost = report.attribution
    if lost.unattributed_bytes:
        yield Text()
        yield heading(f"unattributed {format_bytes(lost.unattributed_bytes)}")
        for reason in lost.unattributed:
            yield Text(f"  {format_bytes(reason.bytes):>10}  {reason.count:>5}×  {reason.reason}")
    if report.warnings:
        yield Text()
        yield from warning_lines(report.warnings)


def _head(report: Report) -> list[Text]:
    head = Text.assemble(
        (PurePath(report.file).name, "bold"), f" · {report.device_name} · ", (moment_line(report), "bold")
    )
    asked = report.fragmentation.asked_bytes
    total = f"{format_bytes(report.reserved_bytes)} reserved, {format_bytes(report.allocated_bytes)} allocated"
    if asked is not None:
        total = f"asked for {format_bytes(asked)} more; {total}"
    return [head, Text(total)]


def _budget(report: Report, width: int) -> Iterator[Text]:
    reserved = max(report.reserved_bytes, 1)
    room = max(10, min(40, width - 40))
    largest = max(report.categories.values(), default=1) or 1
    for name, size in report.categories.items():
        if name == Category.UNATTRIBUTED and not size:
            continue
        yield Text.assemble(
            (f"  {category_name(name, report.lora['meaning']):<16}", f"bold {STYLE[name]}"),
            f"{format_bytes(size):>11}  {size / reserved:6.1%}  ",
            (bar(size / largest, room), STYLE[name]),
        )
        subs = [(k.split("/")[1], v) for k, v in report.subcategories.items() if k.startswith(name + "/")]
        shown = [(sub, part) for sub, part in subs if part >= _SMALL_SHARE * reserved]
        if len(subs) > 1 or (shown and shown[0][0] != name):
            rest = sum(part for _, part in subs) - sum(part for _, part in shown)
            for sub, part in [*shown, *([("other", rest)] if shown and rest > size * _SMALL_REST else [])]:
                yield Text(f"    {sub:<18}{format_bytes(part):>11}", style="dim")
    share = f"{1:6.1%}" if report.reserved_bytes else ""
    yield Text(f"  {'reserved':<16}{format_bytes(report.reserved_bytes):>11}  {share}", style="bold")


def _fragmentation(report: Report) -> Iterator[Text]:
    f = report.fragmentation
    if f.asked_bytes is not None and f.total_bytes:
        free = f"{format_bytes(f.holes_bytes + f.cached_segments_bytes)} in {counted(f.free_block_count, 'block')}"
        yield Text(f"free inside reserved memory: {free}, the largest {format_bytes(f.largest_free_block_bytes)}")


def _outside(report: Report) -> Iterator[Text]:
    outside = report.outside_allocator
    if outside is None:
        return
    names = {
        "device_total_bytes": "device total",
        "device_used_bytes": "in use on the device",
        "not_this_allocator_bytes": "of it outside this allocator",
        "device_free_bytes": "free on the device",
        "limit_bytes": "limit of this process",
    }
    known = [f"{label} {format_bytes(size)}" for key, label in names.items() if (size := outside.get(key)) is not None]
    yield Text(" · ".join(known))
    rows = [row for row in outside.get("rows", ()) if row["bytes"]]
    if rows:
        yield Text(
            f"outside this allocator when the file was written, {format_bytes(sum(row['bytes'] for row in rows))}:"
        )
        for row in rows:
            yield Text(f"  {format_bytes(row['bytes']):>10}  {OWNERS[row['owner']]}")
    if outside.get("managed_bytes"):
        managed = format_bytes(outside["managed_bytes"])
        yield Text(f"  {managed:>10}  of optimizer states in managed memory, which moves between card and host")
    asked, free = report.fragmentation.asked_bytes, outside.get("device_free_bytes")
    if asked is not None and free is not None and free > asked and outside.get("limit_bytes") is None:
        yield Text("the card had room, so a limit of this process refused the request, or the driver did")


def _sites(report: Report, width: int, count: int) -> Iterator[Text]:
    if not report.top:
        return
    yield heading("biggest call sites")
    for site in report.top[:count]:
        kind = category_name(f"{site.category}/{site.subcategory}", report.lora["meaning"])
        head = f"  {format_bytes(site.bytes):>10} {site.count:>6}×  "
        module = f"{site.module}: " if site.module else ""
        room = max(20, width - len(head) - 30) - len(module)
        place = module + clip(site.frame or NO_STACK, room, keep_end=True)
        yield Text.assemble(head, (f"{kind:<30}", STYLE[site.category]), place)
    rest = report.top[count:]
    if rest:
        yield more_line(sum(site.bytes for site in rest), len(rest), gap=" " * 10)


def render_why(answer: Why, lora_meaning: str) -> Iterator[Text]:
    """What was asked, then each rule with its sentence and its largest examples. For ``lora_meaning`` see the report's
    ``lora``."""
    asked = category_name(answer.asked, lora_meaning)
    yield Text.assemble((asked, "bold"), f": {answer.meaning} ({moment_name(answer.at)})")
    for decision in answer.decisions:
        yield Text()
        yield Text.assemble(
            (f"{format_bytes(decision.bytes)} in {format_count(decision.count)}", "bold"),
            " → ",
            (category_name(f"{decision.category}/{decision.subcategory}", lora_meaning), STYLE[decision.category]),
            f"  [{decision.evidence}: rule {decision.rule}]",
        )
        yield Text(f"  {decision.why}")
        for example in decision.examples:
            yield from (Text(line, style="dim") for line in _example(example))


def _example(example: Mapping[str, Any]) -> Iterator[str]:
    made = "before the recording" if example["alloc_event"] is None else f"event {example['alloc_event']}"
    if example["made_in"] not in (None, "unknown"):
        made += f" ({example['made_in']}" + (f", step {example['step']})" if example["step"] is not None else ")")
    freed = "never" if example["free_event"] is None else f"event {example['free_event']} ({example['freed_in']})"
    size = format_bytes(example["requested_bytes"])
    yield f"  e.g. 0x{example['address']:x}, {size}: made {made}, freed {freed}"
    stack = example["stack"]
    yield from (f"       {frame}" for frame in stack[:_STACK_LINES])
    if len(stack) > _STACK_LINES:
        yield f"       … {len(stack) - _STACK_LINES} more frames"
