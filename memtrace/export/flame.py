"""Weighted stacks, outermost frame first, under category and subcategory: what flame graphs are drawn from.

Written as speedscope's JSON (https://www.speedscope.app), and collapsed for flamegraph.pl, inferno and the like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace._version import __version__
from memtrace.analysis import Analysis
from memtrace.answers.report import by_stack, report
from memtrace.attribution.categories import Category
from memtrace.attribution.sites import BEFORE_RECORDING, NO_STACK, short_path
from memtrace.history.timeline import At

I8 = NDArray[np.int64]
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


@dataclass(frozen=True, slots=True)
class FlameNode:
    """One level of a flame graph. ``file`` and ``line`` are None for categories and for what has no source."""

    name: str
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class WeightedStacks:
    """``weights[i]`` bytes belong to the nodes ``stacks[i]`` (numbers into ``nodes``, outermost first)."""

    title: str
    nodes: tuple[FlameNode, ...]
    stacks: tuple[tuple[int, ...], ...]
    weights: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of all weights."""
        return sum(self.weights)

    def named(self) -> Iterator[tuple[list[FlameNode], int]]:
        """(nodes, bytes) of every stack."""
        for stack, weight in zip(self.stacks, self.weights, strict=True):
            yield [self.nodes[i] for i in stack], weight


def live_stacks(analysis: Analysis, at: At) -> WeightedStacks:
    """Everything reserved at an event: live allocations by stack, and fragmentation by kind. Sums to reserved bytes."""
    timeline = analysis.timeline
    rows = timeline.live_rows(at.event)
    rows = rows[~timeline.pending(rows, at.event)]
    builder = _Builder(analysis)
    builder.add_rows(rows)
    prefix = f"{Category.FRAGMENTATION}/"
    for key, size in report(analysis, at).subcategories.items():
        if key.startswith(prefix) and size > 0:
            builder.add([FlameNode(str(Category.FRAGMENTATION)), FlameNode(key.removeprefix(prefix))], size)
    return builder.done(f"reserved bytes at event {at.event} ({at.kind})")


def volume_stacks(analysis: Analysis) -> WeightedStacks:
    """Every allocation made within the span, by stack, weighted by the bytes it asked for, freed or not."""
    builder = _Builder(analysis)
    (first, stop), made = analysis.timeline.span, analysis.timeline.allocations.alloc_event
    builder.add_rows(np.flatnonzero((made >= first) & (made < stop)))
    where = f"events {first} to {stop - 1}" if analysis.timeline.window else "the recording"
    return builder.done(f"bytes allocated over {where}")


class _Builder:
    """Collects stacks; equal ones are added up."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._nodes: dict[FlameNode, int] = {}
        self._sums: dict[tuple[int, ...], int] = {}
        self._paths: dict[int, list[FlameNode]] = {}

    def add(self, path: list[FlameNode], size_bytes: int) -> None:
        key = tuple(self._nodes.setdefault(node, len(self._nodes)) for node in path)
        self._sums[key] = self._sums.get(key, 0) + size_bytes

    def add_rows(self, rows: I8) -> None:
        for group in by_stack(self._analysis, rows):
            frames = self._path(group.stack) or [FlameNode(BEFORE_RECORDING if group.is_early else NO_STACK)]
            self.add([FlameNode(str(group.rule.category)), FlameNode(group.rule.subcategory), *frames], group.bytes)

    def _path(self, stack: int) -> list[FlameNode]:
        """Frames of a stack, outermost first."""
        known = self._paths.get(stack)
        if known is None:
            frames = self._analysis.timeline.snapshot.stacks.stack(stack)
            known = self._paths[stack] = [
                FlameNode(frame.name, short_path(frame.filename) or None, frame.line or None)
                for frame in reversed(frames)
            ]
        return known

    def done(self, title: str) -> WeightedStacks:
        ranked = sorted((item for item in self._sums.items() if item[1] > 0), key=lambda item: -item[1])
        return WeightedStacks(
            title, tuple(self._nodes), tuple(stack for stack, _ in ranked), tuple(size for _, size in ranked)
        )


def to_speedscope(stacks: WeightedStacks, name: str) -> dict[str, Any]:
    """One *sampled* profile whose unit is bytes; each stack is one sample, largest first."""
    profile = {"type": "sampled", "name": stacks.title, "unit": "bytes", "startValue": 0}
    profile |= {"endValue": stacks.total_bytes, "samples": [list(stack) for stack in stacks.stacks]}
    profile["weights"] = list(stacks.weights)
    return {
        "$schema": _SCHEMA,
        "exporter": f"memtrace {__version__}",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(node) for node in stacks.nodes]},
        "profiles": [profile],
    }


def _frame(node: FlameNode) -> dict[str, Any]:
    source = {"file": node.file, "line": node.line}
    return {"name": node.name, **{key: value for key, value in source.items() if value is not None}}


def to_collapsed(stacks: WeightedStacks) -> str:
    """One line a stack: nodes separated by ``;``, a space, and the bytes."""
    return "".join(f"{';'.join(map(_label, nodes))} {weight}\n" for nodes, weight in stacks.named())


def _label(node: FlameNode) -> str:
    text = node.name if node.file is None else f"{node.name} ({node.file}:{node.line or 0})"
    return " ".join(text.split()).replace(";", ",") or "?"
