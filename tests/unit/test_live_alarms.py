"""Alarms: said well before a run dies, not said where it lives; on made series, made runs and recordings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_runs import HEALTHY, MadeRun, made_run
from support import analysis

from memtrace.answers.steps import StepSeries, read_series
from memtrace.live.alarms import SOON_STEPS, Alarm, FreePieces, headroom_bytes, judge, steady_rise
from memtrace.live.replay import PlayedRun

MIB, GIB = 1 << 20, 1 << 30
AHEAD, EVERY = 50, 10


def first(series: StepSeries, count: int) -> StepSeries:
    """What was known after ``count`` steps."""
    columns = (series.step, series.allocated_bytes, series.reserved_bytes, series.peak_allocated_bytes, series.tokens)
    holes = series.holes_bytes
    return StepSeries(*(column[:count] for column in columns), None if holes is None else holes[:count])


def alarms_of(run: MadeRun, until: int | None = None) -> dict[str, Alarm]:
    """The first alarm of each kind, looked for every tenth step."""
    series, found = read_series(run.rows), {}
    for count in range(EVERY, (until or len(series)) + 1, EVERY):
        for alarm in judge(first(series, count), run.capacity_bytes, run.pieces[count - 1]):
            found.setdefault(alarm.id, alarm)
    return found


# (kind, seed, limit in MiB): the limit is such that the run dies after a hundred steps.
DYING_LEAKS = (
    ("graph every step", 11, 4358), ("graph every step", 12, 4379), ("graph every step", 15, 3634),
    ("metrics", 15, 3772), ("every fifth step", 15, 3585), ("growing cache", 15, 4928),
    ("one layer's outputs", 15, 2453), ("growing cache", 16, 3944), ("graph every step", 17, 3593),
    ("growing cache", 17, 4264),
)  # fmt: skip
DYING_FRAGMENTED = (
    ("growing pieces", 11, 4243), ("replaced buffers", 11, 4466), ("two sizes", 11, 4752), ("pinned halves", 12, 3871),
    ("growing pieces", 12, 4443), ("growing pieces", 13, 4561), ("two sizes", 13, 4581), ("pinned halves", 14, 4109),
    ("pinned rows", 14, 3853), ("growing pieces", 14, 4354),
)  # fmt: skip


@pytest.mark.parametrize("made", [DYING_LEAKS, DYING_FRAGMENTED], ids=["leaks", "fragmentation"])
def test_nine_of_ten_runs_that_will_die_are_told_fifty_steps_ahead(made: tuple[tuple[str, int, int], ...]) -> None:
    told = 0
    for kind, seed, limit_mib in made:
        run = made_run(kind, seed, 240, limit_mib)
        assert run.died is not None and run.died > 2 * AHEAD
        told += bool(alarms_of(run, run.died - AHEAD))
    assert told >= 9 and len(made) == 10


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize("seed", [21, 22])
def test_no_alarm_in_healthy_runs(kind: str, seed: int) -> None:
    run = made_run(kind, seed, 300, 4608)
    assert run.died is None
    assert alarms_of(run) == {}


def series(allocated: object = 0.0, peak: object = 0.0, holes: object = 0.0, steps: int = 60) -> StepSeries:
    base = np.full(steps, 10.0 * GIB)
    return StepSeries(
        np.arange(float(steps)), base + allocated, base + 2 * GIB, base + peak, base * 0 + 1000, holes + base * 0
    )


@settings(deadline=None, max_examples=40)
@given(mib=st.floats(0.5, 40), noise=st.integers(0, 1000), steps=st.integers(45, 200))
def test_a_steady_leak_is_measured(mib: float, noise: int, steps: int) -> None:
    rising = np.arange(float(steps)) * mib * MIB + np.random.default_rng(noise).normal(0, 0.2 * mib * MIB, steps)
    found = steady_rise(series(rising, rising, steps=steps), None)
    assert found is not None and found.kind == "growth"
    assert found.per_step_bytes == pytest.approx(mib * MIB, rel=0.25)


@settings(deadline=None, max_examples=40)
@given(noise=st.integers(0, 1000), at=st.integers(5, 55), mib=st.integers(0, 500))
def test_noise_and_single_jumps_are_no_growth(noise: int, at: int, mib: int) -> None:
    dice = np.random.default_rng(noise)
    curve = dice.normal(0, 20 * MIB, 60) + np.where(np.arange(60) >= at, mib * MIB, 0)
    assert steady_rise(series(curve, 1 * GIB), 24 * GIB) is None


def test_growth_that_lengths_explain_is_none() -> None:
    tokens = np.linspace(200, 4000, 60)
    made = series(tokens * 100_000, tokens * 100_000)
    longer = StepSeries(made.step, made.allocated_bytes, made.reserved_bytes, made.peak_allocated_bytes, tokens)
    unknown = StepSeries(made.step, made.allocated_bytes, made.reserved_bytes, made.peak_allocated_bytes, tokens * 0)
    assert steady_rise(unknown, None) is not None
    mixed = tokens[np.random.default_rng(0).permutation(60)]
    varied = StepSeries(made.step, 10 * GIB + mixed * 100_000, made.reserved_bytes, made.peak_allocated_bytes, mixed)
    assert steady_rise(varied, None) is None
    assert judge(longer, 10**15) == ()


def test_holes_that_grow_are_fragmentation() -> None:
    (alarm,) = judge(series(0, 1 * GIB, np.arange(60.0) * 10 * MIB), 18 * GIB)
    assert alarm.id == "fragmentation" and "holes" in alarm.line


def test_when_it_ends_is_said_and_soon_is_an_alarm_of_its_own() -> None:
    rising = np.arange(60.0) * 32 * MIB
    far, near = 12 * GIB + int(rising[-1]), 10 * GIB + int(rising[-1]) + 40 * 32 * MIB
    assert [alarm.id for alarm in judge(series(rising, rising), far)] == ["growth"]
    alarms = judge(series(rising, rising), near)
    assert [alarm.id for alarm in alarms] == ["growth", "forecast"]
    assert alarms[0].oom_step == pytest.approx(59 + 40, abs=1)
    slow = np.arange(60.0) * 0.5 * MIB  # sixty steps of it say nothing of a million
    assert judge(series(slow, slow), 80 * GIB) == ()


@pytest.mark.parametrize(("steps", "is_told"), [(21, False), (22, True)])
def test_growth_counts_once_twenty_steps_follow_the_first_two(steps: int, is_told: bool) -> None:
    assert (steady_rise(series(np.arange(float(steps)) * MIB, steps=steps), None) is not None) == is_told


@pytest.mark.parametrize(("left_steps", "is_told"), [(395, True), (405, False)])
def test_growth_counts_if_it_ends_within_twenty_windows(left_steps: int, is_told: bool) -> None:
    rising = np.arange(22.0) * MIB
    found = steady_rise(series(rising, steps=22), 10 * GIB + left_steps * MIB)
    assert (found is not None) == is_told


@pytest.mark.parametrize(("mib", "is_told"), [(3.5, False), (4.5, True)])
def test_growth_counts_from_four_mebibytes_on(mib: float, is_told: bool) -> None:
    assert (steady_rise(series(np.linspace(0, mib * MIB, 22), steps=22), None) is not None) == is_told


@pytest.mark.parametrize(("share", "is_told"), [(0.1, False), (0.2, True)])
def test_each_quarter_of_a_window_has_to_bring_a_part_of_the_rise(share: float, is_told: bool) -> None:
    rising = np.interp(np.arange(22), [4, 9, 14, 19], np.array([0, share, (3 + share) / 2, 3]) * 100 * MIB)
    assert (steady_rise(series(rising, steps=22), None) is not None) == is_told


@pytest.mark.parametrize(("ago", "counts"), [(20, True), (21, False)])
def test_the_headroom_is_that_of_the_last_twenty_steps(ago: int, counts: bool) -> None:
    peak = np.where(np.arange(60) == 60 - ago, 3.0 * GIB, 1.0 * GIB)
    assert headroom_bytes(series(0, peak), 20 * GIB) == (7 if counts else 9) * GIB


@pytest.mark.parametrize(("step", "alarms"), [(59 + SOON_STEPS, ["forecast"]), (60 + SOON_STEPS, []), (58, [])])
def test_a_forecast_of_known_lengths(step: int, alarms: list[str]) -> None:
    assert [alarm.id for alarm in judge(series(), None, None, step)] == alarms


@pytest.mark.parametrize(
    ("pieces", "alarms"),
    [
        (FreePieces(512 * MIB, 511 * MIB, 100 * MIB), ["pieces"]),
        (FreePieces(512 * MIB, 512 * MIB, 0), []),
        (FreePieces(512 * MIB, 0, 512 * MIB), []),
    ],
)
def test_free_pieces_against_the_last_steps_largest_request(pieces: FreePieces, alarms: list[str]) -> None:
    assert [alarm.id for alarm in judge(series(), 30 * GIB, pieces)] == alarms


def test_headroom_below_a_twentieth() -> None:
    assert headroom_bytes(series(0, 9 * GIB), 20 * GIB) == 1 * GIB
    assert headroom_bytes(series(), None) is None
    assert judge(series(0, 9 * GIB), 20 * GIB) == ()
    assert [alarm.id for alarm in judge(series(0, 9 * GIB + 2), 20 * GIB)] == ["headroom"]


def test_too_little_says_nothing() -> None:
    assert judge(series(steps=0), 20 * GIB) == ()
    assert judge(series(np.arange(12.0) * GIB, steps=12), 200 * GIB) == ()


def played(name: str, capacity_bytes: int | None = None) -> PlayedRun:
    replay = PlayedRun(analysis(name), None, capacity_bytes)
    while replay.poll(0):
        continue
    return replay


@pytest.mark.parametrize("name", ["llama2-7b_baseline", "llama2-7b_variable-length", "llama2-7b_reference-model"])
def test_healthy_recordings_sound_none(name: str) -> None:
    assert played(name, 80 * GIB).state.alarms == []


def test_a_recorded_leak_that_goes_on_is_told() -> None:
    """The bundled leak has a dozen steps; what they add is carried on."""
    rows = list(played("llama2-7b_kept-graphs", 8 * GIB).state.rows)
    leak = (rows[-1]["allocated_bytes"] - rows[2]["allocated_bytes"]) // (len(rows) - 3)
    assert leak > 30 * MIB
    longer = [*rows]
    for step in range(len(rows), 60):
        last = longer[-1]
        longer.append(last | {"step": step} | {k: last[k] + leak for k in ("allocated_bytes", "peak_allocated_bytes")})
    told = {alarm.id: alarm for n in range(20, 61) for alarm in reversed(judge(read_series(longer[:n]), 8 * GIB))}
    assert "growth" in told
    ends = (8 * GIB - rows[-1]["peak_allocated_bytes"]) // leak + len(rows)
    first_told = next(n for n in range(20, 61) if judge(read_series(longer[:n]), 8 * GIB))
    assert ends - first_told >= AHEAD
