"""Whole runs, forecast: against the README's own error, against runs on a GPU, against the engine run step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tools.long_run import long_run

from memtrace.allocator.config import AllocatorConfig
from memtrace.cli import forecast as cli_forecast
from memtrace.cli import main
from memtrace.estimate.forecast import Forecast, RunPlan, forecast, needs_bytes, orders, prepare
from memtrace.estimate.options import RunOptions
from memtrace.estimate.placement import place
from memtrace.estimate.presets import gpu_preset, model_preset
from memtrace.estimate.schedule import MicroBatch, parse_padding, read_lengths, steps_of
from memtrace.estimate.shapes import shape_from_config
from memtrace.estimate.source import ShapeSource
from memtrace.explain.forecaster import judge_forecast
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Action

ROOT = Path(__file__).parent.parent.parent
MEASURED = ROOT / "tests" / "truth" / "measured" / "runs_of_varying_length.jsonl"
README_LENGTHS = (916, 989, 210, 658, 1175, 1123, 957, 749, 1104, 861, 1322)
README_LIMIT = int(22.086 * (1 << 30))


def plan_of(model: str, options: RunOptions, lengths: Any, **more: Any) -> RunPlan:
    steps = steps_of(lengths, batch=options.batch, accumulation=options.accumulation)
    return RunPlan(ShapeSource(replace(model_preset(model), **more)), options, steps)


def without_checkpointing(**options: Any) -> RunOptions:
    return RunOptions(**{"sequence": 2, "checkpointing": False, "embeddings_require_grad": False, **options})


@pytest.fixture(scope="module")
def readme() -> Forecast:
    plan = plan_of("llama2-7b", without_checkpointing(optimizer="paged_adamw_8bit"), README_LENGTHS)
    return forecast(plan, AllocatorConfig(limit_bytes=README_LIMIT))


# ---- the README's own error ------------------------------------------------------------------------------------------
def test_the_error_of_the_readme_is_forecast_as_it_was_recorded(readme: Forecast) -> None:
    recorded = load(ROOT / "sample_traces" / "llama2-7b_oom-fragmentation.pickle.xz").devices[0].trace
    action, size = recorded.action.tolist(), recorded.size.tolist()
    oom = readme.oom
    assert oom is not None and (oom.step, oom.phase, oom.micro_batch) == (10, "forward", 0)
    assert oom.requested_bytes == size[action.index(Action.OOM)] == 86 << 20
    assert readme.segment_allocs == action.count(Action.SEGMENT_ALLOC) == 646
    assert readme.segment_frees == action.count(Action.SEGMENT_FREE) == 140
    assert readme.num_alloc_retries == 3
    held = 0
    highest = 0
    for act, bytes_ in zip(action, size, strict=True):
        held += bytes_ * ((act == Action.SEGMENT_ALLOC) - (act == Action.SEGMENT_FREE))
        highest = max(highest, held)
    assert readme.peak_reserved_bytes == highest == 23_672_651_776


def test_the_judge_says_of_the_forecast_what_it_says_of_the_recording(
    readme: Forecast, capsys: pytest.CaptureFixture[str]
) -> None:
    assert readme.oom is not None
    assert main(["explain", str(ROOT / "sample_traces" / "llama2-7b_oom-fragmentation.pickle.xz"), "--json"]) == 0
    assert judge_forecast(readme.oom, readme.config).verdict == json.loads(capsys.readouterr().out)["verdict"]


def test_needs_is_enough_and_two_mebibytes_less_are_not() -> None:
    options = without_checkpointing(optimizer="paged_adamw_8bit")
    plan = plan_of("llama2-7b", options, README_LENGTHS, layers=4)
    cells = prepare(plan)
    free = forecast(plan, AllocatorConfig(), cells)
    needs = needs_bytes(plan, AllocatorConfig(), free, cells)
    assert needs is not None and free.peaks.allocated_bytes < needs <= free.peak_reserved_bytes
    assert forecast(plan, AllocatorConfig(limit_bytes=needs), cells).fits
    pressed = forecast(plan, AllocatorConfig(limit_bytes=(needs + free.peak_reserved_bytes) // 2), cells)
    dead = forecast(plan, AllocatorConfig(limit_bytes=needs - (2 << 20)), cells)
    assert not dead.fits
    for found in (pressed, dead):  # the same answer whatever the limit that was asked about
        assert found.num_alloc_retries
        assert needs_bytes(plan, found.config, found, cells) == needs


# ---- runs on a GPU ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("run", [json.loads(line) for line in MEASURED.open()], ids=lambda run: run["name"])
def test_measured_runs_step_by_step(run: dict[str, Any]) -> None:
    """Every step's peaks to the byte, and the step of death."""
    asked = run["o"]
    options = RunOptions(
        sequence=2,
        checkpointing=asked["ckpt"],
        embeddings_require_grad=asked["ckpt"],
        optimizer=asked["optim"],
        attention=asked.get("attn", "sdpa"),
    )
    shape = shape_from_config({"model_type": run["family"], **run["kw"]}, run["name"])
    plan = RunPlan(ShapeSource(shape), options, steps_of(run["lengths"]))
    found = forecast(plan, AllocatorConfig(limit_bytes=run["limit"]))
    done = found.steps[:-1] if found.oom is not None else found.steps
    got = [(s.peak_requested_bytes, s.peak_allocated_bytes, s.peak_reserved_bytes) for s in done]
    assert got == [(s["requested"], s["allocated"], s["reserved"]) for s in run["steps"]]
    if run["oom"] is None:
        assert found.fits
        return
    assert found.oom is not None
    refused = found.oom
    assert (found.oom.step, found.oom.phase) == (run["oom"]["step"], run["oom"]["phase"])
    assert (refused.requested_bytes, refused.allocated_bytes) == (run["oom"]["requested"], run["oom"]["allocated"])
    assert found.num_alloc_retries == run["oom"]["num_alloc_retries"]


# ---- against the engine, step by step --------------------------------------------------------------------------------
@st.composite
def runs(draw: st.DrawFn) -> RunPlan:
    model = draw(st.sampled_from(["tiny-llama", "gemma2-2b", "qwen2-7b", "phi3-mini", "qwen3-4b"]))
    options = RunOptions(
        sequence=2,
        batch=draw(st.integers(1, 2)),
        checkpointing=draw(st.booleans()),
        embeddings_require_grad=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["adamw_torch", "adamw_8bit", "paged_adamw_8bit", "sgd"])),
        attention=draw(st.sampled_from(["sdpa", "eager"])),
        prepare_kbit=draw(st.booleans()),
        autocast=draw(st.booleans()),
        keep_logits=draw(st.booleans()),
        hold_loss=draw(st.booleans()),
        loss=draw(st.sampled_from(["full", "chunked", "fused"])),
        quant=draw(st.sampled_from(["nf4", "nf4-dq", "int8", "none"])),
        accumulation=draw(st.integers(1, 3)),
        chunk_tokens=512,
    )
    lengths = draw(st.lists(st.integers(2, 2500), min_size=2, max_size=10))
    return plan_of(model, options, lengths, layers=3)


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(runs(), st.sampled_from([None, 1.0, 0.9]))
def test_cells_do_what_the_engine_does_step_by_step(plan: RunPlan, share: float | None) -> None:
    """However the lengths vary: the same allocations as the engine run over all steps, so the same peaks."""
    stream, starts = long_run(plan, gpu_preset("h200").device)
    free = place(stream)
    limit = None if share is None else int(int(free.reserved.max()) * share)
    placed = place(stream, AllocatorConfig(limit_bytes=limit)) if limit is not None else free
    found = forecast(plan, AllocatorConfig(limit_bytes=limit))
    assert found.fits == (placed.refused_event is None)
    done = found.steps[:-1] if not found.fits else found.steps
    for step, begin, end in zip(done, starts, [*starts[1:], len(stream.events)], strict=False):
        before = max(begin - 1, 0)
        assert step.peak_requested_bytes == int(placed.requested[before:end].max())
        assert step.peak_allocated_bytes == int(placed.allocated[before:end].max())
        assert step.peak_reserved_bytes == int(placed.reserved[before:end].max())
    if placed.refused_event is not None:
        assert found.oom is not None
        assert found.oom.tensor_bytes == stream.sizes[stream.events[placed.refused_event]]
        assert found.peak_reserved_bytes == int(placed.reserved.max())


def test_expandable_segments_reserve_less_of_varying_lengths(readme: Forecast) -> None:
    found = forecast(readme.plan, AllocatorConfig(expandable_segments=True, limit_bytes=README_LIMIT))
    assert found.fits and found.peak_reserved_bytes < readme.peak_reserved_bytes


def test_orders_are_those_of_single_forecasts(readme: Forecast) -> None:
    plan = plan_of("tiny-llama", without_checkpointing(), range(100, 1500, 60))
    limit = AllocatorConfig(limit_bytes=900 << 20)
    shuffled = [steps_of(range(100, 1500, 60), order="shuffled", seed=seed) for seed in range(3)]
    found = orders(plan, limit, shuffled)
    for outcome, steps in zip(found, shuffled, strict=True):
        alone = forecast(replace(plan, steps=steps), limit)
        assert (outcome.fits, outcome.peak_reserved_bytes) == (alone.fits, alone.peak_reserved_bytes)
        assert outcome.oom_step == (alone.oom.step if alone.oom else None)
    assert len({outcome.peak_reserved_bytes for outcome in found}) > 1


# ---- lengths and steps -----------------------------------------------------------------------------------------------
def test_lengths_become_padded_micro_batches_and_steps() -> None:
    lengths = [10, 20, 30, 40, 50]
    assert steps_of(lengths, batch=2, accumulation=2) == (
        (MicroBatch(2, 20, True), MicroBatch(2, 40, True)),
        (MicroBatch(1, 50),),
    )
    assert steps_of(lengths, batch=2, order="longest-first")[0] == (MicroBatch(2, 50, True),)
    assert steps_of([16, 16], batch=2, padding=parse_padding("multiple:16")) == ((MicroBatch(2, 16),),)
    assert steps_of([10, 20], batch=2, padding=parse_padding("max:16")) == ((MicroBatch(2, 16, True),),)
    assert steps_of([10, 20], batch=2, padding=parse_padding("none")) == ((MicroBatch(1, 30),),)
    once, again = steps_of(lengths, order="shuffled", seed=1), steps_of(lengths, order="shuffled", seed=1)
    assert once == again != steps_of(lengths, order="shuffled", seed=2)
    assert [step[0].length for step in steps_of(lengths, steps=7)] == [10, 20, 30, 40, 50, 10, 20]


def test_lengths_are_read_from_what_data_sets_are_kept_in(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    assert read_lengths("5, 7") == [5, 7]
    (tmp_path / "plain.txt").write_text("5\n\n7\n")
    (tmp_path / "rows.jsonl").write_text('{"length": 5}\n{"num_tokens": 7}\n{"input_ids": [1, 2, 3]}\n')
    parquet.write_table(arrow.table({"input_ids": [[1, 2], [1, 2, 3]]}), tmp_path / "rows.parquet")
    (tmp_path / "folder").mkdir()
    with arrow.OSFile(str(tmp_path / "folder" / "data-00000-of-00001.arrow"), "wb") as file:
        table = arrow.table({"length": [9, 8]})
        with arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    read = {name: read_lengths(str(tmp_path / name)) for name in ("plain.txt", "rows.jsonl", "rows.parquet", "folder")}
    assert read == {"plain.txt": [5, 7], "rows.jsonl": [5, 7, 3], "rows.parquet": [2, 3], "folder": [9, 8]}


@pytest.mark.parametrize(
    "bad",
    [
        ["--lengths", "1"],
        ["--lengths", "NOWHERE.txt"],
        ["--lengths", "5,6", "--padding", "wide"],
        ["--lengths", "5,6", "--order", "random"],
        ["--lengths", "5,6", "--limit", "lots"],
        ["--lengths", "5,6", "--conf", "expandable_segments:maybe"],
        [],
    ],
)
def test_bad_input_is_one_line(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "--model", "tiny-llama", *bad]) in (2, 3)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


@pytest.mark.parametrize("text", ["9" * 5000, "{" * 5000, '{"length": 1e400}', "\0", "²", "[" * 100_000])
def test_lengths_that_are_none_are_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    assert main(["forecast", "--model", "tiny-llama", "--lengths", str(file)]) in (2, 3)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


def test_the_command_says_what_the_contract_says(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ",".join(map(str, README_LENGTHS))
    command = ["forecast", "--model", "llama2-7b", "--no-checkpointing", "--optim", "paged_adamw_8bit"]
    assert main([*command, "--lengths", lengths, "--limit", "22.086GiB", "--fail-on-oom", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["basis"] == "shape engine" and found["orders"] == []
    assert found["oom"]["step"] == 10 and found["oom"]["verdict"] == "fragmentation"
    assert [step["step"] for step in found["steps"]] == list(range(11)) and found["steps"][3]["tokens"] == 658
    assert found["needs_bytes"] > README_LIMIT
    assert main(["forecast", "--model", "tiny-llama", "--lengths", "100,200,1500", "--limit", "300MiB"]) == 0
    assert "DIES in step 2, loss" in capsys.readouterr().out


def test_a_forecast_like_a_recording_takes_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "run.pickle"
    setup = ["--model", "tiny-llama", "--seq-len", "300", "--batch", "2", "--optim", "sgd", "--no-checkpointing"]
    assert main(["estimate", *setup, "--trace", str(trace), "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert main(["forecast", "--like", str(trace), "--lengths", "300,300,300,300", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_reserved_bytes"] == estimate["peak_reserved_bytes"]
    assert found["options"]["optimizer"] == "sgd" and len(found["steps"]) == 2


def test_check_takes_a_forecast_as_its_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def written(name: str, limit: str) -> str:
        command = ["forecast", "--model", "tiny-llama", "--lengths", "100,200,1500", "--limit", limit, "--json"]
        assert main(command) == 0
        (tmp_path / name).write_text(capsys.readouterr().out)
        return str(tmp_path / name)

    fits, dies = written("fits.json", "2GiB"), written("dies.json", "300MiB")
    assert main(["check", fits, "--max-peak", "2GiB"]) == 0
    assert main(["check", fits, "--max-peak", "300MiB"]) == 1
    assert main(["check", dies, "--max-peak", "2GiB"]) == 1
    assert "dies in step 2: FAILED" in capsys.readouterr().out
    assert main(["check", fits, "--baseline", fits]) == 3  # a baseline is a report


def test_the_fixture_fails_a_test_whose_run_would_die(gpu_forecast: Callable[..., Forecast]) -> None:
    assert gpu_forecast("tiny-llama", [100, 200, 1500], limit="2 GiB").fits
    with pytest.raises(pytest.fail.Exception, match="would die in step 2"):
        gpu_forecast("tiny-llama", [100, 200, 1500], limit="300 MiB")


def test_a_forecast_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ["forecast", "--model", "tiny-llama", "--lengths", "100,200,1500", "--limit", "300MiB", "--plot"]
    assert main([*command, str(tmp_path / "run.svg")]) == 0
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")
    assert main([*command, str(tmp_path / "run.svg")]) == 2  # not overwritten
    assert main([*command, str(tmp_path / "run.gif")]) == 2


# ---- what a loop does besides ----------------------------------------------------------------------------------------
def test_evaluation_comes_after_its_steps_and_leaves_nothing() -> None:
    """A batch much longer than any of training is the peak of just the steps that evaluate."""
    plan = RunPlan(ShapeSource(model_preset("tiny-llama")), RunOptions(2), steps_of([200] * 6))
    plain = forecast(plan, AllocatorConfig())
    both = replace(plan, evaluation=(MicroBatch(1, 1500),), evaluate_every=3)
    evaluated = forecast(both, AllocatorConfig())
    assert evaluated.peaks.requested_bytes > 1.5 * plain.peaks.requested_bytes
    assert [step.peak_requested_bytes for step in evaluated.steps] == [s.peak_requested_bytes for s in plain.steps]
    limit = AllocatorConfig(limit_bytes=plain.peak_reserved_bytes + (64 << 20))
    oom = forecast(both, limit).oom
    assert forecast(plan, limit).fits and oom is not None and (oom.step, oom.phase) == (2, "evaluation")


def test_padded_rows_cost_a_mask_that_grows_with_the_square() -> None:
    def peak(length: int, padded: bool) -> int:
        options = RunOptions(2, batch=2, checkpointing=False)
        plan = RunPlan(ShapeSource(model_preset("tiny-llama")), options, ((MicroBatch(2, length, padded),),) * 2)
        return forecast(plan, AllocatorConfig()).peaks.requested_bytes

    short, long = (peak(length, True) - peak(length, False) for length in (512, 1024))
    assert short > 0 and long > 3 * short


def test_clipping_changes_no_peak_but_of_the_optimizer() -> None:
    steps = steps_of([300, 700])
    both = [
        forecast(RunPlan(ShapeSource(model_preset("tiny-llama")), RunOptions(2, clips=clips), steps), AllocatorConfig())
        for clips in (False, True)
    ]
    assert both[0].peaks.requested_bytes == both[1].peaks.requested_bytes


@pytest.mark.parametrize("limit", ["900MiB", "4GiB"])
def test_the_run_written_down_is_the_run_that_was_forecast(
    limit: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    file = tmp_path / "run.pickle"
    args = ["forecast", "--model", "tiny-llama", "--lengths", "512,300,1000,64,700,1200,1900,200", "--batch", "2"]
    assert main([*args, "--limit", limit, "--trace", str(file), "--json"]) == 0
    said = json.loads(capsysbinary.readouterr().out)
    assert main(["report", str(file), "--json"]) == 0
    peaks = json.loads(capsysbinary.readouterr().out)["peaks"]
    assert peaks == {name: said[f"peak_{name}"] for name in ("requested_bytes", "allocated_bytes", "reserved_bytes")}
    assert main(["explain", str(file), "--json"]) == 0
    told = json.loads(capsysbinary.readouterr().out)
    assert (told["oom"] is None) == said["fits"] == (limit == "4GiB")
    if told["oom"] is not None:
        assert told["oom"]["tried_bytes"] == said["oom"]["requested_bytes"]
        assert told["oom"]["reserved_bytes"] == said["oom"]["reserved_bytes"]
        assert told["verdict"] == said["oom"]["verdict"]


def test_the_longest_length_survives_and_the_next_one_does_not(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def answer(lengths: str, *more: str) -> dict[str, Any]:
        assert (
            main(["forecast", "--model", "tiny-llama", "--lengths", lengths, "--limit", "900MiB", "--json", *more]) == 0
        )
        found: dict[str, Any] = json.loads(capsysbinary.readouterr().out)
        return found

    most = answer("512,1900,2400", "--longest")["longest_tokens"]
    assert most % 64 == 0 and answer(f"512,{most},{most}")["fits"]
    assert not answer(f"512,{most + 64},{most + 64}")["fits"]
    assert answer("512,600", "--longest")["longest_tokens"] == 600


@pytest.mark.parametrize("verb", [["forecast"], ["fit", "--no-ladder"]])
def test_one_step_is_said_to_be_one_and_the_next_can_need_more(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*verb, "--model", "tiny-llama", "--lengths", "700", "--no-checkpointing", "--limit"]
    assert main([*run, "1GiB", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    limit = str(one["peak_reserved_bytes"])
    assert main([*run, limit]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "in the one step that was looked at" in text and "later steps can need more" in text
    assert any("later steps can need more" in line for line in one["assumptions"])
    assert main([*run, limit, "--steps", "3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one step" not in text and "dies in step 1" in text.replace("DIES", "dies")


@pytest.mark.parametrize("verb", [["forecast"], ["fit", "--no-ladder"]])
def test_a_limit_is_said_to_leave_out_what_lies_outside_the_allocator(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for card in ([], ["--gpu", "h200"]):
        assert main([*verb, "--model", "tiny-llama", "--lengths", "100,200", "--limit", "1GiB", *card]) == 0
        assert "the limit is on what the allocator reserves; 771.0 MiB outside it" in " ".join(
            capsys.readouterr().out.split()
        )


@pytest.mark.parametrize(
    ("verb", "given", "meant"),
    [
        ("forecast", "--seq-len", "--lengths"),
        ("fit", "--seq-len=9", "--lengths"),
        ("estimate", "--limit", "--capacity"),
    ],
)
def test_another_verbs_option_leads_to_this_verbs_own(
    verb: str, given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--seq-len", "64"] if verb == "estimate" else []
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--model", "tiny-llama", *needed, given, "22"])
    assert stopped.value.code == 2 and f"did you mean {meant}?" in capsys.readouterr().err


def test_what_is_enough_for_a_long_run_is_said_unasked(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough, and no more than it reserves where nothing limits it; ``--needs`` finds no more than that."""
    monkeypatch.setattr(cli_forecast, "_NEEDS_MICRO_BATCHES", 40)
    lengths = ",".join(str(16 + 37 * n % 400) for n in range(41))
    run = ["forecast", "--model", "tiny-llama", "--lengths", lengths, "--json"]

    def answer(*more: str) -> dict[str, Any]:
        assert main([*run, *more]) == 0
        found: dict[str, Any] = json.loads(capsysbinary.readouterr().out)
        return found

    free = answer("--limit", "20GiB")
    assert free["fits"] and not free["needs_is_least"]
    assert free["peak_allocated_bytes"] < free["needs_bytes"] <= free["peak_reserved_bytes"] + (2 << 20)
    assert answer("--limit", str(free["needs_bytes"]))["fits"]
    dies = answer("--limit", str(free["peak_allocated_bytes"] * 3 // 4), "--needs")
    assert not dies["fits"] and dies["needs_is_least"] and dies["needs_bytes"] <= free["needs_bytes"]


def test_explain_names_the_phase_and_step_that_the_forecast_names(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    file, seen = tmp_path / "run.pickle", set()
    run = ["forecast", "--model", "tiny-llama", "--lengths", "512,300,1900", "--no-checkpointing", "--json", "--force"]
    for limit in ("180MiB", "240MiB", "300MiB", "600MiB", "1200MiB"):
        assert main([*run, "--limit", limit, "--trace", str(file)]) == 0
        said = json.loads(capsysbinary.readouterr().out)["oom"]
        assert main(["explain", str(file), "--json"]) == 0
        at = json.loads(capsysbinary.readouterr().out)["when"]
        assert at["phase"] == {"loss": "forward", "recompute": "backward"}.get(said["phase"], said["phase"])
        assert at["step"] == (said["step"] if said["step"] >= 0 else None)
        seen.add((at["phase"], at["step"]))
    assert {phase for phase, _ in seen} >= {"forward", "backward"} and {step for _, step in seen} >= {0, 2}
