"""Plans that fit, proven and no dearer than needed; and the ladder, a fair share an option, exact to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest

from memtrace.allocator.config import AllocatorConfig
from memtrace.cli import main
from memtrace.estimate.estimate import kernels_of
from memtrace.estimate.fit import SAFETY_SHARE, FitPlan, Search
from memtrace.estimate.forecast import RunPlan, forecast
from memtrace.estimate.ladder import _LEAST, ladder
from memtrace.estimate.moves import OPTIONS, FitChange, FitRun, moves
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import model_shape
from memtrace.estimate.schedule import steps_of
from memtrace.estimate.source import ShapeSource
from memtrace.render.fit_text import LINES, _plan

MIB = 1 << 20
TINY = ShapeSource(model_shape("tiny-llama"))
HEAVY = RunOptions(sequence=2000, batch=2, checkpointing=False, attention="eager")
CONFIGURATIONS = [
    RunOptions(sequence=2048), RunOptions(sequence=2048, checkpointing=False), RunOptions(sequence=512, batch=8),
    RunOptions(sequence=1024, rank=64, optimizer="adamw_torch"), RunOptions(sequence=1024, attention="eager"),
    RunOptions(sequence=1024, keep_logits=True), RunOptions(sequence=1024, quant="none", prepare_kbit=False),
    RunOptions(sequence=1024, quant="int8", rank=8), HEAVY, RunOptions(sequence=128, rank=8, loss="chunked"),
]  # fmt: skip


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_the_ladder_sums_to_the_whole(options: RunOptions) -> None:
    rungs = ladder(TINY, options)
    assert sum(rung.adds_bytes for rung in rungs) == TINY.requested_peak(replace(options, accumulation=1), DEVICE)


DEVICE = kernels_of(None).device


def test_a_share_is_the_mean_over_all_orders() -> None:
    options = replace(_LEAST, sequence=1024, checkpointing=False, attention="eager")
    fields = {"length": "sequence", "no checkpointing": "checkpointing", "attention": "attention"}
    sums: dict[str, Fraction] = dict.fromkeys(fields, Fraction(0))
    for order in permutations(fields):
        at, before = _LEAST, TINY.requested_peak(_LEAST, DEVICE)
        for name in order:
            at = replace(at, **{fields[name]: getattr(options, fields[name])})
            after = TINY.requested_peak(at, DEVICE)
            sums[name] += Fraction(after - before, 6)
            before = after
    shares = {rung.option: rung.adds_bytes for rung in ladder(TINY, options)}
    assert shares.pop("smallest configuration") == TINY.requested_peak(_LEAST, DEVICE)
    assert shares.keys() == sums.keys()
    assert all(abs(shares[name] - sums[name]) <= 1 for name in shares)


def searched(limit_mib: int, keep: tuple[str, ...] = ()) -> Search:
    plan = RunPlan(TINY, HEAVY, steps_of([500, 2000, 900, 1400], batch=2))
    return Search(FitRun(plan, AllocatorConfig(limit_bytes=limit_mib * MIB)), keep)


@pytest.mark.parametrize("limit_mib", [3000, 1000, 500])
def test_every_plan_fits_and_none_of_its_changes_can_be_left_out(limit_mib: int) -> None:
    search = searched(limit_mib)
    plans = search.plans()
    assert not search.as_is.fits and plans
    assert [plan.cost for plan in plans] == sorted(plan.cost for plan in plans)
    safe = AllocatorConfig(limit_bytes=int(limit_mib * MIB * (1 - SAFETY_SHARE)))
    for plan in plans:
        again = forecast(plan.forecast.plan, replace(plan.forecast.config, limit_bytes=safe.limit_bytes))
        assert again.fits and plan.margin_bytes == limit_mib * MIB - plan.forecast.peak_reserved_bytes
        assert plan.as_json()["basis"] == "forecast" and plan.slowdown in ("none", "small", "large")
        indices = tuple(search._moves.index(move) for move in plan.moves)
        for gone in indices if len(indices) > 1 else ():
            assert not search._fits(tuple(i for i in indices if i != gone))


def test_what_costs_nothing_comes_first() -> None:
    """Eager attention's matrices are most of this run: another kernel is free."""
    first = searched(3000).plans()[0]
    assert [change.option for change in first.changes] == ["attention"] and first.slowdown == "none"


def test_what_is_to_be_kept_is_kept() -> None:
    kept = ("attention", "length", "targets")
    plans = searched(1500, keep=kept).plans()
    assert plans and not set(kept) & {change.option for plan in plans for change in plan.changes}


def test_a_run_that_fits_needs_no_plan_and_nothing_helps_below_the_weights() -> None:
    assert searched(20_000).as_is.fits
    assert searched(20).plans() == ()


def test_every_option_has_its_lines() -> None:
    assert set(LINES) == set(OPTIONS) == {move.option for move in moves()}
    trainers = list(LINES["rank"])
    assert all(list(lines) == trainers for lines in LINES.values())


@pytest.mark.parametrize(("rows", "now", "times"), [(4, 2, 2), (4, 1, 4), (3, 1, 3), (8, 1, 8)])
def test_smaller_batches_come_with_as_much_more_accumulation(rows: int, now: int, times: int) -> None:
    """Rows at once times micro-batches a step stay what they were, however often the batch was halved."""
    change = FitChange("micro-batch", str(rows), str(now), "")
    plan = FitPlan((change,), (), searched(20_000).as_is, 0)
    lines = {line[4:18].strip(): line[19:] for line in _plan(1, plan)[2:]}
    assert now * times >= rows > now * (times - 1)
    assert lines["Trainer"] == f"per_device_train_batch_size={now}, gradient_accumulation_steps={times}*M"
    assert lines["axolotl"] == f"micro_batch_size: {now}, gradient_accumulation_steps: {times}*M"


@pytest.mark.parametrize(
    ("lengths", "more", "is_short"),
    [("900", ["--batch", "4"], True), ("900,900,900,900", ["--batch", "4"], False), ("900", [], False),
     ("900,900", ["--accumulation", "4"], True), ("900,900", ["--batch", "2", "--steps", "3"], False)],
)  # fmt: skip
def test_fewer_lengths_than_a_step_takes_are_told(
    lengths: str, more: list[str], is_short: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (["fit", "--no-ladder"], ["forecast"]):
        assert main([*verb, "--model", "tiny-llama", "--lengths", lengths, *more]) == 0
        assert ("a step of this run takes 4" in capsys.readouterr().out) == is_short


ARGS = ["fit", "--model", "tiny-llama", "--lengths", "500,1900,700", "--no-checkpointing", "--attn", "eager"]


def test_json_has_the_keys_of_the_contract(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main([*ARGS, "--limit", "500MiB", "--json"]) == 0
    answer = json.loads(capsysbinary.readouterr().out)
    assert answer["fits_as_is"] is False
    for plan in answer["plans"]:
        assert {"changes", "peak_reserved_bytes", "margin_bytes", "slowdown", "basis"} <= set(plan)
        assert all({"option", "from", "to", "why"} == set(change) for change in plan["changes"])
    assert sum(rung["adds_bytes"] for rung in answer["ladder"]) == answer["ladder_bytes"]


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_the_waterfall_is_drawn(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / f"ladder.{suffix}"
    assert main([*ARGS, "--limit", "8GiB", "--plot", str(target)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("It fits as it is") and "the whole" in text
    drawn = target.read_text()
    assert drawn.count("<rect") == sum("█" in line for line in text.splitlines()) > 3 and "<svg" in drawn
    assert "no checkpointing" in drawn and ("<!doctype html>" in drawn) == (suffix == "html")


def test_names_that_are_no_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGS, "--limit", "8GiB", "--keep", "speed"]) == 2
    assert "NAMES are" in capsys.readouterr().err


def test_a_model_whose_projections_are_one_weight_gets_plans_and_a_ladder() -> None:
    """Phi-3 has no ``q_proj`` to name as a target."""
    shape = model_shape("phi3-mini")
    source = ShapeSource(replace(shape, layers=2))
    options = RunOptions(sequence=1024, checkpointing=False, embeddings_require_grad=False)
    assert sum(rung.adds_bytes for rung in ladder(source, options)) == source.requested_peak(options, DEVICE)
    plan = RunPlan(source, options, steps_of([1024, 512], batch=1, accumulation=1))
    needed = forecast(plan, AllocatorConfig()).peak_reserved_bytes
    found = Search(FitRun(plan, AllocatorConfig(limit_bytes=needed * 3 // 5))).plans()
    assert found and all(plan.forecast.fits for plan in found)


@pytest.mark.parametrize("name", ["oom-fragmentation", "oom-first-step", "oom-at-load"])
def test_a_recording_without_a_configuration_says_what_is_missing_and_what_its_tensors_tell(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parents[2] / "sample_traces" / f"llama2-7b_{name}.pickle.xz"
    assert main(["fit", "--like", str(file), "--limit", "20GiB"]) == 4
    said = capsys.readouterr().err
    assert "no configuration" in said and "--model, --batch, --lengths" in said
    assert ("checkpointing off" in said) == (name != "oom-at-load")
