"""Weighted stacks, outermost frame first, under category and subcategory: what flame graphs are drawn from.

Written as speedscope's JSON (https://www.speedscope.app), and collapsed for flamegraph.pl, inferno and the like.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace._version import __version__
from memtrace.analysis import Analysis
from memtrace.answers.report import by_stack, report
from memtrace.attribution.categories import Category, category_name
from memtrace.attribution.sites import BEFORE_RECORDING, NO_STACK, short_path
from memtrace.history.timeline import At

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class FlameNode(NamedTuple):
    """One level of a flame graph. ``file`` and ``line`` are None for categories and for what has no source."""

    name: str
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class WeightedStacks:
    """Bytes of each path of nodes, outermost first; the largest path comes first."""

    title: str
    weights: dict[tuple[FlameNode, ...], int]

    @property
    def total_bytes(self) -> int:
        """Sum of all weights."""
        return sum(self.weights.values())


def live_stacks(analysis: Analysis, at: At) -> WeightedStacks:
    """Everything reserved at an event: live allocations by stack, and fragmentation by kind. Sums to reserved bytes."""
    sums = _by_path(analysis, analysis.timeline.held_rows(at.event))
    for key, size in report(analysis, at).subcategories.items():
        category, _, kind = key.partition("/")
        if category == Category.FRAGMENTATION:
            sums[FlameNode(category), FlameNode(kind)] = size
    return _ranked(f"reserved bytes at event {at.event} ({at.kind})", sums)


def volume_stacks(analysis: Analysis) -> WeightedStacks:
    """Every allocation made within the span, by stack, weighted by the bytes it asked for, freed or not."""
    (first, stop), made = analysis.timeline.span, analysis.timeline.allocations.alloc_event
    where = f"events {first} to {stop - 1}" if analysis.timeline.window else "the recording"
    sums = _by_path(analysis, np.flatnonzero((made >= first) & (made < stop)))
    return _ranked(f"bytes allocated over {where}", sums)


def _by_path(analysis: Analysis, rows: NDArray[np.int64]) -> dict[tuple[FlameNode, ...], int]:
    """Requested bytes of the rows by path; equal paths are added up."""
    meaning, stacks = analysis.attribution.lora_meaning, analysis.timeline.snapshot.stacks

    @cache
    def frames(stack: int) -> list[FlameNode]:
        found = reversed(stacks.stack(stack))
        return [FlameNode(frame.name, short_path(frame.filename) or None, frame.line or None) for frame in found]

    sums: dict[tuple[FlameNode, ...], int] = {}
    for group in by_stack(analysis, rows):
        inside = frames(group.stack) or [FlameNode(BEFORE_RECORDING if group.is_early else NO_STACK)]
        head = FlameNode(category_name(group.rule.category, meaning)), FlameNode(group.rule.subcategory)
        sums[*head, *inside] = sums.get((*head, *inside), 0) + group.bytes
    return sums


def _ranked(title: str, sums: dict[tuple[FlameNode, ...], int]) -> WeightedStacks:
    return WeightedStacks(title, {path: size for path, size in sorted(sums.items(), key=lambda s: -s[1]) if size > 0})


def to_speedscope(stacks: WeightedStacks, name: str) -> dict[str, Any]:
    """One *sampled* profile whose unit is bytes; each stack is one sample, largest first."""
    nodes: dict[FlameNode, int] = {}
    samples = [[nodes.setdefault(node, len(nodes)) for node in path] for path in stacks.weights]
    profile = {"type": "sampled", "name": stacks.title, "unit": "bytes", "startValue": 0}
    profile |= {"endValue": stacks.total_bytes, "samples": samples, "weights": list(stacks.weights.values())}
    return {
        "$schema": _SCHEMA,
        "exporter": f"memtrace {__version__}",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [{k: v for k, v in node._asdict().items() if v is not None} for node in nodes]},
        "profiles": [profile],
    }


def to_collapsed(stacks: WeightedStacks) -> str:
    """One line a stack: nodes separated by ``;``, a space, and the bytes."""
    return "".join(f"{';'.join(map(_label, path))} {weight}\n" for path, weight in stacks.weights.items())


def _label(node: FlameNode) -> str:
    text = node.name if node.file is None else f"{node.name} ({node.file}:{node.line or 0})"
    return " ".join(text.split()).replace(";", ",") or "?"
