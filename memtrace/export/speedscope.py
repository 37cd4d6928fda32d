"""speedscope's JSON (https://www.speedscope.app), and collapsed stacks for flamegraph.pl, inferno and the like."""

from __future__ import annotations

from typing import Any

from memtrace._version import __version__
from memtrace.export.flame import FlameNode, WeightedStacks

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def to_speedscope(stacks: WeightedStacks, name: str) -> dict[str, Any]:
    """One *sampled* profile whose unit is bytes; each stack is one sample, largest first."""
    return {
        "$schema": SCHEMA,
        "exporter": f"memtrace {__version__}",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(node) for node in stacks.nodes]},
        "profiles": [
            {
                "type": "sampled",
                "name": stacks.title,
                "unit": "bytes",
                "startValue": 0,
                "endValue": stacks.total_bytes,
                "samples": [list(stack) for stack in stacks.stacks],
                "weights": list(stacks.weights),
            }
        ],
    }


def _frame(node: FlameNode) -> dict[str, Any]:
    frame: dict[str, Any] = {"name": node.name}
    if node.file is not None:
        frame["file"] = node.file
    if node.line is not None:
        frame["line"] = node.line
    return frame


def to_collapsed(stacks: WeightedStacks) -> str:
    """One line a stack: nodes separated by ``;``, a space, and the bytes."""
    return "".join(f"{';'.join(map(_label, nodes))} {weight}\n" for nodes, weight in stacks.named())


def _label(node: FlameNode) -> str:
    text = node.name if node.file is None else f"{node.name} ({node.file}:{node.line or 0})"
    return " ".join(text.split()).replace(";", ",") or "?"
