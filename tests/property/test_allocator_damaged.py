"""Replay and simulation of damaged traces: an answer always, never an exception, and no time to speak of."""

from __future__ import annotations

import numpy as np
from allocator_damage import KINDS, damage
from allocator_recordings import device, recording
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memtrace.allocator.bounds import lower_bounds
from memtrace.allocator.config import from_snapshot
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.replay.replay import replay_device
from memtrace.allocator.whatif.program import extract
from memtrace.allocator.whatif.selfcheck import recorded_limit, self_check
from memtrace.allocator.whatif.whatif import simulate
from memtrace.snapshot.model import Action

NAMES = ["fuzz_default_0", "fuzz_expand_cap_0", "fuzz_split64_cap_0", "fuzz_gc_0"]


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    kinds=st.lists(st.integers(0, KINDS - 1), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    other=st.sampled_from([{}, {"expandable_segments": True}, {"max_split_size": 64 << 20}]),
)
@example(name="fuzz_expand_cap_0", kinds=[5], seed=0, other={"expandable_segments": True})
@example(name="fuzz_expand_cap_0", kinds=[10, 10, 5], seed=10603900, other={"expandable_segments": True})
def test_damaged_traces(name: str, kinds: list[int], seed: int, other: dict[str, object]) -> None:
    rng = np.random.default_rng(seed)
    dev = device(name)
    for kind in kinds:
        dev = damage(dev, kind, rng)
    stored = recording(name).settings
    result = replay_device(dev, stored)
    count = len(dev.trace)
    table = result.allocations
    assert len(table) == len(result.initial_pending) + int((dev.trace.action == Action.ALLOC).sum())
    assert result.exact == (result.diverged_at is None) == (result.why is None)
    assert result.diverged_at is None or 0 <= result.diverged_at <= max(count - 1, 0)
    if result.exact:
        assert (table.block_bytes >= table.requested_bytes).all()

    code = extract(gather(dev, from_snapshot(stored)))
    check = self_check(code, result, recorded_limit(result))
    assert check.exact == result.exact
    run = simulate(code, from_snapshot(other).with_limit(4 << 30))
    # Sizes near the largest that a trace can hold are refused by the limit, never by arithmetic.
    assert 0 <= run.end_reserved_bytes <= run.peak_reserved_bytes
    assert run.fits == (run.first_oom_event is None)
    bounds = lower_bounds(code, from_snapshot(stored))
    assert bounds.requested_bytes <= bounds.rounded_bytes
