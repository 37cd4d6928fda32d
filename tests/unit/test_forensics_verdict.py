"""The verdict on refused layouts whose answer is known by construction, and on logs beside snapshots."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TRACES, read_text
from toy_run import MIB, Run, Toy, root, trained

from memtrace.analysis import analyse
from memtrace.explain.answer import Explanation
from memtrace.explain.explain import explain_log, explain_snapshot
from memtrace.explain.snapshot_facts import measure_pieces, verdict_at
from memtrace.history.layout import layout_at
from memtrace.history.refusals import refusals
from memtrace.history.timeline import build
from memtrace.snapshot.container import open_stream
from memtrace.snapshot.decoder.decode import decode
from memtrace.snapshot.load import from_raw


def refuse(run: Run, size: int) -> None:
    with pytest.raises(MemoryError):
        run.alloc(size, *root())


def explained(run: Run, **known: object) -> Explanation:
    return explain_snapshot(run.analysis(), **known)  # type: ignore[arg-type]


def comb(limit: int, teeth: int, card_free: int = 64 << 30) -> Run:
    """Every other block of 12 MiB is free; each lies in a segment of 24 MiB whose other half is in use."""
    run = Run(limit, card_free)
    names = []
    for _ in range(teeth):
        whole = run.alloc(24 * MIB, *root())
        run.free(whole)
        names += [run.alloc(12 * MIB, *root()), run.alloc(12 * MIB, *root())]
    run.free(*names[::2])
    return run


def test_pieces_that_together_would_hold_the_request() -> None:
    run = comb(limit=480 * MIB, teeth=20)
    refuse(run, 100 * MIB)
    answer = explained(run)
    assert (answer.verdict, answer.confidence) == ("fragmentation", "measured")
    assert "240.0 MiB was free inside reserved memory, in 20 pieces" in " ".join(answer.because)
    assert "reserved_in_pieces" in {f.id for f in answer.findings}


def test_pieces_are_counted_by_pool_and_stream() -> None:
    run = comb(limit=480 * MIB, teeth=19)
    small = run.alloc(1000, *root())
    refuse(run, 100 * MIB)
    analysis = run.analysis()
    event = analysis.timeline.oom_events[-1]
    pieces = measure_pieces(layout_at(analysis.timeline, event), refusals(analysis.timeline)[-1])
    assert pieces.usable_bytes == 12 * MIB and pieces.own_free_bytes == 19 * 12 * MIB
    assert pieces.elsewhere_bytes == 2 * MIB - 1024  # the rest of the small segment serves no large request
    assert pieces.releasable_bytes == 0 and pieces.slack_bytes == pieces.own_free_bytes + pieces.elsewhere_bytes
    assert small is not None


def test_more_than_there_is() -> None:
    run = comb(limit=480 * MIB, teeth=20)
    refuse(run, 300 * MIB)  # 240 MiB free in pieces
    answer = explained(run)
    assert answer.verdict == "budget" and "would not have held it" in " ".join(answer.because)


def test_a_request_larger_than_the_capacity() -> None:
    run = comb(limit=480 * MIB, teeth=2)
    refuse(run, 500 * MIB)
    assert explained(run, capacity_bytes=480 * MIB).because[0].startswith("The request alone")
    assert explained(run).verdict == "budget"


def test_few_pieces_are_no_fragmentation() -> None:
    run = Run(limit=2000 * MIB)
    for _ in range(99):
        run.alloc(20 * MIB, *root())
    whole = run.alloc(20 * MIB, *root())
    run.free(whole)
    run.alloc(10 * MIB, *root())
    refuse(run, 11 * MIB)
    answer = explained(run)
    assert answer.verdict == "budget"


def test_a_full_card_is_measured_without_a_limit() -> None:
    run = comb(limit=480 * MIB, teeth=20, card_free=30 * MIB)
    refuse(run, 100 * MIB)
    answer = explained(run)
    assert answer.capacity is not None and (answer.capacity.kind, answer.capacity.source) == ("card", "measured")
    assert answer.capacity.low_bytes == answer.capacity.high_bytes == (480 + 30) * MIB
    assert answer.verdict == "fragmentation" and "process_limit" not in {f.id for f in answer.findings}


def test_others_hold_the_card() -> None:
    run = comb(limit=480 * MIB, teeth=20, card_free=30 * MIB)
    refuse(run, 300 * MIB)
    run.extra = {"version": 1, "device_total_bytes": 24 << 30}
    answer = explained(run)
    assert answer.verdict == "not_this_process"
    assert "outside_allocator" in {f.id for f in answer.findings}


def test_refused_below_what_was_held_before_is_no_limit() -> None:
    run = Run(limit=480 * MIB)
    names = [run.alloc(40 * MIB, *root()) for _ in range(12)]
    run.free(*names)
    run.machine.empty_cache()
    raw = run.raw()
    # The cache is given back, then 40 MiB are refused although 480 MiB had been held: a limit can't explain it.
    stack = raw["device_traces"][0][0]["frames"]
    spans = [e for e in raw["device_traces"][0] if e["action"] == "segment_alloc"]
    flush = [{"filename": "/x/torch/cuda/memory.py", "line": 1, "name": "empty_cache"}]
    for event in spans:
        raw["device_traces"][0].append({**event, "action": "segment_free", "frames": flush})
    raw["device_traces"][0].append({**spans[0], "action": "oom", "addr": 0, "device_free": 60 << 30, "frames": stack})
    snapshot = from_raw(raw, "refused.pickle")
    answer = explain_snapshot(analyse(build(snapshot, snapshot.devices[0])))
    assert answer.verdict == "limit" and answer.capacity is None
    assert "no limit that stays the same" in " ".join(answer.because)


def test_a_recorded_limit_is_exact() -> None:
    run = comb(limit=480 * MIB, teeth=20)
    refuse(run, 100 * MIB)
    run.extra = {"version": 1, "limit_bytes": 480 * MIB, "device_total_bytes": 80 << 30}
    answer = explained(run)
    assert answer.capacity is not None and answer.capacity.is_exact and answer.capacity.source == "recorded"
    assert answer.oom is not None and answer.oom["limit_bytes"] == 480 * MIB


def test_what_the_pass_still_needed_decides_between_pieces_and_budget() -> None:
    free = trained(steps=2, layers=8)
    peak = free.run.analysis().timeline.peaks()[1].size_bytes
    short = Toy(layers=8, run=Run(limit=peak - 150 * MIB)).load().adapters()
    with pytest.raises(MemoryError):
        short.step()
    answer = explained(short.run)
    assert answer.verdict == "budget" and answer.when is not None and answer.when.first_step


def test_the_last_of_several_refusals_is_explained() -> None:
    run = comb(limit=480 * MIB, teeth=20)
    refuse(run, 300 * MIB)
    refuse(run, 100 * MIB)
    answer = explained(run)
    assert answer.verdict == "fragmentation" and any("2 requests were refused" in line for line in answer.because)
    first = run.analysis().timeline.oom_events[0]
    assert verdict_at(run.analysis(), first)[0].verdict == "budget"


def test_a_refusal_only_the_log_saw() -> None:
    log = "RuntimeError: CUDA error: out of memory\n"
    answer = explain_snapshot(trained(checkpointing=True).run.analysis(), reading=read_text(log))
    assert answer.verdict == "unknown" and answer.oom is not None and answer.findings
    assert explain_log(read_text(log)).verdict == "unknown"


def test_a_log_without_messages() -> None:
    answer = explain_log(read_text("epoch 1 loss 2.0\n" * 50))
    assert answer.verdict == "unknown" and answer.oom is None and answer.ooms == () and answer.findings == ()


def _raw(name: str) -> dict:
    with open_stream(TRACES / f"{name}.pickle.xz") as opened:
        return decode(opened.stream, opened.head, opened.name)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), start=st.floats(0, 1), stop=st.floats(0, 1))
def test_any_window_of_a_recording_is_answered(seed: int, start: float, stop: float) -> None:
    raw = _raw(random.Random(seed).choice(["tiny-llama_3-steps", "llama2-7b_oom-first-step"]))
    trace = raw["device_traces"][0]
    low, high = sorted((round(start * len(trace)), round(stop * len(trace))))
    raw["device_traces"][0] = trace[low:high]
    snapshot = from_raw(raw, "window.pickle")
    answer = explain_snapshot(analyse(build(snapshot, snapshot.devices[0])))
    assert answer.because and answer.verdict
    assert "base_not_quantized" not in {f.id for f in answer.findings}
