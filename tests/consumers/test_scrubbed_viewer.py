"""PyTorch's own viewer opens a scrubbed snapshot and counts the same bytes in it."""

from __future__ import annotations

import lzma
import subprocess
import sys
from pathlib import Path

import pytest
from support import trace_path

from memtrace.cli import main

NAMES = ["tiny-llama_3-steps", "llama2-7b_oom-first-step"]


def viewer(*args: object) -> str:
    command = [sys.executable, "-m", "torch.cuda._memory_viz", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("name", NAMES)
def test_same_statistics_and_a_page(name: str, tmp_path: Path) -> None:
    original, scrubbed, page = tmp_path / "original.pickle", tmp_path / "scrubbed.pickle", tmp_path / "page.html"
    original.write_bytes(lzma.decompress(trace_path(name).read_bytes()))
    assert main(["scrub", str(original), "-o", str(scrubbed), "--functions"]) == 0
    assert viewer("stats", scrubbed) == viewer("stats", original)
    assert len(viewer("trace", scrubbed).splitlines()) == len(viewer("trace", original).splitlines())
    for kind in ("trace_plot", "segment_plot"):
        viewer(kind, scrubbed, "-o", page)
        assert page.stat().st_size > 1000
    assert main(["report", str(scrubbed)]) == 0
