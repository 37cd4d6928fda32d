"""The same file gives the same answer in every process, whatever its hash seed and the addresses of its objects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import trace_path

VERBS = (
    ("report",), ("explain",), ("fragmentation",), ("segments",), ("info",), ("export", "-f", "collapsed"),
    ("allocations", "--format", "json"),
)  # fmt: skip


def answer(seed: int, verb: tuple[str, ...], name: str) -> bytes:
    is_json = verb[0] in ("report", "explain", "fragmentation", "segments", "info")
    command = [sys.executable, "-m", "memtrace", *verb, str(trace_path(name)), *(["--json"] if is_json else [])]
    pad = {"PADDING": "x" * (1000 * seed)}  # moves what comes after it
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), **pad}
    return subprocess.run(command, capture_output=True, check=True, env=environment).stdout


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_oom-first-step"])
def test_same_answer_twice(verb: tuple[str, ...], name: str) -> None:
    assert answer(1, verb, name) == answer(2, verb, name)
