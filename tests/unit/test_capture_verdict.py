"""The five lines after an out-of-memory error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memtrace.record.ooms import SavedOom, oom_lines, verdict_on

GIB = 1 << 30
MIB = 1 << 20


def extra(**changes: Any) -> dict[str, Any]:
    """A failure on a 24 GiB card."""
    facts: dict[str, Any] = {
        "device": 0, "rank": 0, "world_size": 1, "device_total_bytes": 24 * GIB, "device_free_bytes": 100 * MIB,
        "limit_bytes": None, "labels": [], "phases": [{"time_us": 0, "name": "forward", "step": 3}],
        "stats": {"allocated_bytes.all.current": 23 * GIB, "reserved_bytes.all.current": 23 * GIB + 200 * MIB},
        "oom": {"requested_bytes": 512 * MIB, "phase": "forward", "step": 3},
    }  # fmt: skip
    return facts | changes


def saved(facts: dict[str, Any], file: Path | None = None, is_older: bool = False) -> SavedOom:
    """As the recorder has it; no event but the error is in its trace."""
    trace = [{"action": "oom", "size": facts["oom"]["requested_bytes"], "time_us": 1}]
    verdict = verdict_on({"memtrace": facts, "device_traces": [trace], "allocator_settings": {}})
    return SavedOom(facts, 0, file, 12, verdict, is_older)


def test_always_five_lines() -> None:
    for file in (Path("/x/run.pickle"), None):
        lines = oom_lines(saved(extra(), file))
        assert len(lines) == 5
        assert all("\n" not in line for line in lines)
    assert "phase forward, step 3: 512.0 MiB" in lines[0]


def test_file_and_next_command() -> None:
    lines = oom_lines(saved(extra(), Path("/x/run.pickle")))
    assert lines[3] == "state at the failure saved to /x/run.pickle (12 events)"
    assert lines[4] == "next: memtrace explain /x/run.pickle"
    assert "earlier failure" in oom_lines(saved(extra(), Path("/x/run.pickle"), is_older=True))[3]


def held(allocated_bytes: int, reserved_bytes: int) -> dict[str, int]:
    return {"allocated_bytes.all.current": allocated_bytes, "reserved_bytes.all.current": reserved_bytes}


def test_the_second_line_is_the_one_judges_verdict() -> None:
    assert oom_lines(saved(extra()))[1].startswith("budget: 512.0 MiB asked for with 23.00 GiB allocated")
    in_pieces = extra(stats=held(21 * GIB, 23 * GIB))
    assert oom_lines(saved(in_pieces))[1].startswith("fragmentation: ")
    others = extra(stats=held(2 * GIB, 2 * GIB + MIB))
    assert oom_lines(saved(others))[1].startswith("not this process: PyTorch in this process holds 2.00 GiB")


def test_figures_that_are_missing_lose_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    without = extra(stats={}, device_total_bytes=None, device_free_bytes=None)
    assert len(oom_lines(saved(without))) == 5
    broken = saved(extra(phases="no marks"))
    assert broken.verdict is None
    assert "judging the error failed" in capsys.readouterr().err
    assert oom_lines(broken)[1] == "why is not known"


def test_labels_are_summed_without_the_past_and_without_paged_states() -> None:
    row = {"bytes": GIB, "category": "base_weights", "name": "a", "until_time_us": None}
    past = row | {"category": "lora", "until_time_us": 5}
    paged = row | {"category": "lora", "outside": True}
    line = oom_lines(saved(extra(labels=[row, past, paged])))[2]
    assert "1.00 GiB are frozen weights, 0 B what is trained" in line
    assert "22.00 GiB activations" in line


def test_rank_is_named() -> None:
    assert "(rank 1 of 2)" in oom_lines(saved(extra(rank=1, world_size=2)))[0]
