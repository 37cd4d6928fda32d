"""Fragmentation as text."""

from __future__ import annotations

from rich.text import Text

from memtrace.answers.fragmentation import Fragmentation
from memtrace.answers.pins import Pins
from memtrace.attribution.sites import NO_STACK
from memtrace.render.text import columns, heading
from memtrace.render.words import STYLE, bar, clip, moment_name, pool_name, stream_name
from memtrace.units import counted, format_bytes, format_count

_SEGMENTS = 8
_PINS = 2
_HOLDERS = 5


def render_fragmentation(f: Fragmentation, pinned: Pins | None = None, width: int = 80) -> list[Text]:
    """Kinds with bars, the verdict on the failing request, pools, and the segments whose holes are largest."""
    lines = [
        Text.assemble((moment_name(f.at), "bold"), f": {format_bytes(f.reserved_bytes)} reserved,"),
        Text(
            f"{format_bytes(f.total_bytes)} of it in nobody's hands; utilisation {f.utilisation:.1%} here, "
            f"{f.peak_utilisation:.1%} at the peaks"
        ),
        Text(),
    ]
    kinds = (
        ("rounding", f.rounding_bytes, "requests rounded up to whole blocks"),
        ("unsplit tails", f.unsplit_tail_bytes, "rests of blocks too small to split off"),
        ("holes", f.holes_bytes, "free blocks in segments partly in use"),
        ("cached segments", f.cached_segments_bytes, "wholly free, kept for reuse"),
        ("pending frees", f.pending_free_bytes, "freed, but another stream may still use them"),
    )
    largest = max((size for _, size, _ in kinds), default=1) or 1
    for name, size, meaning in kinds:
        lines.append(
            Text.assemble(
                f"  {name:<16}{format_bytes(size):>11}  ", (f"{bar(size / largest, 16):<16}", "red"), f"  {meaning}"
            )
        )
    lines.append(Text())
    lines.append(
        Text(
            f"{counted(f.free_block_count, 'free block')}, the largest {format_bytes(f.largest_free_block_bytes)}"
            + (f"; the refused request asked for {format_bytes(f.asked_bytes)}" if f.asked_bytes is not None else "")
        )
    )
    lines.append(Text())
    lines += _pools(f)
    if f.pinned_segments:
        lines.append(Text())
        lines += _segments(f, width)
    if pinned is not None and pinned.pinned_free_bytes:
        lines += [Text(), *_pins(pinned, width)]
    return lines


def _pins(pinned: Pins, width: int) -> list[Text]:
    """Who alone holds the holes, what only pins, and what would have to go for whole segments to come back."""
    lines = [heading("who alone keeps free bytes from being given back")]
    for holder in pinned.held_by[:_HOLDERS]:
        what = (
            holder.category if holder.subcategory is None else f"{holder.category}/{holder.subcategory} {holder.frame}"
        )
        told = f"  {format_bytes(holder.free_bytes):>11}  in {counted(holder.segments, 'segment')}: {what}"
        lines.append(Text(clip(told, width)))
    if pinned.evictable:
        free = {one.segment: one.segment_free_bytes for one in pinned.evictable}
        size = sum(one.block_bytes for one in pinned.evictable)
        lines.append(
            Text(f"{counted(len(pinned.evictable), 'allocation')} of {format_bytes(size)} only pin: without them "
                 f"{format_bytes(sum(free.values()))} would be free in {counted(len(free), 'whole segment')}")
        )  # fmt: skip
    clearing = pinned.clearing
    if clearing.segments:
        back, gone = format_bytes(clearing.given_back_bytes), format_bytes(clearing.must_go_bytes)
        what = f"{counted(len(clearing.segments), 'segment')} ({back}) for {gone}"
        lines.append(Text(f"best trade: {what} of {counted(len(clearing.sites), 'call site')}"))
        lines += [Text(clip(f"    {site}", width), style="dim") for site in clearing.sites[:_PINS]]
    return lines


def _pools(f: Fragmentation) -> list[Text]:
    rows = [("pool and stream", "kind", "reserved", "allocated", "free", "largest free block")]
    rows += [
        (
            f"{pool_name(pool.pool)}, {stream_name(pool.stream)}", pool.kind, format_bytes(pool.reserved_bytes),
            format_bytes(pool.allocated_bytes), format_bytes(pool.free_bytes),
            format_bytes(pool.largest_free_block_bytes),
        )
        for pool in f.by_pool
    ]  # fmt: skip
    head, *rest = columns(rows, (False, False, True, True, True, True))
    return [heading("  " + head), *(Text("  " + line) for line in rest)]


def _segments(f: Fragmentation, width: int) -> list[Text]:
    lines = [heading(f"segments with pinned free space ({format_count(len(f.pinned_segments))}, largest holes first)")]
    for segment in f.pinned_segments[:_SEGMENTS]:
        lines.append(
            Text(
                f"  0x{segment.address:x}  {format_bytes(segment.free_bytes)} free of "
                f"{format_bytes(segment.total_bytes)}, pinned by"
            )
        )
        for pin in segment.pinned_by[:_PINS]:
            head = f"      {format_bytes(pin.bytes):>10}  "
            kind = f"{pin.category}/{pin.subcategory}"
            place = pin.frame or NO_STACK
            lines.append(
                Text.assemble(head, (f"{kind:<30}", STYLE[pin.category]), clip(place, max(20, width - len(head) - 30)))
            )
        rest = segment.pinned_by[_PINS:]
        if rest:
            lines.append(
                Text(f"      {format_bytes(sum(p.bytes for p in rest)):>10}  in {len(rest)} more", style="dim")
            )
    return lines
