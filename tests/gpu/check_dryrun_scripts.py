"""Unchanged scripts, dry-run without a GPU and really run on one: peaks, and the request that fails.

    python tests/gpu/check_dryrun_scripts.py measure FOLDER [NAME…]   # on the GPU: recordings and truth.json
    python tests/gpu/check_dryrun_scripts.py compare truth.json [NAME…]   # anywhere: dry-runs them, prints the table

The scripts lie in ``scripts/dry``. Each runs in a fresh process under ``memtrace run``; those that shall die have a
limit on reserved memory. Models in folders have weights on the GPU and only a config in the dry run.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/gpu/scripts/dry"
LIMITS = {"oom_growing": 4864 << 20, "oom_batch": 4864 << 20, "oom_eval": 4864 << 20}
OUTSIDE_BYTES = 771 << 20  # what the presets say a process holds beside the allocator
WITH_MODEL = ("dpo", "llama_folder", "qlora_loop", "qlora_trainer", "sft")
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 2048, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KEYS = ("requested", "allocated", "reserved")
Row = dict[str, Any]


def names(chosen: list[str]) -> list[str]:
    return chosen or sorted(file.stem for file in SCRIPTS.glob("*.py"))


def model_folder(parent: Path, weights: bool) -> Path:
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    if weights:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return folder


def command(name: str, model: Path) -> list[str]:
    return [str(SCRIPTS / f"{name}.py"), *([str(model)] if name in WITH_MODEL else [])]


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tui"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def limited(limit_bytes: int, script: str) -> None:
    """Run ``script`` as the main program under a limit."""
    import runpy

    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((limit_bytes + 1) / total)
    runpy.run_path(script, run_name="__main__")


def measured(name: str, folder: Path, model: Path) -> Row:
    out = folder / name
    out.mkdir(parents=True)
    run = command(name, model)
    if name in LIMITS:
        run = [__file__, "limited", str(LIMITS[name]), *run]
    done = subprocess.run(
        [sys.executable, "-m", "memtrace", "run", "--out", str(out), *run],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    (out / "log.txt").write_text(done.stdout[-4000:] + done.stderr[-6000:])
    files = [file for file in out.glob("*.pickle") if not file.stem.endswith("-oom")]
    if not files:
        return {"error": done.stderr[-300:]}
    extra = pickle.loads(files[0].read_bytes())["memtrace"]
    row: Row = {f"{key}_bytes": extra["stats"][f"{key}_bytes.all.peak"] for key in KEYS}
    if extra["oom"]:
        row |= {"oom_bytes": extra["oom"]["requested_bytes"], "oom_step": extra["oom"]["step"]}
    return row | {"exit_code": done.returncode, "torch": extra["torch"]}


def measure(folder: Path, chosen: list[str]) -> None:
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(8) as pool:
        model, rows = model_folder(Path(made), weights=True), {}
        begun = {pool.submit(measured, name, folder, model): name for name in names(chosen)}
        for done in as_completed(begun):  # written as they come: the machine may be taken away
            rows[begun[done]] = done.result()
            print(begun[done], done.result(), flush=True)
            (folder / "truth.json").write_text(json.dumps(dict(sorted(rows.items())), indent=1))


def dry(name: str, model: Path, out: Path) -> Row:
    limit = LIMITS.get(name)
    capacity = ["--capacity", str(limit + OUTSIDE_BYTES)] if limit else []
    done = subprocess.run(
        [sys.executable, "-m", "memtrace", "dryrun", "--json", *capacity, "-o", str(out / f"{name}.pickle"),
         *command(name, model)],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    (out / f"{name}.log").write_text(done.stdout[-4000:] + done.stderr[-9000:])
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"exit_code"')]
    if not lines:
        return {"error": done.stderr[-300:]}
    found = json.loads(lines[-1])
    row: Row = {f"{key}_bytes": found[f"peak_{key}_bytes"] for key in KEYS} | {"exit_code": found["exit_code"]}
    if found["refused_bytes"] is not None:
        row |= {"oom_bytes": found["refused_bytes"], "oom_step": found["steps"]}
    return row


def compare(truth: Path, chosen: list[str], kept: Path | None = None) -> None:
    rows = json.loads(truth.read_text())
    print(f"{'script':16} {'requested':>12} {'error':>9} {'allocated':>9} {'reserved':>9}  out of memory")
    with tempfile.TemporaryDirectory() as made:
        model, folder = model_folder(Path(made), weights=False), kept or Path(made)
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            found = list(pool.map(lambda name: dry(name, model, folder), names(chosen)))
        for name, mine in zip(names(chosen), found, strict=True):
            real = rows.get(name, {"error": "not measured"})
            if "error" in mine or "error" in real:
                print(f"{name:16} {mine.get('error', '')[-90:]!r} {real.get('error', '')[-90:]!r}")
                continue
            errors = [f"{(mine[f'{k}_bytes'] / real[f'{k}_bytes'] - 1):+9.3%}" for k in KEYS]
            both = mine, real
            ends = [f"{row['oom_bytes']} in step {row['oom_step']}" if "oom_bytes" in row else "" for row in both]
            end = "" if not any(ends) else "the same" if ends[0] == ends[1] else f"{ends[0]} / {ends[1]}"
            print(f"{name:16} {real['requested_bytes']:12} {' '.join(errors)}  {end}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "limited":
        limit, script = int(sys.argv[2]), sys.argv[3]
        sys.argv = sys.argv[3:]
        limited(limit, script)
    elif sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), sys.argv[3:])
    else:
        compare(Path(sys.argv[2]), sys.argv[3:], Path(os.environ["KEEP"]) if "KEEP" in os.environ else None)
