"""The graph's shape, and the questions it answers, against brute force."""

from __future__ import annotations

import io

import networkx as nx
import pytest
from support import analysis

from memtrace.answers.fragmentation import measure
from memtrace.answers.graph import build_graph, cheapest_region, pins_of, sites_of_pool
from memtrace.errors import UsageError
from memtrace.export.graph_file import node_link, to_dot, to_graphml
from memtrace.history.layout import State, layout_at
from memtrace.history.timeline import choose_event

NAME = "llama2-7b_oom-fragmentation"


@pytest.fixture(scope="module")
def graph() -> nx.DiGraph:
    made = analysis(NAME)
    return build_graph(made, choose_event(made.timeline, None).event)


def of_kind(graph: nx.DiGraph, kind: str) -> list[str]:
    return [node for node, data in graph.nodes(data=True) if data["kind"] == kind]


def test_bytes_are_conserved_down_the_graph(graph: nx.DiGraph) -> None:
    (device,) = of_kind(graph, "device")
    reserved = graph.nodes[device]["reserved_bytes"]
    assert reserved == sum(graph.edges[device, pool]["bytes"] for pool in graph.successors(device))
    for pool in of_kind(graph, "pool"):
        segments = [graph.nodes[s] for s in graph.successors(pool)]
        assert graph.nodes[pool]["reserved_bytes"] == sum(s["total_bytes"] for s in segments)
        assert graph.nodes[pool]["free_bytes"] == sum(s["free_bytes"] for s in segments)
    for segment in of_kind(graph, "segment"):
        blocks = [graph.nodes[b] for b in graph.successors(segment)]
        assert graph.nodes[segment]["total_bytes"] == sum(b["block_bytes"] for b in blocks)


def test_pins_agree_with_the_fragmentation_answer(graph: nx.DiGraph) -> None:
    made = analysis(NAME)
    answer = measure(made.timeline, made.attribution, choose_event(made.timeline, None))
    for segment in answer.pinned_segments[:20]:
        pins = pins_of(graph, f"segment 0x{segment.address:x}")
        assert sum(pins.values()) == sum(pin.bytes for pin in segment.pinned_by)
        assert sum(pins.values()) == segment.total_bytes - segment.free_bytes


def test_cheapest_region_is_the_cheapest(graph: nx.DiGraph) -> None:
    made = analysis(NAME)
    layout = layout_at(made.timeline, choose_event(made.timeline, None).event)
    wanted = 90177536
    region = cheapest_region(graph, wanted)[0]
    best = None
    for segment in range(len(layout)):
        first, last = int(layout.first_block[segment]), int(layout.first_block[segment + 1])
        for low in range(first, last):
            span = live = 0
            for block in range(low, last):
                span += int(layout.block_bytes[block])
                live += int(layout.block_bytes[block]) * (layout.block_state[block] != State.FREE)
                if span >= wanted:
                    best = live if best is None else min(best, live)
                    break
    assert region.must_go_bytes == best
    assert region.total_bytes >= wanted
    assert region.already_free_bytes + region.must_go_bytes == region.total_bytes


def test_sites_of_a_pool_hold_what_it_has_allocated(graph: nx.DiGraph) -> None:
    for pool in of_kind(graph, "pool"):
        data = graph.nodes[pool]
        assert sum(sites_of_pool(graph, pool).values()) == data["reserved_bytes"] - data["free_bytes"]


def test_a_region_needs_a_size(graph: nx.DiGraph) -> None:
    with pytest.raises(UsageError):
        cheapest_region(graph, 0)


def test_files_are_read_back_by_their_readers() -> None:
    made = analysis("tiny-llama_3-steps")
    graph = build_graph(made, choose_event(made.timeline, None).event)
    read = nx.read_graphml(io.BytesIO(to_graphml(graph)))
    assert (read.number_of_nodes(), read.number_of_edges()) == (graph.number_of_nodes(), graph.number_of_edges())
    assert nx.node_link_graph(node_link(graph), edges="edges").number_of_edges() == graph.number_of_edges()
    dot = to_dot(graph)
    assert dot.count(" -> ") == graph.number_of_edges()
