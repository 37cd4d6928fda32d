"""The segment/block graph, and the questions it answers well.

Nodes: device → pool → segment → block → allocation → stack → category. Edges point from the whole to its part, from an
allocation to the stack that made it, and from a stack to the category of what it made (``bytes`` on every edge).
An allocation that is small against the free space that it alone pins has ``only_pins_bytes``.
Neighbouring blocks of a segment are joined by ``next`` edges, so that regions are paths. Attribute names carry units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import networkx as nx

from memtrace.analysis import Analysis
from memtrace.answers.fragmentation import pool_name
from memtrace.answers.pins import pins
from memtrace.attribution.sites import NO_STACK
from memtrace.errors import UsageError
from memtrace.frozen import dataclass
from memtrace.history.layout import State, layout_at

Node = str


def build_graph(analysis: Analysis, event: int) -> nx.DiGraph:
    """The graph of one device just after ``event``. Linear in blocks."""
    timeline = analysis.timeline
    layout, table = layout_at(timeline, event), timeline.allocations
    graph = nx.DiGraph(event=event, device=timeline.device.device)
    device = f"device {timeline.device.device}"
    graph.add_node(device, kind="device", reserved_bytes=layout.reserved_bytes)
    free, used = layout.free_bytes(), layout.used_bytes()
    for segment in range(len(layout)):
        stream = int(layout.stream[segment])
        pool = f"pool {pool_name(layout, segment)} stream 0x{stream:x}"
        total = int(layout.total_bytes[segment])
        if pool not in graph:
            graph.add_node(pool, kind="pool", stream=stream, reserved_bytes=0, free_bytes=0)
            graph.add_edge(device, pool, relation="contains", bytes=0)
        graph.nodes[pool]["reserved_bytes"] += total
        graph.nodes[pool]["free_bytes"] += int(free[segment])
        graph.edges[device, pool]["bytes"] += total
        name = f"segment 0x{int(layout.address[segment]):x}"
        graph.add_node(
            name, kind="segment", address=int(layout.address[segment]), total_bytes=total,
            free_bytes=int(free[segment]), allocated_bytes=int(used[segment]),
            is_expandable=bool(layout.is_expandable[segment]),
        )  # fmt: skip
        graph.add_edge(pool, name, relation="contains", bytes=total)
    previous: tuple[Node, int] | None = None
    for block in range(len(layout.block_address)):
        segment, size = int(layout.segment[block]), int(layout.block_bytes[block])
        name = f"block 0x{int(layout.block_address[block]):x}"
        state = State(int(layout.block_state[block])).name.lower()
        graph.add_node(name, kind="block", address=int(layout.block_address[block]), block_bytes=size, state=state)
        graph.add_edge(f"segment 0x{int(layout.address[segment]):x}", name, relation="contains", bytes=size)
        if previous is not None and previous[1] == segment:
            graph.add_edge(previous[0], name, relation="next", bytes=0)
        previous = (name, segment)
        row = int(layout.row[block])
        if row >= 0:
            _add_allocation(graph, analysis, name, row, int(table.requested_bytes[row]))
    for one in pins(analysis, layout).evictable:
        graph.nodes[f"allocation {one.row}"]["only_pins_bytes"] = one.segment_free_bytes
    return graph


def _add_allocation(graph: nx.DiGraph, analysis: Analysis, block: Node, row: int, requested_bytes: int) -> None:
    table, attribution = analysis.timeline.allocations, analysis.attribution
    rule, number = attribution.rules[attribution.rule[row]], int(table.stack[row])
    allocation, stack, category = f"allocation {row}", f"stack {number}", f"category {rule.category}"
    graph.add_node(
        allocation, kind="allocation", requested_bytes=requested_bytes, alloc_event=int(table.alloc_event[row]),
        category=str(rule.category), subcategory=rule.subcategory, evidence=f"{rule.evidence}:{rule.id}",
    )  # fmt: skip
    if stack not in graph:
        graph.add_node(stack, kind="stack", frame=attribution.sites.label(number) or NO_STACK, live_bytes=0)
    if category not in graph:
        graph.add_node(category, kind="category", live_bytes=0)
    for node in (stack, category):
        graph.nodes[node]["live_bytes"] += requested_bytes
    graph.add_edge(block, allocation, relation="holds", bytes=requested_bytes)
    graph.add_edge(allocation, stack, relation="made by", bytes=requested_bytes)
    served = graph.get_edge_data(stack, category, {"bytes": 0})["bytes"]
    graph.add_edge(stack, category, relation="serves", bytes=served + requested_bytes)


def _live(graph: nx.DiGraph, blocks: Iterable[Node]) -> Iterator[dict[str, Any]]:
    """What is live in some blocks: size of the block, purpose, call site."""
    for block in blocks:
        for node in graph.successors(block):
            if graph.edges[block, node]["relation"] == "holds":
                data, stack = graph.nodes[node], next(iter(graph.successors(node)))
                purpose = {"category": data["category"], "subcategory": data["subcategory"]}
                size = graph.nodes[block]["block_bytes"]
                yield {"block_bytes": size, **purpose, "frame": graph.nodes[stack]["frame"]}


def pins_of(graph: nx.DiGraph, segment: Node) -> dict[str, int]:
    """Bytes by call site that keep a segment from being released. Raises KeyError for an unknown segment."""
    return _by_frame(_live(graph, graph.successors(segment)))


def sites_of_pool(graph: nx.DiGraph, pool: Node) -> dict[str, int]:
    """Live bytes by call site in a pool, largest first."""
    return _by_frame(live for segment in graph.successors(pool) for live in _live(graph, graph.successors(segment)))


def _by_frame(found: Iterable[dict[str, Any]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for live in found:
        sums[live["frame"]] = sums.get(live["frame"], 0) + live["block_bytes"]
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous region that would be free if ``must_go`` were: the cheapest of its size in its pool."""

    pool: str
    segment: str
    address: int
    total_bytes: int
    already_free_bytes: int
    must_go_bytes: int
    must_go: tuple[dict[str, Any], ...]


def cheapest_region(graph: nx.DiGraph, wanted_bytes: int) -> list[Region]:
    """For each pool and stream, what would have to go for ``wanted_bytes`` of contiguous free memory to exist.

    The fewest live bytes over all runs of neighbouring blocks of one segment; cheapest pool first. Pools without a
    large enough segment have none. Raises UsageError unless ``wanted_bytes`` is positive.
    """
    if wanted_bytes <= 0:
        raise UsageError("a region's size must be positive")
    best: dict[str, tuple[int, Node, list[Node]]] = {}
    for pool in [node for node, data in graph.nodes(data=True) if data["kind"] == "pool"]:
        for segment in graph.successors(pool):
            if graph.nodes[segment]["total_bytes"] < wanted_bytes:
                continue
            found = _cheapest_run(graph, segment, wanted_bytes)
            if found is not None and (pool not in best or found[0] < best[pool][0]):
                best[pool] = (found[0], segment, found[1])
    cheapest = sorted(best.items(), key=lambda item: item[1][0])
    return [_region(graph, pool, segment, blocks) for pool, (_, segment, blocks) in cheapest]


def _cheapest_run(graph: nx.DiGraph, segment: Node, wanted_bytes: int) -> tuple[int, list[Node]] | None:
    """(live bytes, blocks) of the cheapest run of a segment's blocks that spans ``wanted_bytes``; two pointers."""
    blocks = sorted(graph.successors(segment), key=lambda block: graph.nodes[block]["address"])
    sizes = [graph.nodes[block]["block_bytes"] for block in blocks]
    live = [0 if graph.nodes[block]["state"] == "free" else size for block, size in zip(blocks, sizes, strict=True)]
    best: tuple[int, int, int] | None = None
    low = span = cost = 0
    for high in range(len(blocks)):
        span += sizes[high]
        cost += live[high]
        while span - sizes[low] >= wanted_bytes:
            span -= sizes[low]
            cost -= live[low]
            low += 1
        if span >= wanted_bytes and (best is None or cost < best[0]):
            best = (cost, low, high)
    return None if best is None else (best[0], blocks[best[1] : best[2] + 1])


def _region(graph: nx.DiGraph, pool: Node, segment: Node, blocks: list[Node]) -> Region:
    total = sum(graph.nodes[block]["block_bytes"] for block in blocks)
    must_go = tuple(_live(graph, blocks))
    live = sum(item["block_bytes"] for item in must_go)
    return Region(pool, segment, graph.nodes[blocks[0]]["address"], total, total - live, live, must_go)
