"""Live bytes as a call tree: outermost caller first, or inverted with the allocating frame first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from memtrace.attribution.sites import frame_label
from memtrace.snapshot.model import I8
from memtrace.units import printable
from memtrace_tui.data.source import is_library
from memtrace_tui.provider import Provider


@dataclass(slots=True, eq=False)
class CallNode:
    """A frame reached one way. ``frame`` is -1 for the root and for purposes shown where no stack was recorded."""

    label: str
    frame: int
    parent: CallNode | None = None
    bytes: int = 0
    count: int = 0
    self_bytes: int = 0
    children: dict[int, CallNode] = field(default_factory=dict)
    by_category: dict[str, int] = field(default_factory=dict)

    @property
    def category(self) -> str:
        """The category with most bytes."""
        return max(self.by_category, key=self.by_category.__getitem__, default="unattributed")

    @property
    def way(self) -> list[CallNode]:
        """From the root to this node."""
        return [*(self.parent.way if self.parent is not None else ()), self]

    @property
    def depth(self) -> int:
        """0 for the root."""
        return 0 if self.parent is None else self.parent.depth + 1

    def ordered(self) -> list[CallNode]:
        """Children, most bytes first."""
        return sorted(self.children.values(), key=lambda node: -node.bytes)


def call_tree(provider: Provider, rows: I8, inverted: bool = False, fold: bool = True) -> CallNode:
    """The tree of some rows. ``fold`` leaves out frames that only pass the call on."""
    table, attribution = provider.timeline.allocations, provider.analysis.attribution
    stacks = provider.timeline.snapshot.stacks
    key = (table.stack[rows].astype(np.int64) + 1) * len(attribution.rules) + attribution.rule[rows]
    found, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    sums = np.zeros(len(found), dtype=np.int64)
    np.add.at(sums, inverse, table.requested_bytes[rows])
    hidden = [fold and is_library(frame) for frame in stacks.frames]
    labels = [printable(frame_label(frame)) for frame in stacks.frames]
    root = CallNode("all live memory", -1)
    for group, total, count in zip(found.tolist(), sums.tolist(), counts.tolist(), strict=True):
        stack, rule = divmod(group, len(attribution.rules))
        category = str(attribution.rules[rule].category)
        frames = stacks.frame_ids(stack - 1).tolist()
        shown = [frame for frame in frames if not hidden[frame]] or frames[:1]
        path = [(frame, frame, labels[frame]) for frame in (shown if inverted else reversed(shown))]
        if not frames:
            path = [(-1, -1, "no stack recorded"), (-2 - rule, -1, provider.purposes[rule])]
        nodes = [root]
        for step, frame, label in path:
            below = nodes[-1].children
            if step not in below:
                below[step] = CallNode(label, frame, nodes[-1])
            nodes.append(below[step])
        for node in nodes:
            node.bytes += total
            node.count += count
            node.by_category[category] = node.by_category.get(category, 0) + total
        nodes[-1].self_bytes += total
    return root


def visible(root: CallNode, opened: set[int] | None = None) -> Iterator[CallNode]:
    """The nodes on screen, in order: children of opened ones (by ``id``; None: all)."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        if opened is None or id(node) in opened:
            stack.extend(reversed(node.ordered()))


def open_hot(root: CallNode, limit: int = 24) -> set[int]:
    """Nodes to open at first: the ways that lead to most bytes, until about ``limit`` lines show."""
    opened = {id(root)}
    shown = 1 + len(root.children)
    queue = sorted(root.children.values(), key=lambda n: -n.bytes)
    while queue and shown < limit:
        node = queue.pop(0)
        if node.children and (len(node.children) == 1 or shown + len(node.children) <= limit):
            opened.add(id(node))
            shown += len(node.children)
            queue = sorted([*queue, *node.children.values()], key=lambda n: -n.bytes)
    return opened


@dataclass(frozen=True, slots=True)
class Brick:
    """A node of an icicle: ``x`` and ``width`` in cells of its row."""

    node: CallNode
    x: int
    width: int


@lru_cache(2)
def icicle(root: CallNode, width: int, height: int) -> list[list[Brick]]:
    """Rows of bricks under ``root``, each as wide as its share of bytes; what is narrower than a cell is left out."""
    rows: list[list[Brick]] = [[] for _ in range(height)]
    pending: list[tuple[CallNode, int, float, float]] = [(root, 0, 0.0, float(width))]
    while pending:
        node, depth, left, span = pending.pop()
        x = round(left)
        cells = round(left + span) - x
        if depth >= height or cells < 1:
            continue
        rows[depth].append(Brick(node, x, cells))
        for child in node.ordered():
            share = child.bytes / node.bytes * span if node.bytes else 0.0
            pending.append((child, depth + 1, left, share))
            left += share
    return [sorted(row, key=lambda brick: brick.x) for row in rows]
