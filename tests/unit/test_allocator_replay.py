"""Replay against recordings: addresses, segment events, final layout, and the process's own statistics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from allocator_recordings import FUZZ, GIB, device, fuzz_truth, manifest, recording, replayed
from allocator_statistics import statistics_of_replay

from memtrace.allocator.replay.replay import replay_device
from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.model import Action, Device
from memtrace.snapshot.segment_columns import read_segments

SMALL_SAMPLES = [
    "tiny-llama_3-steps", "llama2-7b_baseline", "llama2-7b_baseline-expandable", "llama2-7b_oom-at-load",
    "llama2-7b_oom-first-step", "llama2-7b_recorded-after-load", "llama2-7b_ring-truncated",
    "qwen2-7b_large-vocabulary", "ddp_rank0", "ddp_rank1", "llama2-7b_reference-model", "llama2-7b_oom-fragmentation",
]  # fmt: skip
SAMPLES = [name for name in SMALL_SAMPLES if name in manifest()]
COLUMNS = ["action", "address", "size", "stream", "stack", "context", "pool", "user_metadata", "compile_context"]


def part(dev: Device, rows: np.ndarray) -> Device:
    """The device with only some rows of its trace."""
    trace = dev.trace
    columns = {name: getattr(trace, name)[rows] for name in COLUMNS}
    times = None if trace.time_us is None else trace.time_us[rows]
    return replace(dev, trace=replace(trace, time_us=times, oom_device_free_bytes={}, **columns))


@pytest.mark.parametrize("name", FUZZ + SAMPLES)
def test_recordings_replay_exactly(name: str) -> None:
    result = replayed(name)
    assert result.why is None
    assert result.exact
    assert result.diverged_at is None


@pytest.mark.parametrize("name", FUZZ)
def test_statistics_of_the_process(name: str) -> None:
    """Equal in all that is current or a peak; totals miss the one allocation made before recording began."""
    truth = fuzz_truth(name)["stats"]
    mine = statistics_of_replay(device(name), recording(name).settings)
    assert len(mine) >= 30
    for key, value in mine.items():
        if key not in truth:
            continue
        if key.endswith((".allocated", ".freed")) or key.startswith("num_device"):
            assert truth[key] - value in (0, 1, 4, 512, 2 << 20), key
        else:
            assert truth[key] == value, key


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "llama2-7b_ring-truncated"])
def test_peaks_of_the_process(name: str) -> None:
    expected = manifest()[name]["expected"]
    if not expected:
        pytest.skip("no statistics were kept with this recording")
    mine = statistics_of_replay(device(name), recording(name).settings)
    for key, value in expected.items():
        assert mine[f"{key}.all.peak"] == value


def test_what_was_live_before_the_trace() -> None:
    result = replayed("llama2-7b_recorded-after-load")
    assert round(result.initial_requested_bytes / GIB, 3) == 4.238
    table, first = result.allocations, slice(0, len(result.initial_pending))
    assert (table.block_bytes[first] >= table.requested_bytes[first]).all()
    assert (np.diff(table.address[first]) > 0).all()
    assert result.initial_allocated_bytes == int(table.block_bytes[first].sum())


@pytest.mark.parametrize("name", ["fuzz_default_0", "fuzz_expand_0", "fuzz_split64_cap_0"])
def test_layout_from_segment_events_fits_the_final_one(name: str) -> None:
    result, dev = replayed(name), device(name)
    trace = dev.trace
    held = int(result.initial_segments.total_size.sum())
    grew = (trace.action == Action.SEGMENT_ALLOC) | (trace.action == Action.SEGMENT_MAP)
    shrank = (trace.action == Action.SEGMENT_FREE) | (trace.action == Action.SEGMENT_UNMAP)
    held += int(trace.size[grew].sum()) - int(trace.size[shrank].sum())
    assert held == int(dev.segments.total_size.sum())
    table, maps = result.allocations, trace.action[result.segment_events] == Action.SEGMENT_MAP
    assert (table.block_bytes >= table.requested_bytes).all()
    assert (result.segment_is_small[maps] == (trace.size[result.segment_events[maps]] == 2 << 20)).all()


@pytest.mark.parametrize("name", [name for name in FUZZ if "gc" not in name] + ["llama2-7b_baseline-expandable"])
@pytest.mark.parametrize("share", [0.1, 0.37, 0.5, 0.83])
def test_windows_without_their_beginning(name: str, share: float) -> None:
    dev = device(name)
    count = len(dev.trace)
    result = replay_device(part(dev, np.arange(int(count * share), count)), recording(name).settings)
    assert result.exact, result.why


def test_garbage_collection_without_its_history_is_admitted_to_be_unknown() -> None:
    """Ages of what was cached before the trace are not recorded; the replay must notice, not guess on."""
    dev = device("fuzz_gc_0")
    count = len(dev.trace)
    for share in (0.2, 0.4, 0.6):
        result = replay_device(part(dev, np.arange(int(count * share), count)), recording("fuzz_gc_0").settings)
        assert result.exact or result.why


def test_a_changed_rule_is_noticed() -> None:
    """Under settings that were not in force the model and the recording part, and the replay says where."""
    settings = dict(recording("fuzz_default_0").settings)
    settings["roundup_power2_divisions"] = {str(1 << i): 4 for i in range(16)}
    result = replay_device(device("fuzz_default_0"), settings)
    assert not result.exact
    assert result.diverged_at is not None
    assert result.why


def test_after_a_divergence_sizes_are_rounded_requests() -> None:
    dev = device("fuzz_default_0")
    trace = dev.trace
    half = int(np.flatnonzero(trace.action == Action.ALLOC)[500])
    moved = trace.address.copy()
    moved[half] += 4096
    result = replay_device(replace(dev, trace=replace(trace, address=moved)), recording("fuzz_default_0").settings)
    assert not result.exact
    exact = replayed("fuzz_default_0")
    table = result.allocations
    later = table.alloc_event > result.diverged_at
    assert later.any()
    assert (table.block_bytes[later] == np.maximum(-(-table.requested_bytes[later] // 512) * 512, 512)).all()
    assert exact.exact


@pytest.mark.parametrize("dropped", list(range(9)))
def test_traces_without_some_actions(dropped: int) -> None:
    dev = device("fuzz_default_0")
    result = replay_device(part(dev, np.flatnonzero(dev.trace.action != dropped)), recording("fuzz_default_0").settings)
    assert result.exact or result.why
    if dropped in (Action.SNAPSHOT, Action.OOM):
        assert result.exact


def test_no_trace_and_no_segments() -> None:
    dev = device("fuzz_default_0")
    settings = recording("fuzz_default_0").settings
    empty = replay_device(part(dev, np.zeros(0, np.int64)), settings)
    assert empty.exact
    assert empty.initial_reserved_bytes == int(dev.segments.total_size.sum())
    segments, blocks = read_segments([], StackInterner(), print)
    bare = replay_device(replace(dev, segments=segments, blocks=blocks), settings)
    assert not bare.exact
    assert bare.why


def test_without_stacks_the_replay_is_as_exact() -> None:
    for name in ("fuzz_default_0", "fuzz_capped_0", "fuzz_expand_cap_0"):
        dev = device(name)
        none = np.full(len(dev.trace), -1, dtype=np.int32)
        blind = replace(dev, trace=replace(dev.trace, context=none, stack=none))
        result = replay_device(blind, recording(name).settings)
        assert result.exact, (name, result.why)


def test_stack_objects_that_are_never_shared_mean_nothing() -> None:
    """A snapshot that went through JSON has a list of its own for every event."""
    for name in ("fuzz_default_0", "fuzz_capped_0", "fuzz_split64_cap_0", "fuzz_gc_0"):
        dev = device(name)
        own = np.arange(len(dev.trace), dtype=np.int32)
        result = replay_device(replace(dev, trace=replace(dev.trace, context=own)), recording(name).settings)
        assert result.exact, (name, result.why)


def test_the_limit_that_the_trace_shows() -> None:
    for name in ("fuzz_capped_0", "fuzz_split64_cap_0", "fuzz_gc_0", "fuzz_gc_split_0"):
        cap = int(fuzz_truth(name)["cap"] * GIB)
        result = replayed(name)
        assert result.limit_below_bytes is not None
        assert result.limit_from_bytes <= cap < result.limit_below_bytes
    assert replayed("fuzz_default_0").limit_below_bytes is None


def test_every_free_belongs_to_one_allocation() -> None:
    result, trace = replayed("fuzz_default_0"), device("fuzz_default_0").trace
    table = result.allocations
    completed = table.free_completed_event[table.free_completed_event >= 0]
    assert len(np.unique(completed)) == len(completed)
    assert len(completed) == int((trace.action == Action.FREE_COMPLETED).sum())
    requested = table.free_requested_event >= 0
    assert (table.free_requested_event[requested] <= table.free_completed_event[requested]).all()
