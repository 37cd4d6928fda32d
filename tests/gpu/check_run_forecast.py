"""The line that `memtrace run --forecast` and ``MemtraceCallback(forecast=True)`` say before step 0, against the run.

    python3 tests/gpu/check_run_forecast.py --out DIR [--workers 8]     # on a machine with a GPU

Each run trains in a process of its own (full width, few layers, zeros for weights, lengths that vary, shuffled), first
with room to spare and then under a limit that is a share of what it reserved. ``DIR/run_forecast.json`` has one row a
process: what was said and what became of it. ``--limits NAME=MiB…``: those runs alone, once each, under these limits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from record_runs import MODELS, lengths_of, write_zeros  # noqa: E402

Row = dict[str, Any]
STEPS = 60
AMPLE_BYTES = 30 << 30
WEIGHTS = Path("/tmp/zeros-ahead")
_LOOP: Row = {"how": "loop", "quant": "nf4-dq", "prepare": True, "checkpointing": False, "optim": "adamw_torch",
              "batch": 1, "accumulation": 1, "kind": "uniform"}  # fmt: skip
_TRAINER: Row = _LOOP | {"how": "trainer"}
RUNS: dict[str, Row] = {
    "loop-qlora": _LOOP | {"model": "llama", "share": 0.95},
    "loop-lora-bf16": _LOOP | {"model": "llama-1b", "quant": "none", "prepare": False, "kind": "rare", "share": 0.99},
    "loop-kept-logits": _LOOP | {"model": "qwen2", "keeps": True, "optim": "paged_adamw_8bit", "share": 0.97},
    "loop-autocast": _LOOP | {"model": "mistral", "prepare": False, "autocast": True, "share": 1.02},
    "trainer-qlora": _TRAINER | {"model": "llama", "checkpointing": True, "optim": "paged_adamw_8bit", "share": 0.97},
    "trainer-lora-bf16": _TRAINER | {"model": "llama-1b", "quant": "none", "prepare": False, "share": 0.95},
    "callback-qlora": _TRAINER | {"how": "callback", "model": "qwen3", "batch": 2, "accumulation": 2, "share": 0.97},
    "callback-lora-bf16": _TRAINER | {"how": "callback", "model": "mistral", "quant": "none", "prepare": False,
                                      "kind": "lognormal", "share": 0.95},
}  # fmt: skip


# ---- the program that trains -----------------------------------------------------------------------------------------
def train(spec: Row) -> None:
    """A training program like many: the model, a loader that shuffles, a loop of its own or the Trainer."""
    import torch

    from memtrace.record import qlora

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(spec["limit_bytes"] / total)
    torch.manual_seed(3)
    cfg = qlora.StepConfig(
        quant=spec["quant"], prepare_kbit=spec["prepare"], checkpointing=spec["checkpointing"], optim=spec["optim"],
        dropout=0.05, autocast=spec.get("autocast", False),
    )  # fmt: skip
    model = qlora.add_adapters(qlora.load_base(WEIGHTS / spec["model"], cfg, "cuda:0"), cfg)
    rows = [{"input_ids": [1] * n, "labels": [1] * n, "attention_mask": [1] * n} for n in spec["lengths"]]
    result: Row = {"died": None}
    done = [0]
    try:
        if spec["how"] == "loop":
            own_loop(model, qlora.make_optimizer(model, cfg), rows, spec, done)
        else:
            with_trainer(model, rows, spec, done)
    except (torch.OutOfMemoryError, SystemError) as error:  # PyTorch 2.11 loses an error now and then while it records
        result = {"died": done[0], "error": str(error)[:200]}
    stats = torch.cuda.memory_stats()
    result |= {name: stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")}
    print("RESULT " + json.dumps(result), flush=True)


def padded(rows: list[Row]) -> Row:
    """Rows padded to the longest, as a collator does."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    return {key: torch.tensor([row[key] + [0] * (longest - len(row[key])) for row in rows]) for key in rows[0]}


def own_loop(model: Any, optimizer: Any, rows: list[Row], spec: Row, done: list[int]) -> None:
    """``loss`` alone is kept of the model's answer, or with ``keeps`` the whole answer."""
    import torch

    loader = torch.utils.data.DataLoader(rows, batch_size=spec["batch"], shuffle=True, collate_fn=padded)
    model.train()
    for batch in loader:
        ids = batch["input_ids"].to("cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=spec.get("autocast", False)):
            if spec.get("keeps"):
                output = model(input_ids=ids, labels=ids)
                loss = output.loss
            else:
                loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done[0] += 1


def with_trainer(model: Any, rows: list[Row], spec: Row, done: list[int]) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from memtrace import MemtraceCallback

    class Count(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done[0] = state.global_step

    callbacks: list[Any] = [Count()]
    if spec["how"] == "callback":
        callbacks.append(MemtraceCallback(f"{spec['out']}.pickle", forecast=True, force=True))
    args = TrainingArguments(
        output_dir=f"{spec['out']}.trainer", per_device_train_batch_size=spec["batch"], optim=spec["optim"],
        gradient_accumulation_steps=spec["accumulation"], num_train_epochs=1, report_to=[], logging_steps=1000,
        bf16=spec.get("autocast", False), save_strategy="no", gradient_checkpointing=spec["checkpointing"],
        gradient_checkpointing_kwargs={"use_reentrant": False} if spec["checkpointing"] else None, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=args, train_dataset=rows, data_collator=padded, callbacks=callbacks).train()


# ---- around it -------------------------------------------------------------------------------------------------------
def one(name: str, limit_bytes: int, out: Path) -> Row:
    """One process; what was said and what became of it."""
    spec = RUNS[name]
    count = STEPS * spec["batch"] * spec["accumulation"]
    key = f"{name}-{'ample' if limit_bytes == AMPLE_BYTES else 'tight'}"
    spec = spec | {"limit_bytes": limit_bytes, "lengths": lengths_of(spec["kind"], count, len(name)),
                   "out": str(Path("/tmp") / key)}  # fmt: skip
    run = [__file__, "--train", json.dumps(spec)]
    if spec["how"] != "callback":
        run = ["-m", "memtrace", "run", "--forecast", "--force", "--out", f"/tmp/{key}", *run]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *run], env=env, capture_output=True, text=True, timeout=280, check=False)
    found: Row = {"run": name, "limit_bytes": limit_bytes, "share": spec["share"]}
    said = re.search(r"forecast: (.*)", done.stderr)
    result = re.search(r"RESULT (.*)", done.stdout)
    if said is None or result is None:
        return found | {"failed": done.stderr[-1500:]}
    step = re.search(r"dies in step (\d+)", said[1])
    spare = re.search(r"fits, ([\d.]+) (\w+) to spare", said[1])
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return found | json.loads(result[1]) | {
        "said": said[1], "said_step": int(step[1]) if step else None,
        "said_reserved": limit_bytes - int(float(spare[1]) * units[spare[2]]) if spare else None,
    }  # fmt: skip


def both(name: str, out: Path) -> list[Row]:
    free = one(name, AMPLE_BYTES, out)
    if "failed" in free:
        return [free]
    return [free, one(name, int(free["reserved"] * RUNS[name]["share"]), out)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", help="(the script itself) one run")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--limits", nargs="*", default=[], metavar="NAME=MiB")
    args = parser.parse_args()
    if args.train:
        train(json.loads(args.train))
        return 0
    limits = {name: int(size) << 20 for name, _, size in (word.partition("=") for word in args.limits)}
    names = list(limits) or args.only or list(RUNS)
    for model in {RUNS[name]["model"] for name in names}:
        write_zeros(MODELS[model], WEIGHTS / model)
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.workers) as pool:

        def made(name: str) -> list[Row]:
            return [one(name, limits[name], args.out)] if name in limits else both(name, args.out)

        rows = [row for found in pool.map(made, names) for row in found]
    (args.out / "run_forecast.json").write_text(json.dumps(rows, indent=1))
    right = 0
    for row in rows:
        if "failed" in row:
            print(row["run"], "FAILED", row["failed"][-600:])
            continue
        right += row["died"] == row["said_step"]
        print(f"{'ok ' if row['died'] == row['said_step'] else 'OFF'} {row['run']:20} died {row['died']!s:>4} "
              f"reserved {row['reserved'] / 2**20:9.1f} MiB; said: {row['said']}")  # fmt: skip
    print(f"{right} of {len(rows)} lines right")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
