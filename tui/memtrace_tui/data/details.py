"""Everything known about one block, segment or allocation, as lines."""

from __future__ import annotations

from memtrace.answers.fragmentation import pool_name
from memtrace.attribution.classify import unattributed_reason
from memtrace.attribution.facts import Facts
from memtrace.attribution.phases import Phase
from memtrace.attribution.sites import frame_label
from memtrace.history.layout import Layout, State
from memtrace.render.words import MARKS, clip
from memtrace.units import format_bytes, format_count, printable
from memtrace_tui.data.goto import Goto
from memtrace_tui.data.lines import BLANK, Line, Span, line, wrap
from memtrace_tui.data.source import is_library
from memtrace_tui.provider import Provider

LABEL_WIDTH = 10


def field(label: str, *spans: Span | str, target: Goto | None = None) -> Line:
    """``label     value``."""
    return line((f"{label:<{LABEL_WIDTH}}", "dim"), *spans, target=target)


def category_role(category: str) -> str:
    """Role of a category's colour."""
    return f"cat:{category}"


def event_text(provider: Provider, event: int) -> str:
    """``412,156 · step 17 backward``; words for what lies outside the recording."""
    if event < 0:
        return "before the recording"
    return f"{format_count(event)} · {moment_text(provider, event)}"


def name_of(provider: Provider, event: int) -> str:
    """``at the OOM, event 78,566``; ``after event 12`` where nothing special happened."""
    names = {
        "oom": "at the OOM",
        "peak": "at the peak",
        "reserved-peak": "at the peak of reserved",
        "end": "at the end",
    }
    name = names.get(provider.at(event).kind)
    if event < 0:
        return "before the recording"
    return f"{name}, event {format_count(event)}" if name else f"after event {format_count(event)}"


def moment_text(provider: Provider, event: int) -> str:
    """``step 17 backward``, ``load``."""
    moment = provider.moment(event)
    return moment.phase if moment.step is None else f"step {moment.step} {moment.phase}"


def allocation_lines(provider: Provider, row: int, event: int, width: int, fold: bool = True) -> list[Line]:
    """One row of the allocation table: purpose and why, sizes, life, place, stack."""
    table, attribution = provider.timeline.allocations, provider.analysis.attribution
    rule = attribution.rules[int(attribution.rule[row])]
    asked, block = int(table.requested_bytes[row]), int(table.block_bytes[row])
    born, died = int(table.alloc_event[row]), int(attribution.facts.died[row])
    ever_freed = int(table.free_completed_event[row]) >= 0 or int(table.free_requested_event[row]) >= 0
    stack = int(table.stack[row])
    module = attribution.sites.module[stack] if stack >= 0 else ""
    why = rule.why
    if rule.id == "none":
        why = unattributed_reason(attribution.facts, row)
    lines = [
        field("purpose", (f"{rule.category}/{rule.subcategory}", category_role(rule.category))),
        *wrap([(f"{'because':<{LABEL_WIDTH}}", "dim"), (f"{why} ({rule.evidence}; rule {rule.id})", "text")],
              width, LABEL_WIDTH),
        field("asked for", (format_bytes(asked), "strong"), (f"  {format_count(asked)} B", "dim")),
        field("block", format_bytes(block), (f"  {format_count(block - asked)} B unused", "dim")),
        field("address", f"{int(table.address[row]):#x}"),
        field("born", event_text(provider, born), target=Goto("", born) if born >= 0 else None),
        field("freed", event_text(provider, died) if ever_freed else "never in this recording",
              target=Goto("", died) if ever_freed else None),
    ]  # fmt: skip
    if ever_freed and born >= 0:
        lines.append(field("lived", _life(provider, born, died)))
    elif born >= 0:
        lines.append(field("age", _life(provider, born, max(event, born))))
    if module:
        lines.append(field("module", module))
    return [*lines, BLANK, *stack_lines(provider, stack, width, fold)]


def _life(provider: Provider, born: int, died: int) -> str:
    text = f"{format_count(died - born)} events"
    start, end = provider.seconds(born), provider.seconds(died)
    if start is not None and end is not None:
        text += f", {end - start:.6f} s" if end - start < 0.01 else f", {end - start:.3f} s"
    return text


def stack_lines(provider: Provider, stack: int, width: int, fold: bool = True) -> list[Line]:
    """The frames, innermost first; runs of library plumbing folded into one line."""
    frames = provider.timeline.snapshot.stacks.stack(stack)
    if not frames:
        return [line(("no stack was recorded", "dim"))]
    lines: list[Line] = []
    hidden = 0
    for frame in frames:
        if fold and is_library(frame):
            hidden += 1
            continue
        if hidden:
            lines.append(line((f"  ⋯ {hidden} library frames", "dim")))
            hidden = 0
        place, _, name = printable(frame_label(frame)).partition(" ")
        lines += wrap([(name, "strong"), ("  " + place, "dim")], width, 2)
    if hidden:
        lines.append(line((f"  ⋯ {hidden} library frames", "dim")))
    return lines


def block_lines(provider: Provider, layout: Layout, block: int, width: int) -> list[Line]:
    """The block of a layout: its allocation, or what is known of a hole."""
    segment = int(layout.segment[block])
    first = int(layout.first_block[segment])
    place = line((f"block {block - first + 1} of {int(layout.first_block[segment + 1]) - first}", "title"),
                 (f"  in segment {int(layout.address[segment]):#x}", "dim"))  # fmt: skip
    row = int(layout.row[block])
    if row >= 0:
        pending = int(layout.block_state[block]) == State.PENDING_FREE
        note = [line(("freed, but a stream may still use it", "warn"))] if pending else []
        return [place, *note, *allocation_lines(provider, row, layout.event, width)]
    size = int(layout.block_bytes[block])
    lines = [
        place,
        line(("free ", "bad"), (format_bytes(size), "strong"), (f"  {format_count(size)} B at ", "dim"),
             f"{int(layout.block_address[block]):#x}"),
    ]  # fmt: skip
    if size == int(layout.total_bytes[segment]):
        text = "The whole segment is free: it is kept for reuse and can be given back."
        return [*lines, *wrap([(text, "text")], width)]
    for neighbour, where in ((block - 1, "before it"), (block + 1, "after it")):
        inside = first <= neighbour < int(layout.first_block[segment + 1])
        row = int(layout.row[neighbour]) if inside else -1
        lines += summary_lines(provider, row, where, width) if row >= 0 else [field(where, "the segment's edge")]
    return lines


def summary_lines(provider: Provider, row: int, label: str, width: int) -> list[Line]:
    """Two lines on an allocation: size and purpose, site."""
    table, attribution = provider.timeline.allocations, provider.analysis.attribution
    rule = attribution.rules[int(attribution.rule[row])]
    where = printable(attribution.sites.label(int(table.stack[row]))) or "no stack recorded"
    return [
        field(label, (format_bytes(int(table.block_bytes[row])), "strong"), " ",
              (f"{rule.category}/{rule.subcategory}".replace("_", " "), category_role(rule.category))),
        field("", (clip(where, max(width - LABEL_WIDTH, 12), keep_end=True), "dim")),
    ]  # fmt: skip


def segment_lines(provider: Provider, layout: Layout, segment: int, width: int, pins: int = 12) -> list[Line]:
    """A segment: sizes, and what is live in it, as ``memtrace fragmentation`` measures it."""
    address, total = int(layout.address[segment]), int(layout.total_bytes[segment])
    blocks = slice(int(layout.first_block[segment]), int(layout.first_block[segment + 1]))
    states = layout.block_state[blocks]
    free = int(layout.block_bytes[blocks][states == State.FREE].sum())
    largest = int(layout.block_bytes[blocks][states == State.FREE].max(initial=0))
    kind = "expandable, " if layout.is_expandable[segment] else ""
    holes = int((states == State.FREE).sum())
    lines = [
        line(
            (f"segment {address:#x}", "title"),
            (f"  {kind}{pool_name(layout, segment)}, stream {int(layout.stream[segment]):#x}", "dim"),
        ),
        *wrap(
            [
                (format_bytes(total), "strong"),
                (f" in {format_count(len(states))} blocks, ", "dim"),
                (format_bytes(free), "bad" if free else "strong"),
                (f" free ({free / total:.1%}) in {holes} pieces, largest ", "dim"),
                (format_bytes(largest), "strong"),
            ],
            width,
        ),
    ]
    pinned = next(
        (p for p in provider.report(layout.event).fragmentation.pinned_segments if p.address == address), None
    )
    if pinned is None:
        what = "Wholly free: kept for reuse, can be given back." if free == total else "Full: no hole in it."
        return [*lines, *wrap([(what, "dim")], width)]
    lines.append(line(("pinned by", "title"), (clip("  what keeps it reserved", width - 9), "dim")))
    shown = pinned.pinned_by[:pins]
    purposes = [f"{pin.category}/{pin.subcategory}".replace("_", " ") for pin in shown]
    if max(map(len, purposes), default=0) > width - 32:
        purposes = [f"{MARKS[pin.category].short}/{pin.subcategory}".replace("_", " ") for pin in shown]
    column = min(max(map(len, purposes), default=0), max(width - 22, 12))
    for pin, purpose in zip(shown, purposes, strict=True):
        where = printable(pin.frame) or "no stack recorded"
        lines.append(line((f"{format_bytes(pin.bytes):>10} ", "strong"),
                          (f"{clip(purpose, column):<{column}} ", category_role(pin.category)),
                          (clip(where, max(width - 12 - column, 10), keep_end=True), "dim")))  # fmt: skip
    if len(pinned.pinned_by) > pins:
        lines.append(line((f"           and {len(pinned.pinned_by) - pins} more purposes", "dim")))
    return lines


def born_phase(facts: Facts, row: int) -> str:
    """Label of the phase an allocation was made in."""
    return Phase(int(facts.phase[row])).label if facts.born[row] >= 0 else "before"
