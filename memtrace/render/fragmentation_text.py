"""Fragmentation as text."""

from __future__ import annotations

from collections.abc import Iterator

from memtrace.answers.fragmentation import Fragmentation
from memtrace.answers.pins import Pins
from memtrace.attribution.categories import category_name
from memtrace.attribution.sites import NO_STACK
from memtrace.render.text import Text, heading, more_line, table
from memtrace.render.words import STYLE, bar, clip, moment_name, pool_name, stream_name
from memtrace.units import counted, format_bytes, format_count

_SEGMENTS = 8
_PINS = 2
_HOLDERS = 5


def render_fragmentation(f: Fragmentation, meaning: str, pinned: Pins | None = None, width: int = 80) -> Iterator[Text]:
    """Kinds with bars, the verdict on the failing request, pools, and the segments whose holes are largest.

    ``meaning``: the report's, of the category ``lora``.
    """
    yield Text.assemble((moment_name(f.at), "bold"), f": {format_bytes(f.reserved_bytes)} reserved,")
    share = f"utilisation {f.utilisation:.1%} here, {f.peak_utilisation:.1%} at the peaks"
    yield Text(f"{format_bytes(f.total_bytes)} of it in nobody's hands; {share}")
    yield Text()
    kinds = (
        ("rounding", f.rounding_bytes, "requests rounded up to whole blocks"),
        ("unsplit tails", f.unsplit_tail_bytes, "rests of blocks too small to split off"),
        ("holes", f.holes_bytes, "free blocks in segments partly in use"),
        ("cached segments", f.cached_segments_bytes, "wholly free, kept for reuse"),
        ("pending frees", f.pending_free_bytes, "freed, but another stream may still use them"),
    )
    largest = max(size for _, size, _ in kinds) or 1
    for name, size, about in kinds:
        drawn = f"{bar(size / largest, 16):<16}"
        yield Text.assemble(f"  {name:<16}{format_bytes(size):>11}  ", (drawn, "red"), f"  {about}")
    yield Text()
    asked = f"; the refused request asked for {format_bytes(f.asked_bytes)}" if f.asked_bytes is not None else ""
    yield Text(
        f"{counted(f.free_block_count, 'free block')}, the largest {format_bytes(f.largest_free_block_bytes)}{asked}"
    )
    yield Text()
    yield from _pools(f)
    if f.pinned_segments:
        yield Text()
        yield from _segments(f, meaning, width)
    if pinned is not None and pinned.pinned_free_bytes:
        yield Text()
        yield from _pins(pinned, meaning, width)


def _pins(pinned: Pins, meaning: str, width: int) -> Iterator[Text]:
    """Who alone holds the holes, what only pins, and what would have to go for whole segments to come back."""
    yield heading("who alone keeps free bytes from being given back")
    for holder in pinned.held_by[:_HOLDERS]:
        what = category_name(holder.category, meaning)
        if holder.subcategory is not None:
            what += f"/{holder.subcategory} {holder.frame}"
        told = f"  {format_bytes(holder.free_bytes):>11}  in {counted(holder.segments, 'segment')}: {what}"
        yield Text(clip(told, width))
    if pinned.evictable:
        free = {one.segment: one.segment_free_bytes for one in pinned.evictable}
        size = format_bytes(sum(one.block_bytes for one in pinned.evictable))
        freed = f"{format_bytes(sum(free.values()))} would be free in {counted(len(free), 'whole segment')}"
        yield Text(f"{counted(len(pinned.evictable), 'allocation')} of {size} only pin: without them {freed}")
    clearing = pinned.clearing
    if clearing.segments:
        back, gone = format_bytes(clearing.given_back_bytes), format_bytes(clearing.must_go_bytes)
        what = f"{counted(len(clearing.segments), 'segment')} ({back}) for {gone}"
        yield Text(f"best trade: {what} of {counted(len(clearing.sites), 'call site')}")
        for site in clearing.sites[:_PINS]:
            yield Text(clip(f"    {site}", width), style="dim")


def _pools(f: Fragmentation) -> list[Text]:
    rows = [["pool and stream", "kind", "reserved", "allocated", "free", "largest free block"]]
    for pool in f.by_pool:
        sizes = (pool.reserved_bytes, pool.allocated_bytes, pool.free_bytes, pool.largest_free_block_bytes)
        rows.append([f"{pool_name(pool.pool)}, {stream_name(pool.stream)}", pool.kind, *map(format_bytes, sizes)])
    return table(rows, (False, False, True, True, True, True), indent="  ")


def _segments(f: Fragmentation, meaning: str, width: int) -> Iterator[Text]:
    yield heading(f"segments with pinned free space ({format_count(len(f.pinned_segments))}, largest holes first)")
    for segment in f.pinned_segments[:_SEGMENTS]:
        sizes = f"{format_bytes(segment.free_bytes)} free of {format_bytes(segment.total_bytes)}"
        yield Text(f"  0x{segment.address:x}  {sizes}, pinned by")
        for pin in segment.pinned_by[:_PINS]:
            head, purpose = f"      {format_bytes(pin.bytes):>10}  ", f"{pin.category}/{pin.subcategory}"
            place = clip(pin.frame or NO_STACK, max(20, width - len(head) - 30))
            yield Text.assemble(head, (f"{category_name(purpose, meaning):<30}", STYLE[pin.category]), place)
        rest = segment.pinned_by[_PINS:]
        if rest:
            yield more_line(sum(pin.bytes for pin in rest), len(rest), width=14)
