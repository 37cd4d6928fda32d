"""What keeps reserved memory from being given back: questions to the graph of segments, call sites and categories.

A segment that is partly free stays reserved as long as anything in it is live. *Dominators* say who alone holds it: if
every way from the root to a segment leads through one call site (or one category), that one's allocations pin it. A
*minimum cut* says what to move or free so that whole segments come back: giving a segment back gains its bytes, and
needs everything in it to go, which costs its bytes wherever the same site holds more. *Evictable* allocations only pin:
they are small against the free space around them. Base weights and what is trained stay where they are.
"""

from __future__ import annotations

from typing import Any

from memtrace.analysis import Analysis
from memtrace.answers.fragmentation import Place, live_by_site, place_of
from memtrace.attribution.categories import Category
from memtrace.attribution.sites import NO_STACK
from memtrace.frozen import dataclass
from memtrace.history.layout import Layout

_ROOT, _GONE = "everything", "gone"
# What could go or live elsewhere, the easiest first.
_EVICTABLE = (Category.TEMPORARY, Category.ACTIVATIONS, Category.RUNTIME, Category.UNATTRIBUTED)
_MOST_LISTED = 20
_MOST_SEGMENTS = 4000  # those with most free bytes


@dataclass(frozen=True, slots=True)
class PinHolder:
    """A category or call site without which these free bytes would come back, in so many segments."""

    category: str
    subcategory: str | None
    frame: str | None
    free_bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class Evictable:
    """An allocation that pins more free bytes than it has: ``row`` is its row in ``Timeline.allocations``."""

    row: int
    address: int
    block_bytes: int
    category: str
    subcategory: str
    frame: str
    segment: int
    segment_free_bytes: int


@dataclass(frozen=True, slots=True)
class Clearing:
    """The best set of segments to empty: what they give back, and what would have to go for it (live bytes)."""

    segments: tuple[int, ...]
    given_back_bytes: int
    must_go_bytes: int
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pins:
    """Answers about the segments that are partly free at one event."""

    pinned_free_bytes: int
    held_by: tuple[PinHolder, ...]
    evictable: tuple[Evictable, ...]
    clearing: Clearing


def pins(analysis: Analysis, layout: Layout) -> Pins:
    """Who pins what in a layout."""
    known = live_by_site(analysis.timeline, analysis.attribution, layout)
    held = dict(list(known.items())[:_MOST_SEGMENTS])
    free = layout.free_bytes()
    return Pins(
        pinned_free_bytes=int(sum(int(free[segment]) for segment in held)),
        held_by=_dominators(held, free),
        evictable=_evictable(analysis, layout, held, free),
        clearing=_clearing(layout, held),
    )


def _dominators(held: dict[int, dict[Place, int]], free: Any) -> tuple[PinHolder, ...]:
    import networkx as nx  # takes long, and most answers ask for no pins

    graph = nx.DiGraph()
    for segment, sites in held.items():
        for site in sites:
            graph.add_edge(_ROOT, site[0])
            graph.add_edge(site[0], site)
            graph.add_edge(site, segment)
    if not graph:
        return ()
    above = nx.immediate_dominators(graph, _ROOT)
    totals: dict[Any, list[int]] = {}
    for segment in held:
        entry = totals.setdefault(above[segment], [0, 0])
        entry[0] += int(free[segment])
        entry[1] += 1
    found = []
    for node, (size, count) in totals.items():
        if node == _ROOT:
            continue  # several categories share them: none alone would bring them back
        category, sub, frame = (*node[:2], node[2] or NO_STACK) if isinstance(node, tuple) else (node, None, None)
        found.append(PinHolder(category, sub, frame, size, count))
    found.sort(key=lambda one: (-one.free_bytes, one.category, one.subcategory or "", one.frame or ""))
    return tuple(found[:_MOST_LISTED])


def _clearing(layout: Layout, held: dict[int, dict[Place, int]]) -> Clearing:
    """The closure of segments and sites with the highest gain, by minimum cut (project selection)."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from((_ROOT, _GONE))
    never = int(layout.total_bytes.sum()) + 1
    for segment, sites in held.items():
        graph.add_edge(_ROOT, segment, capacity=int(layout.total_bytes[segment]))
        for site, size in sites.items():
            graph.add_edge(segment, site)  # no capacity: without end, so the site goes if the segment does
            known = graph.get_edge_data(site, _GONE, {"capacity": 0})["capacity"]
            graph.add_edge(site, _GONE, capacity=known + size if site[0] in _EVICTABLE else never)
    _, (chosen, _) = nx.minimum_cut(graph, _ROOT, _GONE)
    segments = [segment for segment in held if segment in chosen]
    cost = {node: graph.edges[node, _GONE]["capacity"] for node in chosen if isinstance(node, tuple)}
    ranked = sorted(cost, key=lambda site: (-cost[site], *map(str, site)))
    return Clearing(
        segments=tuple(int(layout.address[segment]) for segment in segments),
        given_back_bytes=int(sum(int(layout.total_bytes[segment]) for segment in segments)),
        must_go_bytes=sum(cost.values()),
        sites=tuple(f"{s[0]}/{s[1]} {s[2] or NO_STACK}" for s in ranked),
    )


def _evictable(
    analysis: Analysis, layout: Layout, held: dict[int, dict[Place, int]], free: Any
) -> tuple[Evictable, ...]:
    """Allocations in segments whose live bytes are fewer than their free ones and could all go, easiest first."""
    found = []
    for segment, sites in held.items():
        if sum(sites.values()) >= int(free[segment]) or not all(site[0] in _EVICTABLE for site in sites):
            continue
        for block in range(int(layout.first_block[segment]), int(layout.first_block[segment + 1])):
            row = int(layout.row[block])
            if row >= 0:
                size, address = int(layout.block_bytes[block]), int(layout.block_address[block])
                category, sub, frame = place_of(analysis.timeline, analysis.attribution, row)
                where = int(layout.address[segment]), int(free[segment])
                found.append(Evictable(row, address, size, category, sub, frame or NO_STACK, *where))
    order = {str(category): place for place, category in enumerate(_EVICTABLE)}
    found.sort(key=lambda one: (-one.segment_free_bytes, order[one.category], one.block_bytes, one.address))
    return tuple(found[:_MOST_LISTED])
