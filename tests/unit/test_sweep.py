"""The sweep: its plan, its results on disk, the fit, and a small real sweep on a stand-in for the GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.cli import main
from memtrace.errors import UsageError
from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.ladder import ladder
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import gpu_preset, model_preset
from memtrace.estimate.source import ShapeSource
from memtrace.estimate.sweep import THINGS, Outcome, Store, Trial, as_json, fit, increments, plan, predicted, render
from memtrace.record.sweep import in_fresh_process, sweep

TARGET = RunOptions(2048, batch=4, optimizer="adamw_torch", attention="eager", checkpointing=False)


def outcome(trial: Trial, requested: int, status: str = "ok") -> Outcome:
    return Outcome(trial, status, "", requested, requested, requested + 1, "backward", {}, 1.0)


def test_plan_begins_small_adds_one_thing_at_a_time_and_ends_with_everything() -> None:
    trials = plan(TARGET)
    assert trials[0].name == "smallest"
    assert trials[-1].options == replace(TARGET, embeddings_require_grad=False)
    assert {trial.thing for trial in trials[1:-1]} == set(THINGS)
    smallest = trials[0].options
    for trial in trials[1:-1]:
        changed = {
            name
            for name in ("sequence", "batch", "attention", "checkpointing", "optimizer", "prepare_kbit", "keep_logits")
            if getattr(trial.options, name) != getattr(smallest, name)
        }
        extras = [trial.eval_batches > 0, trial.packed, trial.reference]
        assert len(changed) + sum(extras) == 1, trial.name
    assert len({trial.key("m", 2) for trial in trials}) == len(trials)


def test_plan_takes_lengths_batches_and_things() -> None:
    trials = plan(TARGET, [256, 1024], [8], ["length", "batch"])
    assert [trial.name for trial in trials] == [
        "smallest",
        "length 1024",
        "length 2048",
        "batch 4",
        "batch 8",
        "everything",
    ]
    with pytest.raises(UsageError, match="no such thing"):
        plan(TARGET, things=["nonsense"])


@given(
    constant=st.integers(1 << 30, 1 << 33),
    slope=st.integers(10_000, 2_000_000),
    lengths=st.lists(st.integers(64, 8192), min_size=2, max_size=6, unique=True),
)
def test_fit_recovers_a_straight_line(constant: int, slope: int, lengths: list[int]) -> None:
    trials = [Trial(f"length {n}", "length", RunOptions(n)) for n in sorted(lengths)]
    found = fit([outcome(trial, constant + slope * trial.options.tokens) for trial in trials])
    assert found is not None
    assert found.per_token_bytes == pytest.approx(slope, rel=1e-6)
    assert max(abs(residual.residual_bytes) for residual in found.residuals) <= 4


def test_fit_takes_a_square_term_only_where_the_line_misses() -> None:
    trials = [Trial(f"length {n}", "length", RunOptions(n)) for n in (512, 1024, 2048, 4096)]
    found = fit([outcome(t, 10**9 + 10**6 * t.options.tokens + 128 * t.options.tokens**2) for t in trials])
    assert found is not None
    assert found.per_token_squared_bytes == pytest.approx(128, rel=1e-6)
    assert fit([outcome(trials[0], 5)]) is None


def test_fit_of_the_engine_s_peaks_is_the_engine_s_affine_form() -> None:
    shape, device = replace(model_preset("tiny-llama"), layers=2), gpu_preset("h200").device
    outcomes = []
    for length in (256, 512, 1024):
        trial = Trial(f"length {length}", "length", RunOptions(length, prepare_kbit=False))
        stream = simulate_run(shape, trial.options, device)
        live = peak = 0
        for event in stream.events:
            live += stream.sizes[event] if 0 <= event < len(stream.sizes) else 0
            live -= stream.sizes[~event] if event < 0 else 0
            peak = max(peak, live)
        outcomes.append(outcome(trial, peak))
    found = fit(outcomes)
    assert found is not None
    assert all(abs(r.residual_bytes) < 0.001 * r.measured_bytes for r in found.residuals)


def test_increments_and_tables_survive_oom_and_failure() -> None:
    trials = plan(TARGET, [512, 2048], [2], ["length", "checkpointing"])
    outcomes = [outcome(trials[0], 100), outcome(trials[1], 150), outcome(trials[2], 90, "oom")]
    outcomes.append(Outcome(trials[3], "failed", "killed by signal 9"))
    assert increments(outcomes) == {
        trials[0].name: 0, trials[1].name: 50, trials[2].name: None, trials[3].name: None,
    }  # fmt: skip
    lines = list(render(outcomes, [None] * 4))
    assert any("out of memory" in line for line in lines) and any("killed by signal 9" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)
    rows = as_json(outcomes, [101, None, None, None])["rows"]
    assert rows[0]["against"] == {"signed_error_bytes": 1, "signed_error_percent": 1.0}
    json.dumps(rows)


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    trials = plan(TARGET, [512, 2048], [2], ["length"])
    measured: list[str] = []

    def measure(trial: Trial) -> Outcome:
        measured.append(trial.name)
        if trial.thing == "everything" and measured.count(trial.name) == 1:
            return Outcome(trial, "failed", "crashed")
        return outcome(trial, 1000, "oom" if trial.name == "length 2048" else "ok")

    def key(trial: Trial) -> str:
        return trial.key("model", 2)

    sweep(trials, Store(tmp_path), key, measure, lambda *_: None)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"key": "cut o')  # killed in the middle of a write
    again = sweep(trials, Store(tmp_path), key, measure, lambda *_: None)
    assert [o.status for o in again] == ["ok" if t.name != "length 2048" else "oom" for t in trials]
    assert measured == [*(trial.name for trial in trials), "everything"]  # only the failed one ran twice


def test_a_child_that_dies_is_a_failed_outcome(tmp_path: Path) -> None:
    trial = plan(TARGET)[0]
    found = in_fresh_process(str(tmp_path / "no-such-model"), 2, None, 120)(trial)
    assert found.status == "failed" and found.message


def test_predicted_leaves_out_what_the_estimate_does_not_cover() -> None:
    shape = model_preset("tiny-llama")
    trials = {trial.name: trial for trial in plan(TARGET, [256], [2])}
    assert (predicted(shape, trials["smallest"], None) or 0) > 0
    assert predicted(shape, trials["packing"], None) is None
    assert predicted(None, trials["smallest"], None) is None


def test_command_line_lists_the_plan_and_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--model", "llama2-7b", "--seq-len", "1024", "--plan"]) == 0
    assert "smallest" in capsys.readouterr().out
    assert main(["sweep", "--model", "llama2-7b", "--seq-len", "1024", "--lengths", "a", "--plan"]) == 2
    assert main(["sweep", "--model", "llama2-7b", "--seq-len", "1024", "--things", "x", "--plan"]) == 2


def test_the_measured_ladder_is_that_of_the_estimates_where_they_are_right(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Runs that measure what is estimated give the ladder of ``memtrace fit``; one that dies ends it."""
    source, status = ShapeSource(model_preset("tiny-llama")), ["ok"]

    def measure(args: Any, trials: list[Trial], limit: int | None) -> list[Outcome]:
        def one(trial: Trial) -> Outcome:
            peak = source.requested_peak(trial.options, gpu_preset("h200").device)
            phases = {"load": {"requested_bytes": 10 * peak}, "backward": {"requested_bytes": peak}}
            return replace(outcome(trial, peak, status[0]), phases=phases)

        return [one(trial) for trial in trials]

    monkeypatch.setattr("memtrace.cli.sweep._measure", measure)
    args = ["--model", "tiny-llama", "--seq-len", "512", "--no-checkpointing", "--attn", "eager", "--gpu", "h200"]
    args += ["--rank", "8", "--targets", "q_proj,v_proj", "--adapter-dtype", "bf16"]
    assert main(["sweep", *args, "--ladder", "--json"]) == 0
    said = json.loads(capsysbinary.readouterr().out)
    assert said["ladder"] == said["estimated"] and sum(r["adds_bytes"] for r in said["ladder"]) == said["ladder_bytes"]
    few = {"rank": 8, "targets": ("q_proj", "v_proj"), "adapter_dtype": "bf16"}
    options = RunOptions(512, checkpointing=False, attention="eager", **few)
    assert [r["adds_bytes"] for r in said["ladder"]] == [rung.adds_bytes for rung in ladder(source, options)]
    status[0] = "oom"
    assert main(["sweep", *args, "--ladder"]) == 4
    every = ["--batch", "2", "--quant", "none", "--rank", "64", "--keep-logits"]
    assert main(["sweep", *args, "--ladder", "--plan", *every]) == 2


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from memtrace.export.plots import plot_sweep

    trials = plan(TARGET, [512, 1024, 2048], [2], ["length", "batch"])
    plot_sweep([outcome(t, 10**9 + 10**6 * t.options.tokens) for t in trials], tmp_path / "sweep.svg")
    assert (tmp_path / "sweep.svg").read_text().startswith("<?xml")
    with pytest.raises(UsageError):
        plot_sweep([], tmp_path / "sweep.txt")


TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def test_trials_run_on_real_modules(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(name)
    from capture_standin import StandIn

    from memtrace.record import backend
    from memtrace.record.checkpoint import write_checkpoint
    from memtrace.record.sweep import measure

    write_checkpoint(TINY, tmp_path / "model", "cpu")
    target = RunOptions(32, rank=4, optimizer="adamw_torch")
    found = {}
    trials = plan(target, [16, 32], [2], ["length", "packing", "reference", "evaluation"])
    for trial in trials:
        if trial.name not in ("smallest", "length 32", "everything"):  # the last does what the others do
            continue
        small = replace(trial, options=replace(trial.options, optimizer="adamw_torch", targets=("q_proj",)))
        with StandIn() as standin, backend.use(standin):
            found[trial.name] = measure(small, str(tmp_path / "model"), 1)
    assert all(o.status == "ok" and o.peak_requested_bytes > 0 for o in found.values())
    assert found["length 32"].peak_requested_bytes > found["smallest"].peak_requested_bytes
    assert found["everything"].peak_requested_bytes > found["length 32"].peak_requested_bytes  # a second model
    with StandIn(capacity=found["smallest"].peak_requested_bytes * 4 // 5) as standin, backend.use(standin):
        trial = replace(plan(target, [16], [2])[0])
        trial = replace(trial, options=replace(trial.options, optimizer="adamw_torch", targets=("q_proj",)))
        assert measure(trial, str(tmp_path / "model"), 1).status == "oom"
