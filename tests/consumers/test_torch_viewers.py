"""PyTorch's own viewer opens the cut snapshot: its text views run, and its pages embed it."""

from __future__ import annotations

import base64
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import analysis, trace_path

from memtrace.cli import main


@pytest.fixture(
    scope="module", params=["tiny-llama_3-steps", "llama2-7b_baseline-expandable", "llama2-7b_oom-first-step"]
)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(recording's name, its middle as a snapshot file)."""
    target = tmp_path_factory.mktemp("cut") / "cut.pickle"
    name = str(request.param)
    count = len(analysis(name).timeline)
    span = f"{count // 3}:{count // 2}"
    assert main(["export", str(trace_path(name)), "--format", "snapshot", "--events", span, "-o", str(target)]) == 0
    assert target.read_bytes()[:2] == b"\x80\x04"
    return name, target


def viewer(*args: str) -> str:
    command = [sys.executable, "-m", "torch.cuda._memory_viz", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_text_views(cut: tuple[str, Path]) -> None:
    name, file = cut
    stats = viewer("stats", str(file))
    reserved = sum(segment["total_size"] for segment in pickle.loads(file.read_bytes())["segments"])
    middle = len(analysis(name).timeline) // 2
    assert reserved in analysis(name).timeline.reserved_bytes[middle : middle + 40].tolist()
    assert "segments" in stats and "total_reserved" in stats
    assert viewer("trace", str(file))


@pytest.mark.parametrize("kind", ["trace_plot", "segment_plot"])
def test_pages_embed_the_snapshot(cut: tuple[str, Path], tmp_path: Path, kind: str) -> None:
    page = tmp_path / "page.html"
    viewer(kind, str(cut[1]), "-o", str(page))
    packed = re.search(r"(\[\{.*?\"base64\".*?\}\])", page.read_text(), re.DOTALL)
    assert packed
    embedded = pickle.loads(base64.b64decode(json.loads(packed[1])[0]["base64"]))
    assert embedded["segments"] == pickle.loads(cut[1].read_bytes())["segments"]
