"""A difference in one sentence: what changed most."""

from __future__ import annotations

from collections.abc import Sequence

from memtrace.answers.diff.comparison import Delta, SiteDelta
from memtrace.answers.report import Report
from memtrace.units import format_bytes, format_delta

_WORTH_NAMING = 0.25  # of the largest change: smaller ones against it are not mentioned


def sentence(before: Report, after: Report, delta: Delta, sites: Sequence[SiteDelta]) -> str:
    """What happened to reserved memory, the category that changed most, where in it, and what works against that."""
    changed = {name: size for name, size in delta.categories.items() if size}
    if not changed and not any(site.delta_bytes for site in sites):
        return "No difference: every category and every call site holds the same bytes."
    if not changed:
        moved = sites[0]
        return (
            f"Every category holds the same bytes; within {moved.category}/{moved.subcategory} they moved between call "
            f"sites, up to {format_bytes(abs(moved.delta_bytes))}."
        )
    largest = max(changed, key=lambda name: abs(changed[name]))
    text = f"{_reserved(before, after, delta)}; what changed most is {largest}, {format_delta(changed[largest])}"
    text += _where(largest, changed[largest], delta, sites)
    others = sorted((name for name in changed if name != largest), key=lambda name: -abs(changed[name]))
    worth = [name for name in others if abs(changed[name]) >= _WORTH_NAMING * abs(changed[largest])]
    if worth:
        text += ", then " + ", ".join(f"{name} {format_delta(changed[name])}" for name in worth[:2])
    return text + "."


def _reserved(before: Report, after: Report, delta: Delta) -> str:
    if not delta.reserved_bytes:
        return f"Reserved memory is unchanged at {format_bytes(after.reserved_bytes)}"
    verb = "grew" if delta.reserved_bytes > 0 else "fell"
    return (
        f"Reserved memory {verb} by {format_bytes(abs(delta.reserved_bytes))} "
        f"({format_bytes(before.reserved_bytes)} → {format_bytes(after.reserved_bytes)})"
    )


def _where(category: str, change: int, delta: Delta, sites: Sequence[SiteDelta]) -> str:
    """The subcategory and call site that account for most of a category's change."""
    inside = {key.split("/")[1]: size for key, size in delta.subcategories.items() if key.startswith(f"{category}/")}
    same_way = {name: size for name, size in inside.items() if size * change > 0}
    if not same_way:
        return ""
    sub = max(same_way, key=lambda name: abs(same_way[name]))
    parts = []
    if sub != category and same_way[sub] != change:
        parts.append(f"{sub} {format_delta(same_way[sub])}")
    elif sub != category:
        parts.append(sub)
    site = next(
        (s for s in sites if (s.category, s.subcategory) == (category, sub) and s.delta_bytes * change > 0), None
    )
    if (
        site is not None
        and site.frame
        and not site.frame.startswith("(")
        and 2 * abs(site.delta_bytes) >= abs(same_way[sub])
    ):
        frame = site.frame if site.delta_bytes > 0 else site.frame_before  # where more was
        size = format_delta(site.delta_bytes)
        if parts and size == format_delta(same_way[sub]):  # said already
            parts[-1] += f" at {frame}"
        else:
            parts.append(f"{size} at {frame}")
    return f" ({', '.join(parts)})" if parts else ""
