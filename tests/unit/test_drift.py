"""Growth told from noise of the sequence lengths, on made logs with a known answer, and the log itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import analysis, shared_recordings, trace_path

from memtrace.answers.steps import (
    StepSeries,
    analyse,
    from_recording,
    from_snapshot_key,
    read_log,
    read_series,
    render,
    trend,
)
from memtrace.cli import main
from memtrace.errors import NoAnswerError
from memtrace.record import steplog
from memtrace.record.steplog import COLUMNS, StepLog

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="module", autouse=True)
def each_recording_is_read_once() -> Iterator[None]:
    with shared_recordings():
        yield


def rows(
    steps: int, seed: int, leak: float = 0, per_token: float = 0, tokens: bool = True, loose: float = 0
) -> list[dict[str, Any]]:
    """A log of ``steps`` steps: ``leak`` bytes a step, lengths of 200 to 4,000 tokens at ``per_token`` bytes."""
    random = np.random.default_rng(seed)
    lengths = random.integers(200, 4000, steps) if per_token else np.full(steps, 2048)
    found, reserved = [], 0.0
    for step in range(steps):
        living = 6 * GIB + (0 if step == 0 else 400 * MIB) + leak * step
        peak = living + per_token * lengths[step] + random.normal(0, 0.2 * MIB)
        reserved = max(reserved, peak) + (loose if step % 7 == 3 else 0)
        found.append(
            {"step": step, "allocated_bytes": living, "reserved_bytes": reserved, "peak_allocated_bytes": peak}
            | {"tokens": int(lengths[step]) if tokens else 0}
        )
    return found


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), steps=st.integers(60, 600))
def test_varying_lengths_are_not_taken_for_growth(seed: int, steps: int) -> None:
    found = analyse(read_series(rows(steps, seed, per_token=1.2 * MIB)))
    assert found.verdict == "lengths"
    assert found.per_token_bytes == pytest.approx(1.2 * MIB, rel=0.02)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), steps=st.integers(60, 600))
def test_a_leak_is_found_under_the_noise_of_the_lengths(seed: int, steps: int) -> None:
    leak = 300 * MIB / steps
    found = analyse(read_series(rows(steps, seed, leak=leak, per_token=1.2 * MIB)))
    assert found.verdict == "growth"
    assert found.allocated.per_step_bytes == pytest.approx(leak, rel=0.05)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_steady_runs_are_steady(seed: int) -> None:
    assert analyse(read_series(rows(200, seed))).verdict == "steady"


def test_fragmentation_is_reserved_growth_that_lengths_do_not_explain() -> None:
    assert analyse(read_series(rows(200, 1, per_token=1.2 * MIB, loose=40 * MIB))).verdict == "fragmentation"


def test_growth_of_peaks_with_unknown_lengths_is_unclear() -> None:
    entries = rows(100, 1, tokens=False)
    for entry in entries:
        entry["peak_allocated_bytes"] += entry["step"] * 3 * MIB
    assert analyse(read_series(entries)).verdict == "unclear"


def test_trend_is_not_moved_by_spikes() -> None:
    step = np.arange(100.0)
    values = 5 * step
    values[[10, 50, 90]] += 10_000
    assert trend(step, values).per_step_bytes == pytest.approx(5, rel=0.1)
    assert trend(step, np.ones(100)).p_value == 1.0


@pytest.mark.parametrize("count", [7, 240, 241, 999, 5000])
def test_a_long_series_counts_by_the_medians_of_blocks(count: int) -> None:
    steps, values = np.arange(count) * 1.0, np.random.default_rng(count).normal(size=count)
    edges = np.linspace(0, count, min(count, 240) + 1).astype(int).tolist()
    x, y = ([np.median(part[a:b]) for a, b in pairwise(edges)] for part in (steps, values))
    pairs = [(y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i + 1, len(x))]
    assert trend(steps, values).per_step_bytes == np.median(pairs)


def test_unusable_logs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoAnswerError, match="too few"):
        analyse(read_series(rows(5, 1)))
    with pytest.raises(NoAnswerError, match="not a per-step log"):
        read_series([{"nothing": 1}])
    with pytest.raises(NoAnswerError):
        from_snapshot_key(None)
    (tmp_path / "log.jsonl").write_text("not json\n")
    with pytest.raises(NoAnswerError):
        read_log(tmp_path / "log.jsonl")


class Counters:
    """A backend with statistics only."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.now, self.peak, self.fails = 100, 100, False

    def levels(self, device: int) -> tuple[int, int, int, int, int, int]:
        if self.fails:
            raise RuntimeError("gone")
        return self.now, self.now, self.peak, self.peak, 5, 0

    def current_device(self) -> int:
        return 0

    def reset_peaks(self, device: int) -> None:
        self.peak = self.now


def test_step_log_keeps_a_row_a_step_and_never_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = Counters()
    log = StepLog(backend)  # type: ignore[arg-type]
    for step in range(20):
        backend.peak = 1000 + step
        log.called(2, 7)
        log.called(2, 3)
        log.note(step)
    assert backend.peak == backend.now
    assert log.rows()["columns"] == list(COLUMNS)
    assert log.rows()["rows"][3][4:] == [1003, 1003, 14, 7, 5, 0]
    (tmp_path / "run.steps.jsonl").write_bytes(b"".join(log.as_json_lines()))
    assert len(read_log(tmp_path / "run.steps.jsonl")) == 20
    assert analyse(from_snapshot_key(log.rows())).verdict == "steady"
    assert main(["steps", str(tmp_path / "run.steps.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "steady"
    assert render(analyse(read_log(tmp_path / "run.steps.jsonl")))[0].startswith("steady")
    backend.fails = True
    log.note(20)
    assert len(log) == 20


def test_steps_too_short_to_read_counters_in_have_no_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Counters()
    log, every = StepLog(backend, resets=False), StepLog(backend)  # type: ignore[arg-type]
    monkeypatch.setattr(steplog, "_SHARE", 10**9)
    for step in range(20):
        backend.peak = 1000
        log.note(step)
        assert backend.peak == 1000  # only read
        every.note(step)
    assert (len(log), len(every)) == (1, 20)


def test_the_log_is_bounded_and_read_from_any_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steplog, "MAX_ROWS", 12_000)
    log = StepLog(Counters())  # type: ignore[arg-type]
    for step in range(15_000):
        log.note(step)
    rows, following = log.since(0, 3)
    assert [row[0] for row in rows] == [5000, 5001, 5002] and following == 5003
    assert [row[0] for row in log.since(14_998)[0]] == [14_998, 14_999] and log.since(15_000) == ([], 15_000)


def test_three_days_of_one_step_a_second_fit_in_fifty_megabytes() -> None:
    log = StepLog(Counters())  # type: ignore[arg-type]
    row = [10**6, 1_800_000_000_000_000, *[80 * GIB] * 4, 32_768, 4096, 79 * GIB, 10**4]
    log._cells.extend(row * 259_200)
    assert len(log) == 72 * 3600
    assert log._cells.itemsize * len(log._cells) < 50 << 20
    assert sum(map(len, log.as_json_lines())) < 50 << 20


def test_steps_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "steps.svg"
    args = ["steps", str(trace_path("llama2-7b_variable-length")), "--plot", str(out)]
    assert main(args) == 0
    assert b"<svg" in out.read_bytes()
    assert main(args) == 2 and "--force" in capsys.readouterr().err


def series(
    allocated: Any = 0.0, reserved: Any = 0.0, peak: Any = 0.0, tokens: Any = 1000.0, steps: int = 60
) -> StepSeries:
    """A log without noise: what a column adds to 10 GiB."""
    base = np.full(steps, float(10 * GIB))
    columns = [base + values for values in (allocated, reserved, peak)]
    return StepSeries(np.arange(float(steps)), columns[0], columns[1], columns[2], np.zeros(steps) + tokens)


def rising(total: float, steps: int = 60) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """From 0 by even steps, so that ``total`` is what is added between the third step and the last."""
    return np.clip(np.arange(steps) - 2.0, 0, None) * (total / (steps - 3))


def test_growth_counts_from_half_a_percent_of_the_peak_and_8_mib() -> None:
    assert analyse(series(allocated=rising(45 * MIB))).verdict == "steady"  # of 10 GiB half a percent is 51.2 MiB
    assert analyse(series(allocated=rising(58 * MIB))).verdict == "growth"
    small = -9 * GIB
    assert analyse(series(small + rising(7 * MIB), small, small)).verdict == "steady"
    assert analyse(series(small + rising(9 * MIB), small, small)).verdict == "growth"


def test_fragmentation_counts_from_four_times_that() -> None:
    assert analyse(series(reserved=rising(3.8 * 51.2 * MIB))).verdict == "steady"
    assert analyse(series(reserved=rising(4.2 * 51.2 * MIB))).verdict == "fragmentation"


@pytest.mark.parametrize(("inversions", "verdict"), [(3, "growth"), (5, "steady")])
def test_chance_is_ruled_out_at_one_in_a_thousand(inversions: int, verdict: str) -> None:
    """Ten steps after warm-up: with three neighbours swapped p is 0.0007, with five 0.0023."""
    order = np.arange(12.0)
    for i in range(inversions):
        order[[2 + 2 * i, 3 + 2 * i]] = order[[3 + 2 * i, 2 + 2 * i]]
    found = analyse(series(allocated=order * 20 * MIB, steps=12))
    assert found.verdict == verdict
    assert 0.0005 < found.allocated.p_value < 0.003


def test_twelve_steps_are_enough_and_the_first_two_are_warm_up() -> None:
    with pytest.raises(NoAnswerError, match="11 steps"):
        analyse(series(steps=11))
    early = np.where(np.arange(14) < 2, -8.0 * GIB, 0.0)
    found = analyse(series(reserved=early, steps=14))
    assert (found.verdict, found.reserved_growth_bytes) == ("steady", 0)
    late = np.where(np.arange(14) < 3, -8.0 * GIB, 0.0)
    assert analyse(series(reserved=late, steps=14)).verdict == "fragmentation"


@pytest.mark.parametrize(("share", "verdict"), [(0.42, "steady"), (0.58, "lengths")])
def test_lengths_explain_the_peaks_from_half_of_their_variance_on(share: float, verdict: str) -> None:
    turn = np.arange(400)
    of_tokens, of_others = np.where(turn % 2, 1.0, -1.0), np.where(turn // 2 % 2, 1.0, -1.0)
    peak = 64 * MIB * (np.sqrt(share) * of_tokens + np.sqrt(1 - share) * of_others)
    found = analyse(series(peak=peak, tokens=1000 + 500 * of_tokens, steps=400))
    assert found.verdict == verdict
    assert found.explained_share == pytest.approx(share, abs=0.02)


def test_a_recording_with_recognised_steps_is_a_series() -> None:
    """Lengths of 24 recorded steps vary, and nothing is left behind."""
    series = from_recording(analysis("llama2-7b_variable-length"))
    assert len(series) == 24 and series.step[0] == 0
    assert (series.tokens >= 128).all() and (series.tokens <= 1500).all() and np.ptp(series.tokens) > 500
    assert (series.peak_allocated_bytes > series.allocated_bytes).all()
    assert (series.reserved_bytes >= series.peak_allocated_bytes).all()
    found = analyse(series)
    assert found.verdict in ("lengths", "fragmentation") and found.explained_share > 0.9
    assert abs(found.allocated.total_bytes) < 8 * MIB


def test_a_recording_with_a_leak_grows_and_a_short_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse(from_recording(analysis("llama2-7b_kept-graphs"))).verdict == "growth"
    with pytest.raises(NoAnswerError, match="3 whole steps"):
        from_recording(analysis("tiny-llama_3-steps"))
    assert main(["steps", str(trace_path("tiny-llama_3-steps"))]) == 4
    assert "too few" in capsys.readouterr().err
    assert main(["steps", str(trace_path("llama2-7b_variable-length"))]) == 0
    assert "24 steps" in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, -1, True, "1", None, [1], 2**70], ids=repr)
@pytest.mark.parametrize("column", ["step", "allocated_bytes", "tokens", "holes_bytes"])
def test_what_is_no_count_is_no_row(value: Any, column: str) -> None:
    entries = [row | {"holes_bytes": 0} for row in rows(20, 1)]
    entries[7][column] = value
    if value is None and column in ("tokens", "holes_bytes"):
        assert len(read_series(entries)) == 20
        return
    with pytest.raises(NoAnswerError, match="not a per-step log"):
        read_series(entries)
