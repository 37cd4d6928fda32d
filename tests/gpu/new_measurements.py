"""Measure peaks by phase where the measured files hold nothing yet, and print the signed errors of the estimate.

    python3 tests/gpu/new_measurements.py --out DIR [--only NAME…] [--measured] [--workers 4] [--device cuda|cpu]
    python3 tests/gpu/new_measurements.py --compare DIR/new_measurements.json [--dry-run]

Each configuration trains two steps in a process of its own, random weights, published widths with four layers.
``--measured`` are instead the 38 setups of ``tests/truth/measured`` with all layers, which had shared a process each.
``new_measurements.json`` has the rows of the measured files (peaks of requested, allocated and reserved bytes by step
and phase, and allocated bytes at its end), with the options of the run beside them. ``--compare`` needs no GPU. With
``--device cpu`` the models are tiny and a stand-in watches host memory, to test the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from record_runs import write_zeros  # noqa: E402
from truth_configs import LLAMA2_7B, MISTRAL_7B, QWEN2_7B, TINY  # noqa: E402

LAYERS = 4
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA_7B: dict[str, Any] = {
    "model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2_9B: dict[str, Any] = {
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
ARCHITECTURES = {
    "llama2-7b": LLAMA2_7B, "mistral-7b": MISTRAL_7B, "qwen2-7b": QWEN2_7B, "qwen3-8b": QWEN3_8B, "gemma-7b": GEMMA_7B,
    "gemma2-9b": GEMMA2_9B,
}  # fmt: skip

_HALF: dict[str, Any] = {"prepare_kbit": False}
_BF16: dict[str, Any] = {"autocast": True, "adapter_dtype": "bf16"}
_NONE: dict[str, Any] = {"checkpointing": False}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "autocast-bf16-adapters": ("llama2-7b", _BF16 | _HALF),
    "autocast-bf16-adapters-none": ("llama2-7b", _BF16 | _HALF | _NONE),
    "autocast-bf16-adapters-fp32-stream": ("llama2-7b", _BF16),
    "autocast-bf16-adapters-fp32-stream-none": ("mistral-7b", _BF16 | _NONE),
    "autocast-fp32-adapters-fp32-stream": ("llama2-7b", {"autocast": True}),
    "fused-loss": ("llama2-7b", {"loss": "fused"} | _HALF),
    "fused-loss-autocast": ("qwen2-7b", {"loss": "fused", "batch": 2} | _BF16 | _HALF),
    "fused-loss-fp32-stream": ("llama2-7b", {"loss": "fused"}),
    "chunked-loss": ("qwen2-7b", {"loss": "chunked", "chunk_tokens": 256} | _HALF),
    "qv-only": ("llama2-7b", {"targets": ("q_proj", "v_proj")}),
    "qv-only-none": ("mistral-7b", {"targets": ("q_proj", "v_proj")} | _HALF | _NONE),
    "qk-norm": ("qwen3-8b", {}),
    "qk-norm-half": ("qwen3-8b", _HALF),
    "qk-norm-half-none": ("qwen3-8b", _HALF | _NONE),
    "large-tied-head": ("gemma-7b", {}),
    "large-tied-head-half-none": ("gemma-7b", _HALF | _NONE),
    "gemma2-eager": ("gemma2-9b", {"attn": "eager"} | _HALF),
    # 8-bit products split off columns with values above 6, which random weights make many of and trained ones few:
    # "int8" models get smaller weights (see architecture()).
    "int8": ("llama2-7b", {"quant": "int8"}),
    "int8-half-none": ("llama2-7b", {"quant": "int8"} | _HALF | _NONE),
    "nf4-single": ("llama2-7b", {"quant": "nf4"} | _HALF),
}
PHASES = ("forward", "backward", "optimizer")
TRUTH = HERE.parent / "truth" / "measured"
_ROW_KEYS = {"L": "seq_len", "B": "batch", "ckpt": "checkpointing", "attn": "attn", "optim": "optim",
             "dropout": "dropout", "rank": "rank", "prepare": "prepare_kbit"}  # fmt: skip
MEASURED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{file.stem}-{number:02d}": (row["arch"], {option: row[key] for key, option in _ROW_KEYS.items()})
    for file in sorted(TRUTH.glob("*_r[0-9]*.json"))
    for number, row in enumerate(json.loads(file.read_text())["rows"])
}
ALL = CONFIGURATIONS | MEASURED


class CudaMeter:
    """PyTorch's own statistics."""

    def reset(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int]:
        import torch

        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        names = {"alloc": "allocated_bytes", "requested": "requested_bytes", "reserved": "reserved_bytes"}
        found = {short: int(stats[f"{name}.all.peak"]) for short, name in names.items()}
        return found | {"end": int(stats["allocated_bytes.all.current"])}


class StandInMeter:
    """The same of a stand-in on the host, to test the script."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def reset(self) -> None:
        self.backend.peak = self.backend.allocated

    def read(self) -> dict[str, int]:
        peak = int(self.backend.peak)
        return {"alloc": peak, "requested": peak, "reserved": peak, "end": int(self.backend.allocated)}


def step_options(name: str, device: str) -> dict[str, Any]:
    """All options of a configuration, as ``StepConfig`` takes them."""
    options = {"seq_len": 1024, "optim": "adamw_torch", "rank": 16, "dropout": 0.05, **ALL[name][1]}
    return options | {"seq_len": 64, "rank": 4, "chunk_tokens": 32} if device == "cpu" else options


def architecture(name: str, device: str) -> dict[str, Any]:
    """The configuration's model, with few layers (tiny on a host)."""
    keys = ARCHITECTURES[ALL[name][0]] | {"num_hidden_layers": 32 if name in MEASURED else LAYERS}
    if ALL[name][1].get("quant") == "int8":
        keys |= {"initializer_range": 0.005}
    if device == "cpu":
        small = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"}
        keys |= {key: TINY[key] for key in small} | {"num_hidden_layers": 2}
        keys |= {"head_dim": 32} if "head_dim" in keys else {}
    return keys


def run_one(name: str, folder: Path, out: Path, device: str) -> None:
    """One process's job: two steps, the peaks of every phase; leaves NAME.json."""
    import torch

    from memtrace.record import qlora

    cfg = qlora.StepConfig(**step_options(name, device))
    keys = architecture(name, device)
    row: dict[str, Any] = {"name": name, "config": keys, "arch": ALL[name][0], "options": asdict(cfg)}
    row |= {"L": cfg.seq_len, "B": cfg.batch, "rank": cfg.rank, "prepare": cfg.prepare_kbit}
    row |= {"ckpt": cfg.checkpointing, "attn": cfg.attn, "optim": cfg.optim, "dropout": cfg.dropout}
    if device == "cpu":
        from capture_standin import StandIn

        backend = StandIn()
        backend.__enter__()
        meter: Any = StandInMeter(backend)
    else:
        torch.cuda.init()
        meter = CudaMeter()
    torch.manual_seed(0)
    place = "cpu" if device == "cpu" else "cuda:0"
    checkpoint = folder / ALL[name][0] if name in MEASURED else folder / name
    if not checkpoint.exists():
        subprocess.run([sys.executable, __file__, "--write", json.dumps(keys), str(checkpoint), place], check=True)
    meter.reset()
    base = qlora.load_base(checkpoint, cfg, place)
    model = qlora.add_adapters(base, cfg)
    del base
    row |= {"load": meter.read(), "base_alloc": meter.read()["end"]}
    row["trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimizer = qlora.make_optimizer(model, cfg)
    at = {"phase": "", "step": 0}

    def mark(phase: str) -> None:
        if at["phase"] in PHASES:
            row[f"step{at['step']}_{at['phase']}"] = meter.read()
        if phase == "zero_grad":
            at["step"] += 1
        at["phase"] = phase
        meter.reset()

    try:
        qlora.run_loop(model, optimizer, cfg, place, mark, lambda: None)
    except torch.OutOfMemoryError as error:
        row["oom"] = str(error)
    row["versions"] = _versions()
    (out / f"{name}.json").write_text(json.dumps(row))


def _versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")}


def measure(names: list[str], out: Path, device: str, workers: int) -> Path:
    """Run all configurations; returns the file with the rows."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        rows_folder, checkpoints = Path(scratch) / "rows", Path(scratch) / "checkpoints"
        rows_folder.mkdir()
        for shared in {ALL[name][0] for name in names if name in MEASURED}:  # zeros: values decide no size here
            keys = architecture(next(name for name in MEASURED if ALL[name][0] == shared), device)
            write_zeros(keys, checkpoints / shared)

        def one(name: str) -> str:
            start = time.monotonic()
            command = [sys.executable, __file__, "--run", name, str(checkpoints), str(rows_folder), device]
            done = subprocess.run(command, capture_output=True, text=True)
            subprocess.run(["rm", "-rf", str(checkpoints / name)], check=False)
            tail = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else "done"
            return f"{name}: {tail} ({time.monotonic() - start:.0f} s)"

        with ThreadPoolExecutor(workers) as pool:
            for line in pool.map(one, names):
                print(line, flush=True)
        found = [rows_folder / f"{name}.json" for name in names]
        rows = [json.loads(path.read_text()) for path in found if path.exists()]
    file = out / "new_measurements.json"
    file.write_text(json.dumps({"rows": rows}, indent=1))
    return file


# ---- comparison: no GPU ----------------------------------------------------------------------------------------------
def compare(file: Path, dry: bool) -> None:
    """Print the signed error of the estimate's (or the dry run's) requested, allocated and reserved peak of step 1."""
    from memtrace.estimate.engine.step import simulate_run
    from memtrace.estimate.options import RunOptions
    from memtrace.estimate.placement import place
    from memtrace.estimate.presets import gpu_preset
    from memtrace.estimate.recorded import _RUN_KEYS
    from memtrace.estimate.shapes import shape_from_config

    device = gpu_preset("h200").device
    print(f"{'configuration':<42}{'requested, B':>16}{'error B':>14}{'requested':>11}{'allocated':>11}{'reserved':>11}")
    for row in json.loads(file.read_text())["rows"]:
        cfg = row["options"]
        values = {option: cfg[key] for key, option in _RUN_KEYS.items()}
        values |= {"targets": tuple(cfg["targets"]), "embeddings_require_grad": cfg["checkpointing"]}
        options = RunOptions(**values)
        if dry:
            from memtrace.estimate.dryrun.worker import dry_run

            stream = dry_run(row["config"], options, device).stream
        else:
            stream = simulate_run(shape_from_config(row["config"], row["arch"]), options, device)
        placed = place(stream)
        start = next(mark.event for mark in stream.marks if mark.step == 1)
        curves = (placed.requested, placed.allocated, placed.reserved)
        mine = [int(curve[start:].max()) for curve in curves]
        phases = [row[f"step1_{phase}"] for phase in PHASES if f"step1_{phase}" in row]
        if not phases:
            print(f"{row['name']:<42} did not reach its second step: {row.get('oom', '')[:60]}")
            continue
        theirs = [max(phase[key] for phase in phases) for key in ("requested", "alloc", "reserved")]
        percent = [f"{100 * (a / b - 1):+.3f} %" for a, b in zip(mine, theirs, strict=True)]
        print(f"{row['name']:<42}{theirs[0]:>16,}{mine[0] - theirs[0]:>+14,}" + "".join(f"{p:>11}" for p in percent))


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        name, folder, out, device = sys.argv[2:6]
        run_one(name, Path(folder), Path(out), device)
        return
    if sys.argv[1:2] == ["--write"]:
        from memtrace.record.checkpoint import write_checkpoint

        write_checkpoint(json.loads(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--dry-run", action="store_true", help="compare with the dry run instead of the estimate")
    args = parser.parse_args()
    dealt = [name for first in range(10) for name in list(MEASURED)[first::10]]  # large ones apart: they share a card
    names = args.only or (dealt if args.measured else list(CONFIGURATIONS))
    file = args.compare or measure(names, args.out, args.device, args.workers)
    try:
        compare(file, args.dry_run)
    except ImportError as error:
        print(f"measured, not compared here ({error}); use --compare {file}")


if __name__ == "__main__":
    main()
