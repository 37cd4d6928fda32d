"""The segment/block graph at an event: device → pool → segment → block → allocation → stack → category.

Questions it answers: --region SIZE (what would have to go for a contiguous free region of that size), --pins ADDRESS
(which call sites hold that segment), --pool NAME (which call sites hold a pool, "large" say).
"""

from __future__ import annotations

import argparse

from memtrace.cli.common import (
    add_format,
    add_shared,
    floods_terminal,
    format_of,
    open_analysis,
    option,
    output_stream,
    to_json,
)
from memtrace.errors import NoAnswerError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at events steps rules")
    add_format(parser, "graphml", "json", "dot", default="json")
    option(parser, "--region SIZE", "cheapest contiguous region of that size, per pool (JSON)")
    option(parser, "--pins ADDRESS", "call sites that hold the segment at this address (JSON)")
    option(parser, "--pool NAME", "call sites that hold the pools whose name has NAME in it (JSON)")
    add_shared(parser, "output force")


def run(args: argparse.Namespace) -> int:
    from memtrace.answers.graph import build_graph, cheapest_region, pins_of, sites_of_pool
    from memtrace.export.graph_file import node_link, to_dot, to_graphml
    from memtrace.units import parse_size

    form = format_of(args)
    wanted = parse_size(args.region) if args.region is not None else None
    if not (args.region or args.pins or args.pool) and floods_terminal(args):
        raise UsageError("the whole graph is for other programs: give --output FILE or redirect stdout")
    analysis, at = open_analysis(args)
    graph = build_graph(analysis, at.event)
    if wanted is not None:
        content = to_json({"wanted_bytes": wanted, "regions": cheapest_region(graph, wanted)})
    elif args.pins:
        segment = _segment(graph, args.pins)
        content = to_json({"segment": segment, **graph.nodes[segment], "pins": pins_of(graph, segment)})
    elif args.pool:
        pools = [node for node, data in graph.nodes(data=True) if data["kind"] == "pool" and args.pool in node]
        if not pools:
            raise NoAnswerError(f"no pool has {args.pool!r} in its name")
        content = to_json({pool: sites_of_pool(graph, pool) for pool in pools})
    elif form == "graphml":
        content = to_graphml(graph)
    elif form == "dot":
        content = to_dot(graph).encode()
    else:
        content = to_json(node_link(graph))
    with output_stream(args) as out:
        out.write(content)
    return 0


def _segment(graph: object, text: str) -> str:
    import networkx as nx

    assert isinstance(graph, nx.DiGraph)
    try:
        address = int(text, 0)
    except ValueError:
        raise UsageError(f"--pins takes an address (0x…), not {text!r}") from None
    for node, data in graph.nodes(data=True):
        if data["kind"] == "segment" and data["address"] <= address < data["address"] + data["total_bytes"]:
            return str(node)
    raise NoAnswerError(f"no segment at 0x{address:x} at this event")
