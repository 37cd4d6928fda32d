"""The budget at one event: every reserved byte in one category, with the biggest sites and what to be wary of.

One dataclass is the answer; JSON, text and the terminal browser all show this same object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from memtrace.analysis import Analysis
from memtrace.answers.fragmentation import Fragmentation, measure
from memtrace.answers.outside import outside_allocator
from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.phases import Phase
from memtrace.attribution.reasons import unattributed_reason
from memtrace.attribution.rules import Rule
from memtrace.frozen import dataclass
from memtrace.history.layout import Layout
from memtrace.history.timeline import At, choose_event
from memtrace.snapshot.model import I8

LEVELS = ("requested", "allocated", "reserved")


@dataclass(frozen=True, slots=True)
class Site:
    """Live allocations of one purpose from one call site."""

    category: str
    subcategory: str
    module: str
    bytes: int
    count: int
    frame: str
    evidence: str
    rule: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some live bytes could not be attributed."""

    reason: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Unattributed:
    """How much of the live memory has a category, and why the rest has none."""

    attributed_bytes: int
    unattributed_bytes: int
    unattributed: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """When the event was: phase and step by the phases recognised in the trace."""

    phase: str
    step: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """The budget of one device at one event. ``categories`` sum to ``reserved_bytes``, ``subcategories`` to them.

    ``lora`` says what the category of that key holds: adapters, or, where none are in play, whatever is trained.
    ``peaks`` are those of the events of ``window`` (first, behind the last), of the whole recording where it is None.
    """

    file: str
    device: int
    device_name: str
    at: At
    moment: Moment
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    categories: Mapping[str, int]
    subcategories: Mapping[str, int]
    lora: Mapping[str, str]
    outside_allocator: Mapping[str, Any] | None
    peaks: Mapping[str, int]
    window: tuple[int, int] | None
    attribution: Unattributed
    top: tuple[Site, ...]
    fragmentation: Fragmentation
    exact: bool
    warnings: tuple[str, ...]


def category_bytes(analysis: Analysis, rows: I8) -> dict[str, int]:
    """Requested bytes of the rows by ``category/subcategory``."""
    attribution, size = analysis.attribution, analysis.timeline.allocations.requested_bytes
    sums = np.zeros(len(attribution.rules), dtype=np.int64)
    np.add.at(sums, attribution.rule[rows], size[rows])
    result: dict[str, int] = {}
    for number in np.flatnonzero(sums).tolist():
        key = str(attribution.rules[number].purpose)
        result[key] = result.get(key, 0) + int(sums[number])
    return result


def report(analysis: Analysis, at: At | None = None, layout: Layout | None = None) -> Report:
    """The budget at an event (default: the last OOM if there is one, else the peak), whose layout may be known."""
    timeline, attribution = analysis.timeline, analysis.attribution
    at = at or choose_event(timeline, None)
    rows = timeline.held_rows(at.event)
    by_sub = category_bytes(analysis, rows)
    fragmentation = measure(timeline, attribution, at, layout)
    requested, allocated, reserved = timeline.curve_at(at.event)
    live_bytes = int(timeline.allocations.requested_bytes[rows].sum())
    unused = {
        Purpose.ROUNDING: fragmentation.rounding_bytes,
        Purpose.UNSPLIT_TAIL: fragmentation.unsplit_tail_bytes,
        Purpose.CACHED_SEGMENTS: fragmentation.cached_segments_bytes,
        Purpose.PENDING_FREE: fragmentation.pending_free_bytes,
    }
    if live_bytes + sum(unused.values()) > reserved:  # only in a file that contradicts itself: the kinds are not known
        unused = {}
    unused[Purpose.HOLES] = reserved - live_bytes - sum(unused.values())
    by_sub |= {str(purpose): size for purpose, size in unused.items() if size}
    categories = {str(category): 0 for category in Category}
    for key, size in by_sub.items():
        categories[key.split("/")[0]] += size
    lost = rows[attribution.rows_of(Category.UNATTRIBUTED, rows=rows)]
    return Report(
        file=timeline.snapshot.source,
        device=timeline.device.device,
        device_name=timeline.device_name,
        at=at,
        moment=moment_of(analysis, at.event),
        requested_bytes=requested,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        categories=categories,
        subcategories=dict(sorted(by_sub.items(), key=lambda item: list(Purpose).index(Purpose(item[0])))),
        lora={"meaning": attribution.lora_meaning},
        outside_allocator=outside_allocator(timeline),
        peaks={f"{peak_of}_bytes": peak.size_bytes for peak_of, peak in zip(LEVELS, timeline.peaks(), strict=True)},
        window=timeline.window and (timeline.window.first, timeline.window.stop),
        attribution=_unattributed(analysis, lost, live_bytes),
        top=top_sites(analysis, rows),
        fragmentation=fragmentation,
        exact=timeline.replay.exact,
        warnings=analysis.caveats,
    )


def moment_of(analysis: Analysis, event: int) -> Moment:
    """Phase and step of an event; step None while the model is loaded or where nothing tells."""
    phases = analysis.attribution.facts.phases
    if event < 0 or not len(phases):
        return Moment("unknown", None)
    span = int(phases.span_of(np.array([event]))[0])
    step = int(phases.step[span])
    return Moment(Phase(int(phases.phase[span])).label, step if step >= 0 else None)


def _unattributed(analysis: Analysis, lost: I8, live_bytes: int) -> Unattributed:
    size = analysis.timeline.allocations.requested_bytes
    reasons: dict[str, list[int]] = {}
    for row in lost.tolist():
        reasons.setdefault(unattributed_reason(analysis.attribution.facts, row), []).append(int(size[row]))
    total = int(size[lost].sum())
    found = [Reason(reason, sum(sizes), len(sizes)) for reason, sizes in reasons.items()]
    return Unattributed(live_bytes - total, total, tuple(sorted(found, key=lambda reason: -reason.bytes)))


@dataclass(frozen=True, slots=True)
class SiteGroup:
    """Allocations of one rule and one stack; ``is_early``: they were there before the recording began."""

    rule: Rule
    stack: int
    is_early: bool
    bytes: int
    count: int


def by_stack(analysis: Analysis, rows: I8) -> Iterator[SiteGroup]:
    """The rows by rule and stack, memory from before the recording apart; bytes are those requested."""
    attribution, table = analysis.attribution, analysis.timeline.allocations
    key = (attribution.rule[rows].astype(np.int64) << 33) + (table.stack[rows].astype(np.int64) + 1)
    keys, inverse, counts = np.unique(key * 2 + (table.alloc_event[rows] < 0), return_inverse=True, return_counts=True)
    sums = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums, inverse, table.requested_bytes[rows])
    for number, total, count in zip(keys.tolist(), sums.tolist(), counts.tolist(), strict=True):
        stack = (number >> 1 & ((1 << 33) - 1)) - 1
        yield SiteGroup(attribution.rules[number >> 34], stack, bool(number & 1), total, count)


def top_sites(analysis: Analysis, rows: I8) -> tuple[Site, ...]:
    """The rows grouped by purpose and call site, largest first."""
    where = analysis.attribution.sites
    merged: dict[tuple[Rule, str, str], list[int]] = {}
    for group in by_stack(analysis, rows):
        module = where.module[group.stack] if group.stack >= 0 else ""
        entry = merged.setdefault((group.rule, module, where.label(group.stack)), [0, 0])
        entry[0] += group.bytes
        entry[1] += group.count
    sites = [
        Site(str(rule.category), rule.subcategory, module, total, count, frame, str(rule.evidence), rule.id)
        for (rule, module, frame), (total, count) in merged.items()
    ]
    # Ties in a fixed order: stacks are numbered as they are met, which differs from run to run.
    return tuple(sorted(sites, key=lambda s: (-s.bytes, s.category, s.subcategory, s.frame, s.module, s.rule)))
