"""The five lines after an out-of-memory error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memtrace.record.verdict import oom_lines, size_text

GIB = 1 << 30
MIB = 1 << 20


def extra(**changes: Any) -> dict[str, Any]:
    """A failure on a 24 GiB card."""
    facts: dict[str, Any] = {
        "device": 0, "rank": 0, "world_size": 1, "device_total_bytes": 24 * GIB, "device_free_bytes": 100 * MIB,
        "limit_bytes": None, "labels": [],
        "stats": {"allocated_bytes.all.current": 23 * GIB, "reserved_bytes.all.current": 23 * GIB + 200 * MIB},
        "oom": {"requested_bytes": 512 * MIB, "phase": "forward", "step": 3},
    }  # fmt: skip
    return facts | changes


def test_always_five_lines() -> None:
    for file in (Path("/x/run.pickle"), None):
        lines = oom_lines(extra(), file, 12)
        assert len(lines) == 5
        assert all("\n" not in line for line in lines)
    assert "phase forward, step 3: 512.00 MiB" in lines[0]


def test_file_and_next_command() -> None:
    lines = oom_lines(extra(), Path("/x/run.pickle"), 12)
    assert lines[3] == "state at the failure saved to /x/run.pickle (12 events)"
    assert lines[4] == "next: memtrace explain /x/run.pickle"
    assert "earlier failure" in oom_lines(extra(), Path("/x/run.pickle"), 12, is_older=True)[3]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "too much for the memory there is: 300.00 MiB"),
        (
            {"stats": {"allocated_bytes.all.current": 21 * GIB, "reserved_bytes.all.current": 23 * GIB}},
            "fragmented: in one piece, the 2.00 GiB",
        ),
        (
            {
                "limit_bytes": 12 * GIB,
                "device_free_bytes": 11 * GIB,
                "stats": {
                    "allocated_bytes.all.current": 12 * GIB - 99 * MIB,
                    "reserved_bytes.all.current": 12 * GIB - 90 * MIB,
                },
            },
            "(limit 12.00 GiB)",
        ),
        (
            {"stats": {"allocated_bytes.all.current": 2 * GIB, "reserved_bytes.all.current": 2 * GIB + MIB}},
            "in use outside it",
        ),
        ({"device_total_bytes": None}, "memory is unknown"),
    ],
)
def test_cause(changes: dict[str, Any], says: str) -> None:
    assert says in oom_lines(extra(**changes), None, 0)[1]


def test_labels_are_summed_without_the_past_and_without_paged_states() -> None:
    row = {"address": 1, "bytes": GIB, "category": "base_weights", "subcategory": "quantized", "until_time_us": None}
    past = row | {"category": "lora", "until_time_us": 5}
    paged = row | {"category": "lora", "outside": True}
    line = oom_lines(extra(labels=[row, past, paged]), None, 0)[2]
    assert "1.00 GiB are the base model, 0 bytes what is trained" in line
    assert "22.00 GiB activations" in line


def test_rank_is_named() -> None:
    assert "(rank 1 of 2)" in oom_lines(extra(rank=1, world_size=2), None, 0)[0]


def test_sizes() -> None:
    assert [size_text(n) for n in (512, 86 * MIB, 3 * GIB // 2)] == ["512 bytes", "86.00 MiB", "1.50 GiB"]
