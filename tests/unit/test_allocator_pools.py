"""Pools, graphs, engines that sleep, settings that change: the replay is exact, or the event is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtrace.history.timeline import Timeline, build
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Action

POOLS = Path(__file__).parent.parent / "truth" / "pools"
EXACT = ("sleeping", "engine", "engine-expandable", "pool-in-need")


def timeline(name: str) -> Timeline:
    snapshot = load(POOLS / f"{name}.pickle.xz")
    return build(snapshot, snapshot.devices[0])


@pytest.mark.parametrize("name", EXACT)
def test_the_replay_is_exact(name: str) -> None:
    assert timeline(name).replay.why is None


def test_memory_that_sleeps_stays_reserved() -> None:
    """What an engine unmaps behind PyTorch is PyTorch's all the same: four blocks of 48 MiB, to the end."""
    found = timeline("sleeping")
    assert found.curve_at(len(found.trace) - 1)[2] == 4 * 48 << 20


@pytest.mark.parametrize("name", ["pool", "graphs", "changed"])
def test_what_the_file_does_not_tell_is_named_with_its_event(name: str) -> None:
    replay = timeline(name).replay
    trace = timeline(name).trace
    assert not replay.exact and replay.why is not None and replay.diverged_at is not None
    assert trace.action[replay.diverged_at] == Action.ALLOC
    if name != "changed":  # a pool that is gone: it grows although another has room
        assert replay.why == "a free block of the model fits this request, but growth or refusal is recorded"
        assert trace.action[replay.diverged_at - 1] == Action.SEGMENT_ALLOC
