"""Graphviz parses the DOT export."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support import analysis, trace_path

from memtrace.answers.graph import build_graph
from memtrace.cli import main


def test_graphviz_reads_every_segment(tmp_path: Path) -> None:
    target = tmp_path / "graph.dot"
    assert main(["graph", str(trace_path("tiny-llama_3-steps")), "--format", "dot", "-o", str(target)]) == 0
    # Parsing and counting only: laying thousands of nodes out takes minutes.
    subprocess.run(["nop", "-p", str(target)], timeout=60, check=True)
    counted = subprocess.run(["gc", "-n", str(target)], capture_output=True, text=True, timeout=60, check=True).stdout
    recording = analysis("tiny-llama_3-steps")
    assert int(counted.split()[0]) == len(build_graph(recording, recording.timeline.peaks()[1].event))
