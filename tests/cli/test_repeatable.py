"""The same file gives the same answer in every process, whatever its hash seed and the addresses of its objects."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest
from support import trace_path

VERBS = ("report --json", "report --json --why temporary", "explain --json", "explain --json --overheads",
         "fragmentation --json", "segments --json", "info --json", "allocations --json", "timeline --format json",
         "simulate --json", "check --json --max-peak 900GiB", "graph", "graph --format graphml", "graph --region 64KiB",
         "export -f collapsed")  # fmt: skip
NAMES = ("tiny-llama_3-steps", "llama2-7b_oom-first-step")
# All verbs in one process: what Python and its libraries cost to start is paid twice, not 28 times.
PROGRAM = """
import sys
from memtrace.cli import main
for path in sys.argv[2:]:
    for verb in sys.argv[1].split(","):
        assert main([*verb.split(), path]) in (0, 1)
        sys.stdout.buffer.write(b"\\0")
"""


@cache
def answers(seed: int) -> list[bytes]:
    """What every verb prints about every recording, in a process with this hash seed."""
    command = [sys.executable, "-c", PROGRAM, ",".join(VERBS), *(str(trace_path(name)) for name in NAMES)]
    pad = {"PADDING": "x" * (1000 * seed)}  # moves what comes after it
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), **pad}
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    return done.stdout.split(b"\0")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", NAMES)
def test_same_answer_twice(verb: str, name: str) -> None:
    place = NAMES.index(name) * len(VERBS) + VERBS.index(verb)
    first, second = answers(1)[place], answers(2)[place]
    assert len(first) > 100
    assert first == second
