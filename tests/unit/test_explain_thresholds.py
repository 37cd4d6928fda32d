"""Thresholds of verdict, course, sizes and comparison: a made case on each side of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import analysis, info, parse_log
from toy_run import COPY, LOADER, MIB, Run, Toy, root

from memtrace.analysis import Analysis
from memtrace.answers.diff.paths import match_files
from memtrace.attribution.phases import Phase, Phases
from memtrace.estimate.placement import Peaks
from memtrace.explain import forecaster, snapshot_facts
from memtrace.explain.course import Course, forward_progress
from memtrace.explain.dims import dims_of, layer_count
from memtrace.explain.explain import explain_snapshot
from memtrace.explain.facts import ByteSpan, FactSource, OomFacts
from memtrace.explain.log_answer import verdict_from_log
from memtrace.explain.sizes import possible_models
from memtrace.explain.verdict import judge


@pytest.mark.parametrize(("low", "said"), [(9500, "about 9.28 GiB"), (9499, "less than 9.77 GiB")])
def test_an_inferred_limit_is_named_while_its_bounds_are_within_a_twentieth(low: int, said: str) -> None:
    known = {"asked": 2000, "allocated": 9000, "reserved": 9000, "slack": 0}
    spans = {name: ByteSpan.exactly(value * MIB) for name, value in known.items()}
    limit = ByteSpan(low * MIB, 10000 * MIB)
    found = judge(OomFacts(FactSource.SNAPSHOT, limit=limit, **spans))  # type: ignore[arg-type]
    assert found.verdict == "budget" and said in found.because[0]


@pytest.mark.parametrize(("needed", "said"), [(3000, False), (3001, True)])
def test_what_was_still_to_come_is_said_from_half_more_than_the_request_on(needed: int, said: bool) -> None:
    sizes = {"asked": 2000, "allocated": 9000, "reserved": 9000, "slack": 0, "limit": 10000}
    spans = {name: ByteSpan.exactly(value * MIB) for name, value in sizes.items()}
    found = judge(OomFacts(FactSource.SNAPSHOT, still_needed_bytes=needed * MIB, **spans))  # type: ignore[arg-type]
    assert any("still to come" in sentence for sentence in found.because) is said


@pytest.mark.parametrize(("slack", "free", "confidence"), [(499, (410, 580), "derived"), (500, (409, 579), "guess")])
def test_pieces_below_half_of_the_request_leave_no_doubt(slack: int, free: tuple[int, int], confidence: str) -> None:
    sizes = {"asked": 1000, "allocated": 9000, "reserved": 9000 + slack, "slack": slack}
    spans = {name: ByteSpan.exactly(value * MIB) for name, value in sizes.items()}
    spans["free"] = ByteSpan(free[0] * MIB, free[1] * MIB)
    found = judge(OomFacts(FactSource.TEXT, **spans))  # type: ignore[arg-type]
    assert (found.verdict, found.confidence) == ("budget", confidence)


@pytest.mark.parametrize(("size", "named"), [("63.00", False), ("64.00", True)])
def test_a_process_is_named_from_64_mib_on(size: str, named: bool) -> None:
    log = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 0 bytes is "
        f"free. Process 7 has {size} MiB memory in use. Including non-PyTorch memory, this process has 23.90 GiB "
        "memory in use. Of the allocated memory 23.00 GiB is allocated by PyTorch, and 0.40 GiB is reserved by PyTorch "
        "but unallocated."
    )
    assert any("Process 7" in sentence for sentence in verdict_from_log(parse_log(log)).worth_saying) is named


@pytest.mark.parametrize(("unlike", "done"), [(2, 4), (3, 3)])
def test_a_first_layer_counts_while_nine_tenths_of_it_are_like_the_others(unlike: int, done: int) -> None:
    layer = list(range(20))
    first = [100 + site if site < unlike else site for site in layer]
    site = np.array([*first, *layer * 3, 999], dtype=np.int64)
    count = len(site)
    course = Course(
        is_alloc=np.ones(count, dtype=np.bool_), site=site, level=np.arange(count, dtype=np.int64) * MIB, base_bytes=0,
        phases=Phases(np.array([0, count]), np.array([Phase.FORWARD], dtype=np.uint8), np.array([0]), "recorded"),
        begins=True, layers=8,
    )  # fmt: skip
    progress = forward_progress(course, count - 1)
    assert progress is not None and (progress.done, progress.bytes_per_layer) == (done, 20 * MIB)


def loaded_with(*sizes: int, layers: int = 6) -> Analysis:
    """A toy trained for two steps whose layers have weights of these sizes beside."""
    toy = Toy(run=Run(), layers=4).load()
    for _ in range(layers):
        for size in sizes:
            toy.run.alloc(size, COPY, LOADER, *root(5))
    toy.adapters()
    return toy.step().step().run.analysis()


@pytest.mark.parametrize(("norm", "tokens"), [(64 << 10, 8 * MIB >> 16), (128 << 10, None)])
def test_norms_are_vectors_of_up_to_64_kib(norm: int, tokens: int | None) -> None:
    run = loaded_with(norm)
    found = dims_of(run, 0, len(run.timeline))
    assert (found.tokens if found is not None else None) == tokens


@pytest.mark.parametrize(("matrix", "layers"), [(16 << 10, 7), (15 << 10, None)])
def test_layers_are_counted_by_matrices_from_16_kib_on(matrix: int, layers: int | None) -> None:
    run = Run()
    for _ in range(7):
        run.alloc(matrix, COPY, LOADER, *root(5))
        run.alloc(5 * MIB, COPY, LOADER, *root(5))
    run.alloc(9 * MIB, COPY, LOADER, *root(5))
    assert layer_count(run.analysis()) == layers


@pytest.mark.parametrize(("share", "said"), [(0.009, False), (0.011, True)])
def test_growth_since_the_pass_before_is_said_from_one_percent_on(share: float, said: bool) -> None:
    def run(limit: int | None, kept: int) -> Toy:
        toy = Toy(run=Run(limit=limit), layers=6).load().adapters()
        for _ in range(3):
            toy.step()
        if kept:
            toy.run.alloc(kept, *root(30))
        return toy

    held = run(None, 0).run.analysis().timeline.peaks()
    toy = run(held[2].size_bytes, round(share * held[1].size_bytes))
    with pytest.raises(MemoryError):
        toy.step(1.0)
        toy.run.alloc(64 << 30, *root(31))
    answer = explain_snapshot(toy.run.analysis())
    assert answer.when is not None and bool(answer.when.grew_bytes) is said
    assert any("Since the same point" in sentence for sentence in answer.because) is said


@pytest.mark.parametrize(("off", "speaks"), [(0.049, True), (0.051, False), (-0.049, True), (-0.051, False)])
def test_a_forecast_counts_while_it_meets_the_peak_within_a_twentieth(
    off: float, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = analysis("tiny-llama_3-steps")
    peak = seen.timeline.peaks()[1].size_bytes
    options = SimpleNamespace(tokens=64, batch=1, accumulation=1, hidden_bytes=2)
    monkeypatch.setattr(forecaster, "setup_of", lambda _: SimpleNamespace(options=options, shape=None))
    monkeypatch.setattr(forecaster, "recorded_tokens", lambda *_: [64])
    predicted = Peaks(0, round(peak * (1 + off)), peak)
    monkeypatch.setattr(forecaster.Forecaster, "peaks", lambda *_: predicted)
    found = forecaster.forecaster_of(seen, None)
    assert (found is not None) is speaks


@pytest.mark.parametrize(("others", "same"), [(["d"], True), (["d", "e"], False)])
def test_a_renamed_file_holds_at_least_half_of_the_functions(others: list[str], same: bool) -> None:
    found = match_files({"x/old.py": ["a", "b", "c"]}, {"y/new.py": ["a", "b", *others]})
    assert found == ({"y/new.py": "x/old.py"} if same else {})


@pytest.mark.parametrize(
    ("expandable", "low", "retried", "exact", "high"),
    [
        (True, 980, None, True, 1010), (False, 1000, None, True, 1010),
        (False, 1000, 1004, True, 1004), (False, 1000, 1004, False, 1010), (False, 1000, 2000, True, 1010),
        (False, 1000, 1000, True, 1010),  # more was granted later: that was another limit
    ],
)  # fmt: skip
def test_expandable_segments_overshoot_a_limit_by_one_mapping_and_retries_bound_it(
    expandable: bool, low: int, retried: int | None, exact: bool, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal: Any = SimpleNamespace(reserved_bytes=970 * MIB, need_bytes=40 * MIB, device_free_bytes=5000 * MIB)
    monkeypatch.setattr(snapshot_facts, "refusals", lambda _: [refusal])
    snapshot = SimpleNamespace(
        settings={"expandable_segments": expandable}, noted_bytes={}.get, memtrace={}, torch_at_least=""
    )
    peak = SimpleNamespace(size_bytes=1000 * MIB)
    replay = SimpleNamespace(exact=exact, limit_below_bytes=retried and retried * MIB)
    timeline: Any = SimpleNamespace(snapshot=snapshot, peaks=lambda: (peak, peak, peak), replay=replay)
    span, source = snapshot_facts._limit(timeline, refusal, refusal.device_free_bytes, None, None)
    assert span == ByteSpan(low * MIB, high * MIB - 1) and source == "inferred"


def test_norms_that_are_trained_tell_the_tokens_too() -> None:
    made, run = analysis("own-adamw_oom"), info("own-adamw_oom")["cfg"]
    phases = made.attribution.facts.phases
    first = int(np.flatnonzero(phases.phase == Phase.FORWARD)[0])
    found = dims_of(made, int(phases.start[first]), int(phases.start[first + 1]))
    assert found is not None and found.tokens == run["seq_len"] * run["batch"]


@pytest.mark.parametrize(("asked", "model"), [("966.00 MiB", None), ("1.05 GiB", "qwen2.5-1.5b in 4 bits")])
def test_a_request_may_be_a_whole_model_from_1_gib_on(asked: str, model: str | None) -> None:
    """966 MiB would be llama3.2-1b in 4 bits: below a gibibyte too much else has such a size."""
    (message,) = parse_log(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has 0 bytes free."
    )
    said = "".join(possible_models(message))
    assert (f"is the size of {model}" in said) if model is not None else said == ""
