"""Replay and simulation of damaged traces: an answer always, never an exception, and no time to speak of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
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
from memtrace.snapshot.model import Action, Device, DeviceTrace
from memtrace.snapshot.segment_columns import empty_segments

COLUMNS = ["action", "address", "size", "stream", "stack", "context", "pool", "user_metadata", "compile_context"]
NAMES = ["fuzz_default_0", "fuzz_expand_cap_0", "fuzz_split64_cap_0", "fuzz_gc_0"]


def rows_of(trace: DeviceTrace, rows: np.ndarray) -> DeviceTrace:
    times = None if trace.time_us is None else trace.time_us[rows]
    return replace(trace, time_us=times, **{name: getattr(trace, name)[rows] for name in COLUMNS})


def damage(dev: Device, kind: int, rng: np.random.Generator) -> Device:
    """One kind of damage at random places."""
    trace, count = dev.trace, len(dev.trace)
    if not count:
        return dev
    spots = rng.integers(0, count, 20)
    if kind == 0:
        keep = np.sort(rng.choice(count, int(count * rng.random()), replace=False))
        return replace(dev, trace=rows_of(trace, keep))
    if kind == 1:
        return replace(dev, trace=rows_of(trace, np.flatnonzero(trace.action != rng.integers(0, 9))))
    if kind == 2:
        return replace(dev, trace=rows_of(trace, np.arange(rng.integers(0, count), count)))
    if kind == 3:
        return replace(dev, trace=rows_of(trace, rng.permutation(count)))
    if kind == 4:
        size = trace.size.copy()
        size[spots[:5]] = [0, 1 << 60, 1, 513, 1 << 59]
        return replace(dev, trace=replace(trace, size=size))
    if kind == 5:
        address = trace.address.copy()
        address[spots] = np.abs(address[rng.integers(0, count, 20)] + rng.integers(-5000, 5000, 20))
        return replace(dev, trace=replace(trace, address=address))
    if kind == 6:
        action = trace.action.copy()
        action[spots] = rng.integers(0, 12, 20)
        return replace(dev, trace=replace(trace, action=action))
    if kind == 7:
        segments, blocks = empty_segments()
        return replace(dev, segments=segments, blocks=blocks)
    if kind == 8:
        none = np.full(count, -1, dtype=np.int32)
        return replace(dev, trace=replace(trace, context=none, stack=none))
    if kind == 9:
        stream = trace.stream.copy()
        stream[spots] = rng.integers(0, len(trace.streams), 20)
        return replace(dev, trace=replace(trace, stream=stream))
    if kind == 10:
        return replace(dev, trace=rows_of(trace, np.sort(np.append(np.arange(count), spots))))
    size = dev.blocks.size.copy()
    if len(size):
        size[rng.integers(0, len(size))] += 512
    return replace(dev, blocks=replace(dev.blocks, size=size))


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    kinds=st.lists(st.integers(0, 11), min_size=1, max_size=3),
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
    assert len(result.block_bytes) == count
    assert result.exact == (result.diverged_at is None) == (result.why is None)
    assert result.diverged_at is None or 0 <= result.diverged_at <= max(count - 1, 0)
    allocs = dev.trace.action == Action.ALLOC
    if result.exact:
        assert (result.block_bytes[allocs] >= dev.trace.size[allocs]).all()

    code = extract(gather(dev, from_snapshot(stored)))
    check = self_check(code, result, recorded_limit(result))
    assert check.exact == result.exact
    run = simulate(code, from_snapshot(other).with_limit(4 << 30))
    # Sizes near the largest that a trace can hold are refused by the limit, never by arithmetic.
    assert 0 <= run.end_reserved_bytes <= run.peak_reserved_bytes
    assert run.fits == (run.first_oom_event is None)
    bounds = lower_bounds(code, from_snapshot(stored))
    assert bounds.requested_bytes <= bounds.rounded_bytes
