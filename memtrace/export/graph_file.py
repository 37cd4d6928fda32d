"""The segment/block graph as GraphML, JSON (node-link form) or DOT."""

from __future__ import annotations

import io
from typing import Any

import networkx as nx


def to_graphml(graph: nx.DiGraph) -> bytes:
    """GraphML, as networkx, Gephi and yEd read it."""
    buffer = io.BytesIO()
    nx.write_graphml(graph, buffer)
    return buffer.getvalue()


def node_link(graph: nx.DiGraph) -> dict[str, Any]:
    """networkx' node-link form: ``{"nodes": […], "edges": […]}``."""
    data: dict[str, Any] = nx.node_link_data(graph, edges="edges")
    return data


_SHAPE = {"device": "doubleoctagon", "pool": "folder", "segment": "box3d", "block": "box", "category": "ellipse"}


def to_dot(graph: nx.DiGraph) -> str:
    """Graphviz' language, written out here since networkx needs a C library for it."""
    lines = ["digraph memtrace {", "  rankdir=LR;", "  node [fontname=monospace];"]
    for node, data in graph.nodes(data=True):
        label = "\\n".join([node, *(f"{key}: {value}" for key, value in data.items() if key != "kind")])
        lines.append(f"  {_quoted(node)} [label={_quoted(label)} shape={_SHAPE.get(data['kind'], 'note')}];")
    for source, target, data in graph.edges(data=True):
        lines.append(f"  {_quoted(source)} -> {_quoted(target)} [label={_quoted(data['relation'])}];")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'
