"""Everything known about one block, segment, allocation, frame or range of addresses, as lines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.answers.fragmentation import pool_name as segment_pool
from memtrace.attribution.categories import Evidence, category_name
from memtrace.attribution.reasons import reason
from memtrace.attribution.sites import frame_label
from memtrace.history.layout import Layout, State
from memtrace.history.timeline import Timeline
from memtrace.render.words import clip, pool_name, short_name, stream_name
from memtrace.snapshot.model import I8
from memtrace.units import counted, format_bytes, format_count, printable
from memtrace_tui.data.layers import layer_of_rows
from memtrace_tui.data.lines import BLANK, Goto, Line, Span, indented, line, wrap
from memtrace_tui.data.query import exactly, site_words
from memtrace_tui.data.source import is_library, source_lines
from memtrace_tui.provider import Provider

LABEL_WIDTH = 10


def span_of(timeline: Timeline, row: int) -> tuple[int, int]:
    """The addresses of an allocation's block: the first, and the one behind the last."""
    start = int(timeline.allocations.address[row])
    return start, start + max(int(timeline.allocations.block_bytes[row]), 1)


def freed_at(timeline: Timeline, row: int) -> int:
    """The event in which the program gave an allocation up; -1 if it never did."""
    table = timeline.allocations
    asked = int(table.free_requested_event[row])
    return asked if asked >= 0 else int(table.free_completed_event[row])


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a hole: ``last`` (-1: nobody was ever there) is its last owner, gone at event ``freed``.

    ``split`` is the allocation that took the front of a larger free piece, and left the hole, where that came later
    than the last free; -1 where a free made the hole.
    """

    last: int
    freed: int
    split: int


def origin(provider: Provider, layout: Layout, block: int) -> Origin:
    """How the free block of a layout came to be what it is.

    The allocator takes the front of a free piece and leaves the rest; a freed piece joins with free neighbours. So the
    later of two events made the hole: the last free inside it, or the birth of the block before it.
    """
    table, start = provider.timeline.allocations, int(layout.block_address[block])
    rows = provider.tenants(start, start + int(layout.block_bytes[block]))
    rows = rows[table.free_completed_event[rows] >= 0]
    freed = table.free_completed_event[rows]
    rows, freed = rows[freed <= layout.event], freed[freed <= layout.event]
    last, when = (int(rows[freed.argmax()]), int(freed.max())) if len(rows) else (-1, -1)
    row = int(layout.row[block - 1]) if block > int(layout.first_block[layout.segment[block]]) else -1
    return Origin(last, when, row if row >= 0 and int(table.alloc_event[row]) > when else -1)


def field(label: str, *spans: Span | str, target: Goto | None = None) -> Line:
    """``label     value``."""
    return line((f"{label:<{LABEL_WIDTH - 1}} ", "dim"), *spans, target=target)


def purpose_text(category: str, subcategory: str, meaning: str) -> str:
    """``base weights/params``; ``meaning``: the report's, of the category ``lora``."""
    return category_name(f"{category}/{subcategory}", meaning).replace("_", " ")


def event_text(provider: Provider, event: int) -> str:
    """``412,156 · step 17 backward``; words for what lies outside the recording."""
    if event < 0:
        return "before the recording"
    return f"{format_count(event)} · {moment_text(provider, event)}"


def moment_text(provider: Provider, event: int) -> str:
    """``step 17 backward``, ``load``."""
    moment = provider.moment(event)
    return moment.phase if moment.step is None else f"step {moment.step} {moment.phase}"


def allocation_lines(provider: Provider, row: int, event: int, width: int, fold: bool = True) -> list[Line]:
    """One row of the allocation table: purpose and why, sizes, life, place, stack, and the stack of its free."""
    timeline, attribution = provider.timeline, provider.analysis.attribution
    table, rule = timeline.allocations, attribution.rules[int(attribution.rule[row])]
    asked, block, address = int(table.requested_bytes[row]), int(table.block_bytes[row]), int(table.address[row])
    born, died, gone = int(table.alloc_event[row]), int(attribution.facts.died[row]), freed_at(timeline, row)
    stack = int(table.stack[row])
    module = attribution.sites.module[stack] if stack >= 0 else ""
    why, meaning = reason(attribution.facts, rule, np.array([row])), attribution.lora_meaning
    here = Goto("segments", max(born, 0) if not born <= event < died else None, address=address)
    lines = [
        field("purpose", provider.purpose(row), target=Goto(
            "allocations", filter=site_words(category_name(rule.category, meaning), rule.subcategory))),
        *site_line(provider, "made at", stack, width),
        *wrap([(f"{'because':<{LABEL_WIDTH}}", "dim"), (f"{why} ({rule.evidence}; rule {rule.id})", "text")],
              width, LABEL_WIDTH),
        field("asked for", (format_bytes(asked), "strong"), (f"  {format_count(asked)} B", "dim")),
        field("block", format_bytes(block), (f"  {format_count(block - asked)} B unused", "dim")),
        field("address", f"{address:#x}", ("  on the map", "dim"), target=here),
        history_line(provider, address, block),
        field("born", event_text(provider, born), target=Goto("", born) if born >= 0 else None),
        field("freed", event_text(provider, gone) if gone >= 0 else "never in this recording",
              target=Goto("", gone) if gone >= 0 else None),
    ]  # fmt: skip
    if born >= 0:
        end = died if gone >= 0 else max(event, born)
        start_s, end_s = provider.seconds(born), provider.seconds(end)
        life = f"{format_count(end - born)} events"
        if start_s is not None and end_s is not None:
            life += f", {end_s - start_s:.{6 if end_s - start_s < 0.01 else 3}f} s"
        lines.append(field("lived" if gone >= 0 else "age", life))
    layer = int(layer_of_rows(provider)[row])
    if layer >= 0:
        basis = "by its name" if rule.evidence == Evidence.LABEL else "by the order of calls"
        lines.append(
            field("layer", str(layer), (f"  {basis}", "dim"), target=Goto("allocations", filter=f"layer:{layer}"))
        )
    if module:
        lines.append(field("module", module, target=Goto("allocations", filter=f"module:/^{exactly(module)}$/")))
    lines += [BLANK, *stack_lines(provider, stack, width, fold)]
    return [*lines, *freed_by(provider, gone, stack, width, fold)]


def event_lines(provider: Provider, event: int, row: int, width: int, fold: bool = True) -> list[Line]:
    """What an event was about: its row of the allocation table, or, where it has none (-1), its stack."""
    if row >= 0:
        return allocation_lines(provider, row, event, width, fold)
    trace = provider.timeline.trace
    free = trace.oom_device_free_bytes.get(event)
    lines = [] if free is None else [field("free", format_bytes(free), ("  on the device", "dim"))]
    return [*lines, BLANK, *stack_lines(provider, int(trace.stack[event]), width, fold)]


def history_line(provider: Provider, start: int, size: int) -> Line:
    """How many allocations there ever were in a range of addresses; opens the list of them."""
    others = len(provider.tenants(start, start + size))
    return field("history", counted(others, "owner"), ("  (h)", "dim"),
                 target=Goto(history=(start, start + size)))  # fmt: skip


def freed_by(provider: Provider, event: int, born_in: int, width: int, fold: bool = True) -> list[Line]:
    """The stack of a free, where the file has one that is not the allocation's own."""
    stack = _stack_of_free(provider, event, born_in)
    return [BLANK, line(("freed by", "title")), *stack_lines(provider, stack, width, fold)] if stack >= 0 else []


def _stack_of_free(provider: Provider, event: int, born_in: int) -> int:
    stack = int(provider.timeline.trace.stack[event]) if event >= 0 else -1
    return -1 if stack == born_in else stack


def history_lines(provider: Provider, start: int, stop: int, event: int, width: int, most: int = 400) -> list[Line]:
    """Every tenant of a range of addresses: those up to an event, the last first, then the later ones in their order.
    Of each when, what, from where; Enter goes to its birth."""
    timeline = provider.timeline
    table, rows = timeline.allocations, provider.tenants(start, stop)
    later = table.alloc_event[rows] > event
    rows = np.concatenate([rows[~later], rows[later][::-1]])
    lines = [line((f"{start:#x}", "title"), (f" to {stop:#x}, {format_bytes(stop - start)}: ", "dim"),
                  (counted(len(rows), "owner"), "strong"), (", the last first", "dim"))]  # fmt: skip
    for number, row in enumerate(rows[:most].tolist()):
        if number == len(rows) - int(later.sum()):
            lines.append(line((f"after the cursor, event {format_count(event)}, in their order", "title")))
        born, gone = int(table.alloc_event[row]), freed_at(timeline, row)
        life = f"{event_text(provider, born)}  to  {event_text(provider, gone) if gone >= 0 else 'never freed'}"
        lines.append(line((clip(life, width), "text"), target=Goto("segments", max(born, 0), address=start)))
        offset = int(table.address[row]) - start
        place = f"{'-' if offset < 0 else '+'}{format_bytes(abs(offset))}"
        lines += indented(summary_lines(provider, row, place, width - 2), 2)
    if len(rows) > most:
        lines.append(line((f"and {format_count(len(rows) - most)} more", "dim")))
    return lines


def frame_lines(provider: Provider, frame: int, rows: I8, width: int) -> list[Line]:
    """A frame: its whole path, what was allocated through it, and its source where the file is on this machine."""
    stacks = provider.timeline.snapshot.stacks
    found = stacks.frames[frame]
    through = {stack for stack in range(len(stacks)) if frame in stacks.frame_ids(stack)}
    table = provider.timeline.allocations
    mine = rows[np.isin(table.stack[rows], list(through))]
    label = printable(frame_label(found))
    size = format_bytes(int(table.requested_bytes[mine].sum()))
    return [
        *wrap([(printable(f"{found.filename}:{found.line}"), "title")], width),
        *wrap([(printable(found.name), "strong")], width),
        line((f"{counted(len(mine), 'allocation')} live through it, ", "text"), (size, "strong"),
             target=Goto("allocations", filter=f"stack:/{exactly(label)}/")),
        BLANK,
        *(source_lines(found, 15) or [line(("the file is not on this machine", "dim"))]),
    ]  # fmt: skip


def stack_lines(provider: Provider, stack: int, width: int, fold: bool = True) -> list[Line]:
    """The frames, innermost first; with ``fold``, runs of library plumbing are one line. Enter on a frame opens it."""
    stacks = provider.timeline.snapshot.stacks
    ids = stacks.frame_ids(stack).tolist() if stack >= 0 else []
    if not ids:
        return [line(("no stack was recorded", "dim"))]
    lines: list[Line] = []
    hidden = 0
    for number in [*ids, -1]:
        if number >= 0 and fold and is_library(stacks.frames[number]):
            hidden += 1
            continue
        if hidden:
            lines.append(line((f"  ⋯ {counted(hidden, 'library frame')} (f shows them)", "dim")))
            hidden = 0
        if number >= 0:
            place, _, name = printable(frame_label(stacks.frames[number])).partition(" ")
            first, *rest = wrap([(name, "strong"), ("  " + place, "dim")], width, 2)
            lines += [Line(first.spans, Goto(frame=number)), *rest]
    return lines


def block_lines(provider: Provider, layout: Layout, block: int, width: int, fold: bool = True) -> list[Line]:
    """The block of a layout: its allocation, or what is known of a hole."""
    segment = int(layout.segment[block])
    first, end = int(layout.first_block[segment]), int(layout.first_block[segment + 1])
    place = line((f"block {block - first + 1} of {end - first}", "title"),
                 (f"  in segment {int(layout.address[segment]):#x}", "dim"))  # fmt: skip
    row = int(layout.row[block])
    if row >= 0:
        pending = int(layout.block_state[block]) == State.PENDING_FREE
        note = [line(("freed, but a stream may still use it", "warn"))] if pending else []
        return [place, *note, *allocation_lines(provider, row, layout.event, width, fold)]
    size, address = int(layout.block_bytes[block]), int(layout.block_address[block])
    where = f", {pool_name(segment_pool(layout, segment))}, {stream_name(int(layout.stream[segment]))}"
    lines = [
        *wrap([*place.spans, (where, "dim")], width, 2),
        *wrap(
            [("free ", "bad"), (format_bytes(size), "strong"), (f"  {format_count(size)} B  at {address:#x}", "dim")],
            width,
            2,
        ),
    ]
    timeline, found = provider.timeline, origin(provider, layout, block)
    gone = freed_at(timeline, found.last) if found.last >= 0 else -1
    if gone >= 0:
        lines += [
            *summary_lines(provider, found.last, "last was", width),
            field("freed", event_text(provider, gone), target=Goto("", gone)),
            *(
                site_line(provider, "freed by", _stack_of_free(provider, gone, -1), width)
                or [field("freed by", ("no stack was recorded", "dim"))]
            ),
        ]
    else:
        lines.append(line(("nobody was here before, as far as the recording shows", "dim")))
    if size == int(layout.total_bytes[segment]):
        text = "The whole segment is free: it is kept for reuse and can be given back."
        lines += wrap([(text, "text")], width)
    else:
        for neighbour, where in ((block - 1, "before it"), (block + 1, "after it")):
            row = int(layout.row[neighbour]) if first <= neighbour < end else -1
            goto = Goto("segments", address=int(layout.block_address[neighbour])) if row >= 0 else None
            known = row >= 0
            lines += summary_lines(provider, row, where, width, goto) if known else [field(where, "the segment's edge")]
    if found.split >= 0:
        born = int(timeline.allocations.alloc_event[found.split])
        text = f"a larger free piece was split for the block before it, event {event_text(provider, born)}"
        lines += [Line(each.spans, Goto("", born)) for each in wrap([("made when ", "dim"), (text, "text")], width, 2)]
    lines.append(history_line(provider, address, size))
    return [*lines, *freed_by(provider, gone, -1, width, fold)]


def site_line(provider: Provider, label: str, stack: int, width: int) -> list[Line]:
    """The line of the program's code that a stack stands for, if it has one; Enter opens the frame."""
    frame = provider.analysis.attribution.sites.frame[stack] if stack >= 0 else -1
    where = clip(provider.sites[stack], max(width - LABEL_WIDTH, 12), keep_end=True)
    return [field(label, where, target=Goto(frame=frame))] if frame >= 0 else []


def summary_lines(provider: Provider, row: int, label: str, width: int, target: Goto | None = None) -> list[Line]:
    """Two lines on an allocation: size and purpose, site."""
    size, where = int(provider.timeline.allocations.block_bytes[row]), provider.site(row) or "no stack recorded"
    return [
        field(label, (format_bytes(size), "strong"), " ", provider.purpose(row), target=target),
        field("", (clip(where, max(width - LABEL_WIDTH, 12), keep_end=True), "dim")),
    ]


def segment_lines(provider: Provider, layout: Layout, segment: int, width: int, pins: int = 12) -> list[Line]:
    """A segment: sizes, and what is live in it, as ``memtrace fragmentation`` measures it."""
    address, total = int(layout.address[segment]), int(layout.total_bytes[segment])
    blocks = slice(int(layout.first_block[segment]), int(layout.first_block[segment + 1]))
    holes = layout.block_bytes[blocks][layout.block_state[blocks] == State.FREE]
    free = int(holes.sum())
    kind = "expandable, " if layout.is_expandable[segment] else ""
    where = f"  {kind}{pool_name(segment_pool(layout, segment))}, {stream_name(int(layout.stream[segment]))}"
    sizes: list[Span] = [
        (format_bytes(total), "strong"), (f" in {format_count(blocks.stop - blocks.start)} blocks, ", "dim"),
        (format_bytes(free), "bad" if free else "strong"),
        (f" free ({free / total:.1%}) in {counted(len(holes), 'piece')}, largest ", "dim"),
        (format_bytes(int(holes.max(initial=0))), "strong"),
    ]  # fmt: skip
    lines = [*wrap([(f"segment {address:#x}", "title"), (where, "dim")], width, 2), *wrap(sizes, width)]
    segments = provider.report(layout.event).fragmentation.pinned_segments
    pinned = next((each for each in segments if each.address == address), None)
    if pinned is None:
        what = "Wholly free: kept for reuse, can be given back." if free == total else "Full: no hole in it."
        return [*lines, *wrap([(what, "dim")], width)]
    lines.append(line(("pinned by", "title"), (clip("  what keeps it reserved", width - 9), "dim")))
    shown, meaning = pinned.pinned_by[:pins], provider.analysis.attribution.lora_meaning
    purposes = [purpose_text(pin.category, pin.subcategory, meaning) for pin in shown]
    if max(map(len, purposes), default=0) > width - 32:
        purposes = [purpose_text(short_name(pin.category, meaning), pin.subcategory, meaning) for pin in shown]
    column = min(max(map(len, purposes), default=0), max(width - 22, 12))
    for pin, purpose in zip(shown, purposes, strict=True):
        where = printable(pin.frame) or "no stack"
        words = site_words(category_name(pin.category, meaning), pin.subcategory, pin.frame or "")
        lines.append(line((f"{format_bytes(pin.bytes):>10} ", "strong"),
                          (f"{clip(purpose, column):<{column}} ", f"cat:{pin.category}"),
                          (clip(where, max(width - 12 - column, 10), keep_end=True), "dim"),
                          target=Goto("allocations", filter=words)))  # fmt: skip
    if len(pinned.pinned_by) > pins:
        lines.append(line((f"           and {len(pinned.pinned_by) - pins} more purposes", "dim")))
    return lines
