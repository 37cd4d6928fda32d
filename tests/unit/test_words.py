"""How texts name what the JSON has as identifiers."""

from __future__ import annotations

from memtrace.render.words import pool_name, stream_name, verdict_name
from memtrace.units import counted


def test_names() -> None:
    assert [verdict_name(name) for name in ("no_oom", "not_this_process", "budget")] == [
        "no OOM", "not this process", "budget",
    ]  # fmt: skip
    assert (stream_name(0), stream_name(0x55D0)) == ("default stream", "stream 0x55d0")
    assert (pool_name("large"), pool_name("(1, 0) small")) == ("large", "private pool (1, 0) small")


def test_counts() -> None:
    assert [counted(count, "piece") for count in (0, 1, 1024)] == ["0 pieces", "1 piece", "1,024 pieces"]
