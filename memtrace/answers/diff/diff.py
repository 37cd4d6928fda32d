"""Before against after: signed bytes by category, subcategory and call site, with nothing left out.

Each recording is read at its own event (the OOM, the peak, or a chosen one). The differences of a category's sites
add up to the category's, and those of the categories to the difference in reserved bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from memtrace.analysis import Analysis
from memtrace.answers.diff.comparison import Delta, Difference, SiteDelta
from memtrace.answers.diff.match import Pair, Side, pair_sites
from memtrace.answers.diff.paths import align
from memtrace.answers.report import Report, by_stack, report
from memtrace.attribution.categories import Category
from memtrace.attribution.sites import BEFORE_RECORDING, NO_STACK
from memtrace.history.timeline import At

_SUMMED = ("before_bytes", "after_bytes", "delta_bytes", "before_count", "after_count")


def diff(before: Analysis, after: Analysis, at_before: At | None = None, at_after: At | None = None) -> Difference:
    """AFTER minus BEFORE, each at its event (default: the last OOM if there is one, else the peak)."""
    first, second = report(before, at_before), report(after, at_after)
    paths = align(before.timeline.snapshot.stacks, after.timeline.snapshot.stacks)
    pairs = pair_sites(_sites(before, first.at), _sites(after, second.at), *paths)
    sites = _merged([_delta_of(pair, before, after) for pair in pairs] + _unused(first, second))
    change = {f"peak_{level}": second.peaks[level] - first.peaks[level] for level in first.peaks}
    delta = Delta(
        **change,
        reserved_bytes=second.reserved_bytes - first.reserved_bytes,
        allocated_bytes=second.allocated_bytes - first.allocated_bytes,
        categories=minus(second.categories, first.categories),
        subcategories=minus(second.subcategories, first.subcategories),
    )
    return Difference(first, second, delta, sites)


def minus(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """``after - before`` for every key of either."""
    return {key: after.get(key, 0) - before.get(key, 0) for key in dict.fromkeys([*before, *after])}


def _sites(analysis: Analysis, at: At) -> list[Side]:
    """Live bytes by purpose and stack; memory from before the recording apart from memory without a stack."""
    timeline, modules = analysis.timeline, analysis.attribution.sites.module
    merged: dict[tuple[str, int, bool], list[int]] = {}
    for group in by_stack(analysis, timeline.held_rows(at.event)):
        entry = merged.setdefault((str(group.rule.purpose), group.stack, group.is_early), [0, 0])
        entry[0] += group.bytes
        entry[1] += group.count
    return [
        Side(purpose, stack, is_early, modules[stack] if stack >= 0 else "", total, count)
        for (purpose, stack, is_early), (total, count) in merged.items()
    ]


def _label(analysis: Analysis, sites: Iterable[Side]) -> tuple[str, str]:
    """(module, frame) of the largest of the sites; ("", "") if there is none."""
    largest = max(sites, key=lambda site: site.bytes, default=None)
    if largest is None:
        return "", ""
    label = analysis.attribution.sites.label(largest.stack)
    return largest.module, label or (BEFORE_RECORDING if largest.is_early else NO_STACK)


def _delta_of(pair: Pair, before: Analysis, after: Analysis) -> SiteDelta:
    category, _, sub = (pair.before or pair.after)[0].purpose.partition("/")
    module_before, frame_before = _label(before, pair.before)
    module_after, frame_after = _label(after, pair.after)
    first, second = sum(site.bytes for site in pair.before), sum(site.bytes for site in pair.after)
    return SiteDelta(
        category=category,
        subcategory=sub,
        module=module_after or module_before,
        frame=frame_after or frame_before,
        frame_before=frame_before or frame_after,
        before_bytes=first,
        after_bytes=second,
        delta_bytes=second - first,
        before_count=sum(site.count for site in pair.before),
        after_count=sum(site.count for site in pair.after),
        match=pair.how,
    )


def _unused(before: Report, after: Report) -> list[SiteDelta]:
    """Each kind of fragmentation as a site of its own: it has no call site."""
    prefix = f"{Category.FRAGMENTATION}/"
    found = []
    for key in dict.fromkeys([*before.subcategories, *after.subcategories]):
        if key.startswith(prefix):
            a, b = before.subcategories.get(key, 0), after.subcategories.get(key, 0)
            kind = key.removeprefix(prefix)
            found.append(SiteDelta(str(Category.FRAGMENTATION), kind, "", "", "", a, b, b - a, 0, 0, "kind"))
    return found


def _merged(sites: Iterable[SiteDelta]) -> tuple[SiteDelta, ...]:
    """Sites that look the same to a reader become one, largest change first."""
    groups: dict[tuple[object, ...], list[SiteDelta]] = {}
    for site in sites:
        side = (site.before_count > 0, site.after_count > 0) if site.match is None else ()
        key = (site.category, site.subcategory, site.module, site.frame, site.frame_before, site.match, side)
        groups.setdefault(key, []).append(site)
    merged = []
    for same in groups.values():
        sums = {name: sum(getattr(site, name) for site in same) for name in _SUMMED}
        merged.append(replace(same[0], **sums))
    return tuple(sorted(merged, key=lambda s: (-abs(s.delta_bytes), -s.after_bytes, s.category, s.frame)))
