"""Simulation from the program alone: the recorded runs predicted, other runs predicted, edits, bounds, export."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from allocator_counters import CountingState, statistics_of
from allocator_recordings import FUZZ, GIB, device, fuzz_truth, manifest, program, recording, replayed
from hypothesis import given
from hypothesis import strategies as st

from memtrace.allocator.bounds import _place_by_size, lower_bounds, pack
from memtrace.allocator.conf_text import parse_conf
from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.export import as_snapshot
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.replay.replay import replay_device
from memtrace.allocator.rounding import round_sizes
from memtrace.allocator.whatif import whatif
from memtrace.allocator.whatif.addresses import AddressSpace, CardDriver, Hints, Policy
from memtrace.allocator.whatif.program import Op
from memtrace.allocator.whatif.search import ranked, run_conf, sensible_confs
from memtrace.allocator.whatif.selfcheck import Limit, recorded_limit, self_check, settle
from memtrace.allocator.whatif.whatif import Simulation, simulate
from memtrace.errors import UsageError
from memtrace.snapshot.load import from_raw
from memtrace.snapshot.model import Action

V = (2, 11)
CAP = int(22.086 * GIB)  # of the fragmentation recordings
BASELINE, EXPANDABLE = "llama2-7b_baseline", "llama2-7b_baseline-expandable"
FRAGMENTED, UNCAPPED = "llama2-7b_oom-fragmentation", "llama2-7b_variable-length"
UNCAPPED_EXPANDABLE = "llama2-7b_variable-length-expandable"
SAMPLES = [
    "tiny-llama_3-steps", BASELINE, EXPANDABLE, "llama2-7b_oom-first-step", "llama2-7b_ring-truncated",
    "llama2-7b_recorded-after-load", "llama2-7b_oom-at-load", FRAGMENTED,
]  # fmt: skip


def cap_of(name: str) -> int | None:
    cap = fuzz_truth(name)["cap"]
    return None if cap is None else int(cap * GIB)


def peak(name: str) -> int:
    """Peak reserved of the real process."""
    return int(manifest()[name]["expected"]["reserved_bytes"])


def own_settings(name: str, *, counted: bool = False) -> Simulation:
    code = program(name)
    limit = cap_of(name) if name in FUZZ else recorded_limit(replayed(name)).size_bytes
    config = code.evidence.config.with_limit(limit)
    return simulate(code, config, state=CountingState(config) if counted else None)


def reserved_curve(run: Simulation) -> tuple[np.ndarray, np.ndarray]:
    """(events, reserved bytes from that event on), one entry a change."""
    rows = run.segment_events
    sign = np.where((rows[:, 1] == Action.SEGMENT_ALLOC) | (rows[:, 1] == Action.SEGMENT_MAP), 1, -1)
    start = run.end_reserved_bytes - int((sign * rows[:, 3]).sum())
    return rows[:, 0], start + np.cumsum(sign * rows[:, 3])


@pytest.mark.parametrize("name", FUZZ)
def test_the_workloads_are_predicted_untold(name: str) -> None:
    limit = cap_of(name)
    check = self_check(program(name), replayed(name), Limit(limit, "given"))
    assert check.predicted_why is None
    assert check.exact and check.predicted


@pytest.mark.parametrize("name", SAMPLES)
def test_training_runs_are_predicted_under_the_limit_that_they_show(name: str) -> None:
    check = self_check(program(name), replayed(name), recorded_limit(replayed(name)))
    assert check.predicted, check.predicted_why


@pytest.mark.parametrize("name", FUZZ)
def test_all_statistics_of_the_process(name: str) -> None:
    """Every counter, except explicit flushes that released nothing and so left no event, and totals that include the
    one small allocation made before recording began."""
    truth = fuzz_truth(name)["stats"]
    mine = statistics_of(own_settings(name, counted=True))
    assert set(truth) <= set(mine)
    before = {"allocation": 1, "active": 1, "segment": 1, "num_device_alloc": 1, "num_device_free": 1}
    for key, value in truth.items():
        if key == "num_sync_all_streams":
            assert mine[key] <= value
        elif key.endswith((".allocated", ".freed")) or key.startswith("num_device"):
            family = key.split(".")[0]
            allowed = before.get(family, {"requested_bytes": 4, "reserved_bytes": 2 << 20}.get(family, 2 << 20))
            assert 0 <= value - mine[key] <= allowed, key
        else:
            assert mine[key] == value, key


def test_a_hundred_settings_need_little_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[int] = []
    monkeypatch.setattr(
        whatif, "round_sizes", lambda sizes, config: rounded.append(len(sizes)) or round_sizes(sizes, config)
    )
    run = own_settings(BASELINE)
    assert rounded == [len(set(run.program.requested_bytes.tolist()))]  # not every allocation
    assert max(len(kept) for kept in vars(run).values() if isinstance(kept, np.ndarray)) < len(run.program.op) * 0.6


@pytest.mark.parametrize("name", [*FUZZ, *SAMPLES])
def test_fast_and_complete_loops_agree(name: str) -> None:
    fast, complete = own_settings(name), own_settings(name, counted=True)
    assert np.array_equal(fast.address, complete.address)
    assert np.array_equal(fast.block_bytes, complete.block_bytes)
    assert np.array_equal(fast.segment_events, complete.segment_events)
    assert fast.peak_allocated_bytes == complete.peak_allocated_bytes
    assert fast.refused == complete.refused
    statistics = statistics_of(complete)
    if complete.program.initial == 0 and not complete.spared:
        assert statistics["allocated_bytes.all.peak"] == fast.peak_allocated_bytes
        assert statistics["reserved_bytes.all.peak"] == fast.peak_reserved_bytes


@pytest.mark.parametrize("policy", list(Policy))
def test_other_segments_than_recorded(policy: Policy) -> None:
    """The same training under ordinary and expandable segments, recorded both ways: each predicts the other."""
    there = simulate(program(BASELINE), parse_conf("expandable_segments:True", V), policy)
    assert there.peak_reserved_bytes == peak(EXPANDABLE)
    back = simulate(program(EXPANDABLE), parse_conf("", V), policy)
    assert back.peak_reserved_bytes == peak(BASELINE)


def test_expandable_segments_survive_the_fragmentation_oom() -> None:
    """The real expandable run passed this point, and reserved what the simulation reserves at every malloc."""
    run = simulate(program(FRAGMENTED), parse_conf("expandable_segments:True", V).with_limit(CAP))
    assert run.fits
    assert len(run.spared) == 1
    real = program(UNCAPPED_EXPANDABLE)
    told = simulate(real, real.evidence.config.with_limit(CAP))
    mallocs = int((run.program.op == Op.MALLOC).sum())

    def reserved_at_mallocs(simulation: Simulation) -> np.ndarray:
        events, level = reserved_curve(simulation)
        code = simulation.program
        at = code.event[code.op == Op.MALLOC][:mallocs]
        return np.concatenate(([0], level))[np.searchsorted(events, at, side="right")]

    assert np.array_equal(reserved_at_mallocs(run), reserved_at_mallocs(told))


@pytest.mark.parametrize("policy", list(Policy))
def test_the_oom_of_a_capped_run_from_the_uncapped_one(policy: Policy) -> None:
    run = simulate(program(UNCAPPED), parse_conf("", V).with_limit(CAP), policy)
    real = peak(FRAGMENTED)
    assert abs(run.peak_reserved_bytes - real) <= 0.002 * real
    if policy in (Policy.RECORDED, Policy.FALLING):
        assert run.peak_reserved_bytes == real
    # The same malloc of the program fails: the two traces number it differently, as only one shows the reclaim.
    fragmented = program(FRAGMENTED)
    assert run.stopped_at is not None
    before = (run.program.op == Op.MALLOC) & (run.program.event < run.stopped_at)
    assert int(before.sum()) == int((fragmented.op == Op.MALLOC).sum())
    assert run.num_alloc_retries == 3


def test_a_smaller_limit_only_ever_hurts_here() -> None:
    code = program("fuzz_default_0")
    peaks = []
    for limit in (None, 4 * GIB, 3 * GIB, 2 * GIB):
        run = simulate(code, parse_conf("", V).with_limit(limit))
        assert limit is None or run.peak_reserved_bytes <= limit
        peaks.append(run.peak_reserved_bytes)
        if not run.fits:
            assert run.first_oom_event == run.stopped_at
    assert peaks == sorted(peaks, reverse=True)


def test_stopping_at_an_event() -> None:
    code = program("fuzz_expand_0")
    whole = simulate(code, code.evidence.config)
    for event in (0, 1000, 4000):
        part = simulate(code, code.evidence.config, until=event)
        events, level = reserved_curve(whole)
        place = int(np.searchsorted(events, event, side="right"))
        assert part.end_reserved_bytes == (int(level[place - 1]) if place else 0)


# Edits ---------------------------------------------------------------------------------------------------------


def test_without_some_allocations() -> None:
    code = program("fuzz_default_0")
    large = code.requested_bytes > 100 << 20
    config = code.evidence.config
    less = simulate(code.without(large), config)
    assert (
        code.without(large).hints is code.hints
    )  # searching the trace for them takes as long as extracting operations
    assert less.peak_allocated_bytes < simulate(code, config).peak_allocated_bytes
    assert (less.address[large] == -1).all()
    nothing = simulate(code.without(np.ones(len(large), np.bool_)), config)
    assert (nothing.peak_reserved_bytes, nothing.segment_allocs) == (0, 0)


def test_scaled_allocations() -> None:
    code = program("fuzz_default_0")
    marked = code.requested_bytes > 100 << 20
    half = code.scaled(marked, 0.5)
    assert (half.requested_bytes[~marked] == code.requested_bytes[~marked]).all()
    assert (
        simulate(half, code.evidence.config).peak_allocated_bytes
        < simulate(code, code.evidence.config).peak_allocated_bytes
    )
    same = code.scaled(marked, 1.0)
    assert np.array_equal(same.requested_bytes, code.requested_bytes)


def test_edits_of_what_was_there_before_the_trace() -> None:
    code = program("llama2-7b_recorded-after-load")
    first = np.zeros(len(code.requested_bytes), np.bool_)
    first[: code.initial] = True
    without = simulate(code.without(first), code.evidence.config)
    whole = simulate(code, code.evidence.config)
    assert whole.keeps_layout
    before = int(code.requested_bytes[: code.initial].sum())
    assert whole.peak_allocated_bytes - without.peak_allocated_bytes >= before
    halved = simulate(code.scaled(first, 0.5), code.evidence.config)
    assert not halved.keeps_layout
    assert without.peak_allocated_bytes < halved.peak_allocated_bytes < whole.peak_allocated_bytes


# Bounds, search, export ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FUZZ, BASELINE, "llama2-7b_recorded-after-load"])
def test_bounds_hold_under_all_settings_with_the_same_rounding(name: str) -> None:
    code = program(name)
    config = code.evidence.config
    bounds = lower_bounds(code, config)
    assert bounds.requested_bytes <= bounds.rounded_bytes <= bounds.placement_bytes
    run = simulate(code, config)
    assert bounds.rounded_bytes <= run.peak_allocated_bytes
    assert bounds.placement_bytes <= run.peak_reserved_bytes


def test_bounds_of_a_program_by_hand() -> None:
    code = program("fuzz_default_0")
    bounds = lower_bounds(code, code.evidence.config)
    statistics = statistics_of(own_settings("fuzz_default_0", counted=True))
    # With delayed frees, requested bytes stay counted until the stream is done; the bound lets them go at once.
    assert bounds.requested_bytes <= statistics["requested_bytes.all.peak"]
    empty = code.without(np.ones(len(code.requested_bytes), np.bool_))
    nothing = lower_bounds(empty, code.evidence.config)
    assert (nothing.requested_bytes, nothing.rounded_bytes, nothing.placement_bytes) == (0, 0, 0)


def test_search_ranks_what_fits_first() -> None:
    code = program("fuzz_default_0")
    confs = sensible_confs(V, True)
    found = ranked(run_conf(code, conf, parse_conf(conf, V).with_limit(3 * GIB), spread=False) for conf in confs)
    assert [candidate.conf for candidate in found] != []
    fits = [candidate.run.fits for candidate in found]
    assert fits == sorted(fits, reverse=True)
    assert any("garbage_collection_threshold" in candidate.conf for candidate in found)
    assert "expandable_segments:True" not in sensible_confs((2, 0), False)


def test_spread_over_unknown_addresses() -> None:
    code = program("fuzz_default_0")
    candidate = run_conf(code, "", parse_conf("", V))
    assert candidate.lowest_peak_bytes <= candidate.run.peak_reserved_bytes <= candidate.highest_peak_bytes
    assert len(candidate.spread) == 3
    assert run_conf(code, "x", parse_conf("expandable_segments:True", V)).spread == ()


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4"])
@pytest.mark.parametrize("limit", [None, 3 * GIB])
@pytest.mark.parametrize("name", ["fuzz_default_0", "fuzz_split64_cap_0", "llama2-7b_ring-truncated"])
def test_an_exported_run_is_a_recording_that_replays_exactly(name: str, conf: str, limit: int | None) -> None:
    run = simulate(program(name), parse_conf(conf, V).with_limit(limit))
    again = from_raw(as_snapshot(recording(name), run), "exported")
    assert again.warnings == ()
    dev = again.device(device(name).device)
    result = replay_device(dev, again.settings)
    assert result.exact, result.why
    assert int(dev.segments.total_size.sum()) == run.end_reserved_bytes
    held = dev.blocks.size[dev.blocks.state != 0].sum()
    assert int(held) >= run.end_allocated_bytes


@pytest.mark.parametrize("expandable", [False, True])
def test_private_pools_survive_an_export(expandable: bool) -> None:
    """One stream's requests moved to a private pool: its memory stays until nothing asks for it any more."""
    code = program("fuzz_default_0")
    evidence = code.evidence
    streams = np.unique(code.stream)
    pool = (code.stream == streams[-1]).astype(np.int32)
    history = replace(evidence.history, pools=((0, 0), (3, 0)))
    moved = replace(code, evidence=replace(evidence, history=history, pool=pool), pool=pool)
    config = parse_conf(f"expandable_segments:{expandable}", V).with_limit(4 * GIB)
    run = simulate(moved, config)
    raw = as_snapshot(recording("fuzz_default_0"), run)
    assert {segment["segment_pool_id"] for segment in raw["segments"]} == {(0, 0), (3, 0)}
    dev = from_raw(raw, "exported").device(0)
    result = replay_device(dev, raw["allocator_settings"])
    assert result.exact, result.why
    assert {result.pools[i] for i in result.allocations.pool.tolist()} == {(0, 0), (3, 0)}
    # Before PyTorch 2.12 events don't say their pool; it is found by the private segments that are still there.
    silent = as_snapshot(recording("fuzz_default_0"), run)
    for entry in silent["device_traces"][0]:
        del entry["pool_id"]
    older = from_raw(silent, "exported").device(0)
    assert (older.trace.pool < 0).all()
    again = replay_device(older, silent["allocator_settings"])
    assert again.exact, again.why
    # The private pool can't share, so what it holds comes on top.
    assert run.peak_reserved_bytes >= lower_bounds(moved, config).placement_bytes


def test_padded_requests_of_another_back_end_are_recognised() -> None:
    """torch_npu adds 32 bytes to every request; final block sizes show it."""
    code = program("fuzz_default_0")
    padded = replace(code.evidence.config, padding_bytes=32)
    run = simulate(code, padded)
    raw = as_snapshot(recording("fuzz_default_0"), run)
    result = replay_device(from_raw(raw, "exported").device(0), raw["allocator_settings"])
    assert result.exact, result.why
    assert gather(
        from_raw(as_snapshot(recording("fuzz_default_0"), run), "x").device(0), AllocatorConfig()
    ).config == replace(AllocatorConfig(), padding_bytes=32)


@pytest.mark.parametrize("name", ["fuzz_gc_0", "fuzz_gc_split_0", "fuzz_capped_0", "fuzz_split64_cap_0"])
def test_a_limit_read_off_the_trace_predicts_the_trace(name: str) -> None:
    check = settle(program(name), replayed(name), recorded_limit(replayed(name)))
    assert check.predicted, check.predicted_why
    assert check.limit.source == "inferred"


# Packing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-llama_3-steps", *FUZZ[:4]])
def test_a_packing_lies_between_what_is_live_and_what_the_allocator_reserved(name: str) -> None:
    code = program(name)
    packed = pack(code, code.evidence.config)
    assert packed is not None
    bounds = lower_bounds(code, code.evidence.config)
    assert bounds.requested_bytes <= packed.at_least_bytes <= packed.found_bytes
    assert packed.found_bytes <= simulate(code, code.evidence.config).peak_reserved_bytes
    assert pack(code, code.evidence.config, most=10) is None


def test_a_placement_is_as_low_as_what_is_live_where_lifetimes_nest() -> None:
    """Of three blocks the first two are never live together, so that they share an address."""
    size, start, end = (np.array(column, dtype=np.int64) for column in ([8, 8, 4], [0, 5, 2], [5, 9, 7]))
    assert _place_by_size(size, start, end) == 12
    together = np.zeros(3, dtype=np.int64)
    assert _place_by_size(size, together, together + 1) == 20


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(1, 9)), max_size=25))
def test_a_placement_holds_what_is_live(blocks: list[tuple[int, int, int]]) -> None:
    size, start, last = (np.array([block[i] for block in blocks], dtype=np.int64) for i in range(3))
    end = start + last
    order = np.argsort(-size, kind="stable")
    found = _place_by_size(size[order], start[order], end[order])
    live = max((int(size[(start <= t) & (end > t)].sum()) for t in range(30)), default=0)
    assert live <= found <= int(size.sum())


@pytest.mark.parametrize("policy", [Policy.RISING, Policy.FALLING, Policy.DRIVER])
def test_segments_that_no_address_space_holds_are_refused_in_one_line(policy: Policy) -> None:
    driver = CardDriver(AllocatorConfig(), AddressSpace(policy, Hints({}, {}), ()))
    with pytest.raises(UsageError, match="more than any device"):
        for _ in range(40):
            driver.place(1, (1 << 59) - 512)
