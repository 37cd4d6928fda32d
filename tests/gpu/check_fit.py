"""The first plan of ``memtrace fit``, really run on a GPU: does it fit, and was its peak the predicted one?

    python tests/gpu/check_fit.py plan PLAN.jsonl                  # anywhere: limits under which the runs die
    python tests/gpu/check_fit.py run PLAN.jsonl OUT.jsonl [SECONDS]   # on the GPU
    python tests/gpu/check_fit.py show OUT.jsonl                   # the table

Half of the cases are configurations: their first plan is made beforehand. The other half are recordings: the run is
made to die under its limit while it is recorded, and ``fit --like`` that recording says what to change. Each plan then
runs in a fresh process under the limit. Models have their full width and few layers, their checkpoints hold zeros.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.gpu.record_runs import DEVICE_TOTAL, MODELS, lengths_of, write_zeros

if TYPE_CHECKING:
    from memtrace.estimate.forecast import RunPlan
    from memtrace.estimate.moves import FitRun
    from memtrace.estimate.options import RunOptions

Row = dict[str, Any]
JOBS = 8
STEPS = 12
_KEPT = {"checkpointing": False, "embeddings_require_grad": False}
# name → (model, options, kind of lengths, the limit as a share of what the run needs)
CONFIGURATIONS: dict[str, tuple[str, Row, str, float]] = {
    "uniform": ("llama", _KEPT | {"optimizer": "adamw_torch"}, "uniform", 0.97),
    "lognormal": ("mistral", _KEPT | {"optimizer": "adamw_8bit"}, "lognormal", 0.8),
    "rare": ("qwen2", {"optimizer": "adamw_torch", "rank": 64}, "rare", 0.85),
    "growing": ("qwen3", {"optimizer": "paged_adamw_8bit", "keep_logits": True}, "growing", 0.9),
    "eager": ("phi3", _KEPT | {"attention": "eager"}, "uniform", 0.75),
    "batched": ("llama-1b", _KEPT | {"batch": 4, "optimizer": "sgd"}, "uniform", 0.6),
    "half": ("llama", _KEPT | {"prepare_kbit": False, "rank": 32}, "lognormal", 0.7),
    "plain": ("mistral", {"quant": "none", "prepare_kbit": False, "batch": 2}, "rare", 0.75),
    "tight": ("qwen2", {"optimizer": "adamw_8bit", "batch": 2}, "uniform", 0.5),
    "gemma": ("gemma2", {"attention": "eager", "optimizer": "adamw_torch"}, "growing", 0.8),
}
# name → (model, options, the limit as a share of what the run needs)
RECORDINGS: dict[str, tuple[str, Row, float]] = {
    "rec-kept": ("llama", _KEPT | {"sequence": 1024, "optimizer": "adamw_torch"}, 0.8),
    "rec-near": ("llama", {"sequence": 2048, "optimizer": "adamw_torch", "rank": 64}, 0.96),
    "rec-logits": ("qwen2", {"sequence": 2048, "keep_logits": True, "optimizer": "paged_adamw_8bit"}, 0.9),
    "rec-batch": ("mistral", _KEPT | {"sequence": 512, "batch": 4, "optimizer": "adamw_8bit"}, 0.65),
    "rec-eager": ("phi3", {"sequence": 1536, "attention": "eager"}, 0.8),
    "rec-plain": ("mistral", {"sequence": 1024, "quant": "none", "prepare_kbit": False} | _KEPT, 0.7),
    "rec-large": ("qwen3", {"sequence": 2048, "optimizer": "adamw_torch"}, 0.6),
    "rec-small": ("llama-1b", _KEPT | {"sequence": 1024, "batch": 2, "optimizer": "sgd"}, 0.75),
    "rec-half": ("llama", _KEPT | {"sequence": 1024, "prepare_kbit": False, "batch": 2}, 0.5),
    "rec-tight": ("qwen2", _KEPT | {"sequence": 2048, "rank": 128}, 0.7),
}


def _options(given: Row) -> RunOptions:
    from memtrace.estimate.options import RunOptions

    return RunOptions(**{"sequence": 2, **given, "targets": tuple(given.get("targets", ("all-linear",)))})


def _run_plan(model: str, options: RunOptions, lengths: list[int] | None = None) -> RunPlan:
    """Steps of one micro-batch each, its rows of one length: no mask. All as long as the options say by default."""
    from memtrace.estimate.forecast import RunPlan
    from memtrace.estimate.schedule import steps_of
    from memtrace.estimate.shapes import shape_from_config
    from memtrace.estimate.source import ShapeSource

    rows = [length for length in lengths or [options.sequence] * STEPS for _ in range(options.batch)]
    source = ShapeSource(shape_from_config(MODELS[model], model))
    return RunPlan(source, options, steps_of(rows, batch=options.batch, accumulation=1))


# ---- before the runs -------------------------------------------------------------------------------------------------
def plan(out: Path) -> None:
    """Each case with a limit under which its forecast dies; the first plan of each configuration."""
    from memtrace.allocator.conf_text import parse_conf
    from memtrace.estimate.forecast import forecast, needs_bytes, prepare
    from memtrace.estimate.moves import FitRun

    with out.open("w") as file:
        for number, (name, case) in enumerate((CONFIGURATIONS | RECORDINGS).items()):
            model, given, share = case[0], case[1], case[-1]
            options = _options(given)
            lengths = lengths_of(str(case[2]), STEPS, number) if name in CONFIGURATIONS else None
            run_plan = _run_plan(model, options, lengths)
            config, cells = parse_conf("", (2, 11), DEVICE_TOTAL), prepare(run_plan)
            needs = needs_bytes(run_plan, config, forecast(run_plan, config, cells), cells)
            assert needs is not None
            limited = config.with_limit(int(needs * share))
            oom = forecast(run_plan, limited, cells).oom
            assert oom is not None
            assert name in CONFIGURATIONS or oom.step >= 0  # a recording that ends in loading has no adapters to read
            row: Row = {"name": name, "model": model, "limit_bytes": limited.limit_bytes, "options": asdict(options)}
            if name in CONFIGURATIONS:
                row |= first_plan(FitRun(run_plan, limited))
            file.write(json.dumps(row) + "\n")
            changes = _changes(row) if name in CONFIGURATIONS else "(recorded first)"
            print(f"{name:<12}{model:<10}{needs / 2**30:7.2f} GiB needed, limit {row['limit_bytes'] / 2**30:6.2f} GiB: "
                  f"{changes}", flush=True)  # fmt: skip


def first_plan(run: FitRun, real: FitRun | None = None) -> Row:
    """What ``fit`` puts first, with everything needed to run it. Raises ValueError where it has no plan.

    The changes are made to the ``real`` run where ``run`` is only what could be read from its recording.
    """
    from memtrace.estimate.fit import Search

    search = Search(run)
    if search.as_is.fits:
        raise ValueError("the forecast says that it fits as it is")
    plans = search.plans()
    if not plans:
        raise ValueError("no plan")
    done = run if real is None else real
    for move in plans[0].moves:
        made = move.make(done)
        if made is not None:  # else the real run has it already
            done = made[0]
    return {
        "changes": plans[0].as_json()["changes"],
        "planned": {
            "options": asdict(done.plan.options),
            "steps": [[[batch.rows, batch.length] for batch in step] for step in done.plan.steps],
            "conf": "expandable_segments:True" if done.config.expandable_segments else "",
            "limit_bytes": run.config.limit_bytes,
        },
        "predicted_bytes": plans[0].forecast.peak_reserved_bytes,
    }


def like(recording: Path, row: Row) -> Row:
    """The first plan of ``memtrace fit --like RECORDING --limit LIMIT --steps 12``, made to the run of ``row``."""
    import argparse

    from memtrace.cli import fit, forecast
    from memtrace.estimate.moves import FitRun

    parser = argparse.ArgumentParser()
    fit.add_arguments(parser)
    args = parser.parse_args(["--like", str(recording), "--limit", str(row["limit_bytes"]), "--steps", str(STEPS)])
    asked, run_plan = forecast.plan_from(args)
    config = forecast.limit_from(args, asked)[0]
    real = FitRun(_run_plan(row["model"], _options(row["options"])), config)
    return first_plan(FitRun(run_plan, config), real) | {"read": asdict(run_plan.options)}


# ---- on the GPU ------------------------------------------------------------------------------------------------------
def record_oom(row: Row, folder: Path, file: Path) -> Row:
    """The run as given, recorded until it dies; then what ``fit`` makes of the recording."""
    from memtrace.record import qlora
    from memtrace.snapshot.load import load

    written = qlora.record_run(
        str(folder), qlora.step_config(_options(row["options"]), STEPS), file, cap_bytes=row["limit_bytes"], force=True
    )
    if not load(written).memtrace.get("oom"):
        raise ValueError("the run as given did not die")
    return like(written, row)


def one(row: Row, folder: Path, device: str = "cuda:0") -> Row:
    """The planned run in this process: whether it lived, and the most that it reserved."""
    import torch

    from memtrace.record import qlora
    from memtrace.record.qlora import loss_and_output

    planned, on_gpu = row["planned"], device != "cpu"
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(planned["limit_bytes"] / total)
    options = _options(planned["options"])
    cfg = qlora.step_config(options, len(planned["steps"]))
    done, message = 0, ""
    try:
        model = qlora.add_adapters(qlora.load_base(folder, cfg, device), cfg)
        optimizer = qlora.make_optimizer(model, cfg)
        vocab = qlora.vocabulary(model)
        model.train()
        for step in planned["steps"]:
            for rows, length in step:
                ids = torch.randint(0, vocab, (rows, length)).to(device)
                with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=cfg.autocast):
                    loss, out = loss_and_output(model, ids, cfg.loss, cfg.chunk_tokens)
                kept = out if cfg.keep_logits else None
                del out
                loss.backward()
                del loss, kept
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
    except torch.OutOfMemoryError as error:
        message = str(error)[:400]
    peak = torch.cuda.max_memory_reserved() if on_gpu else 0
    return {"fits": not message, "steps_done": done, "measured_bytes": peak, "message": message}


def in_child(work: str, row: Row, deadline: float) -> Row:
    """``work`` on one row in a fresh process; its row with what it adds, or with why it ``failed``."""
    environment = os.environ | {"PYTORCH_ALLOC_CONF": row.get("planned", {}).get("conf", ""), "OMP_NUM_THREADS": "2"}
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, work], input=json.dumps(row), capture_output=True, text=True, env=environment,
            timeout=max(deadline - began, 1), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return row | {"failed": f"{work}: no time left"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return row | {"failed": f"{work}: {done.stderr[-900:]}"}
    return row | json.loads(lines[-1]) | {f"{work}_s": round(time.monotonic() - began, 1)}


def case(row: Row, deadline: float) -> Row:
    """One case: recorded first where it has no plan yet."""
    if "planned" not in row:
        row = in_child("record", row, deadline)
    return row if "failed" in row else in_child("one", row, deadline)


def run(plan_file: Path, out: Path, seconds: float) -> None:
    """All cases, several at a time; those that take two processes begin first. What is done in time is kept."""
    deadline = time.monotonic() + seconds
    rows = [json.loads(line) for line in plan_file.open()]
    rows.sort(key=lambda row: "planned" in row)
    with ThreadPoolExecutor(JOBS) as pool, out.open("w") as file:
        models = [{"name": model, "model": model} for model in dict.fromkeys(row["model"] for row in rows)]
        for made in pool.map(lambda row: in_child("zeros", row, deadline), models):
            print(made, flush=True)
        for found in pool.map(lambda row: case(row, deadline), rows):
            file.write(json.dumps(found) + "\n")
            file.flush()
            print(found["name"], found.get("failed", found.get("fits")), found.get("record_s"), found.get("one_s"),
                  flush=True)  # fmt: skip


# ---- after the runs --------------------------------------------------------------------------------------------------
def _changes(row: Row) -> str:
    return ", ".join(f"{change['option']} {change['from']} → {change['to']}" for change in row["changes"])


def show(out: Path) -> None:
    """A Markdown table, and how many fit."""
    fit = count = 0
    print("| case | model | limit GiB | first plan | end | predicted GiB | measured GiB | off |")
    print("|---|---|---:|---|---|---:|---:|---:|")
    for row in map(json.loads, out.open()):
        count += 1
        if "failed" in row:
            print(f"| {row['name']} | {row['model']} | {row['limit_bytes'] / 2**30:.2f} | {row['failed'][-120:]!r} |")
            continue
        fit += row["fits"]
        end = "fits" if row["fits"] else f"died in step {row['steps_done']}"
        guess, real = row["predicted_bytes"], row["measured_bytes"]
        print(f"| {row['name']} | {row['model']} | {row['limit_bytes'] / 2**30:.2f} | {_changes(row)} | {end} | "
              f"{guess / 2**30:.2f} | {real / 2**30:.2f} | {guess / max(real, 1) - 1:+.1%} |")  # fmt: skip
    print(f"\n{fit} of {count} fit")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "plan":
        plan(Path(arguments[0]))
    elif command == "run":
        run(Path(arguments[0]), Path(arguments[1]), float(arguments[2]) if len(arguments) > 2 else 480)
    elif command == "show":
        show(Path(arguments[0]))
    else:
        this = json.load(sys.stdin)
        zeros = Path("/tmp/zeros") / this["model"]
        if command == "zeros":
            write_zeros(MODELS[this["model"]], zeros)
            print("{}")
        elif command == "record":
            print(json.dumps(record_oom(this, zeros, Path("/tmp") / f"{this['name']}.pickle")))
        else:
            print(json.dumps(one(this, zeros, *arguments)))
