"""Runs that shard, on as many GPUs as they have ranks, and dry-run without one: the peaks of every rank.

    python tests/gpu/check_ranks.py measure FOLDER [NAME[@RANKS]…]      # on GPUs: FOLDER/ranks.jsonl, a line a run
    python tests/gpu/check_ranks.py compare ranks.jsonl [NAME…]         # anywhere: dry-runs them, prints the table

The program is ``scripts/ranks.py``; each row below is what it does, with a model of published widths (and, but for
those called whole, fewer layers), on two ranks or as many as asked for. Weights are zeros where values don't matter:
embeddings and routers are random. Runs of one measurement share the GPUs, as many at a time as memory allows.

More ranks than GPUs share them (``sharing.py``). With ``RECORD`` in the environment each rank's history is kept beside
its log. With ``ALONE`` rank 0 runs by itself, and collectives do nothing.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

from check_dryrun_scripts import environment  # noqa: E402
from sharing import place_of  # noqa: E402
from truth_configs import LLAMA2_7B, MISTRAL_7B, QWEN3_MOE, TINYLLAMA  # noqa: E402

SCRIPT = HERE / "scripts/ranks.py"
KEYS = ("requested", "allocated", "reserved")
WORKERS, MOST_GIB = int(os.environ.get("WORKERS", "12")), float(os.environ.get("MOST_GIB", "120"))
TIMEOUT_S = int(os.environ.get("TIMEOUT_S", "150"))
Row = dict[str, Any]

LLAMA2_13B = LLAMA2_7B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_key_value_heads": 40,
}  # fmt: skip
MIXTRAL = MISTRAL_7B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
YI_34B = LLAMA2_7B | {
    "hidden_size": 7168, "intermediate_size": 20480, "num_attention_heads": 56, "num_key_value_heads": 8,
    "vocab_size": 64000,
}  # fmt: skip
LLAMA2_70B = LLAMA2_7B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, Row]] = {
    "7b": ("LlamaForCausalLM", LLAMA2_7B), "13b": ("LlamaForCausalLM", LLAMA2_13B),
    "tiny": ("LlamaForCausalLM", TINYLLAMA), "qwen3-moe": ("Qwen3MoeForCausalLM", QWEN3_MOE),
    "mixtral": ("MixtralForCausalLM", MIXTRAL), "mistral": ("MistralForCausalLM", MISTRAL_7B),
    "34b": ("LlamaForCausalLM", YI_34B), "70b": ("LlamaForCausalLM", LLAMA2_70B),
}  # fmt: skip


def _row(name: str, kind: str, model: str, layers: int, batch: int, length: int, gib: float = 12, **rest: Any) -> Row:
    """``gib``: what the run may take of each GPU, so that those beside it have room."""
    return {"name": name, "kind": kind, "model": model, "layers": layers, "batch": batch, "length": length,
            "gib": gib, **rest}  # fmt: skip


_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_PUBLISHED = [  # train type, whole copies, offloaded, model, layers, batch, length: GiB reserved as published
    ("qlora", False, False, "7b", 32, 1, 512, 4.98), ("qlora", False, False, "7b", 32, 1, 2048, 5.21),
    ("qlora", False, False, "7b", 32, 4, 2048, 11.22), ("qlora", False, False, "7b", 32, 10, 2048, 20.97),
    ("lora", False, False, "7b", 32, 1, 512, 10.24), ("lora", False, False, "7b", 32, 1, 2048, 10.22),
    ("lora", False, False, "7b", 32, 4, 2048, 16.14), ("lora", False, False, "7b", 32, 6, 2048, 21.35),
    ("qlora", True, False, "7b", 32, 8, 2048, 20.94), ("lora", True, False, "7b", 32, 4, 2048, 22.04),
    ("qlora", False, True, "7b", 32, 12, 2048, 22.38), ("lora", False, True, "7b", 32, 10, 2048, 22.69),
    ("qlora", False, True, "mistral", 32, 12, 2048, 22.54), ("qlora", False, True, "mistral", 32, 1, 24576, 22.54),
    ("qlora", False, False, "34b", 60, 2, 2048, 23.05), ("qlora", False, True, "34b", 60, 4, 2048, 22.98),
    ("qlora", False, True, "70b", 80, 2, 2048, 14.92),
]  # fmt: skip


def _published() -> list[Row]:
    found = []
    for how, whole, offload, model, layers, batch, length, gib in _PUBLISHED:
        name = f"published-{model}-{how}{'-ddp' * whole}{'-offload' * offload}-{batch}x{length}"
        loading = {"7b": 9 if how == "qlora" else 20, "mistral": 9, "34b": 30, "70b": 60}[model]
        room = max(loading, gib + 2)
        rest = {"method": how, "whole": whole, "offload": offload, "published_gib": gib}
        found.append(_row(name, "published", model, layers, batch, length, room, **rest))
    return found


ROWS: dict[str, Row] = {
    row["name"]: row
    for row in (
        *(_row(f"qlora-7b-{n}", "fsdp2", "7b", 4, 1, n, method="qlora") for n in (512, 1024, 2048, 4096)),
        *(_row(f"qlora-13b-{n}", "fsdp2", "13b", 4, 1, n, method="qlora") for n in (512, 1024, 2048, 4096)),
        _row("qlora-7b-whole", "fsdp2", "7b", 32, 1, 1024, method="qlora"),
        _row("qlora-13b-whole", "fsdp2", "13b", 40, 1, 1024, 16, method="qlora"),
        _row("qlora-7b-not-held", "fsdp2", "7b", 4, 2, 1024, method="qlora", checkpointing=False),
        _row("qlora-7b-offload", "fsdp2", "7b", 4, 2, 1024, method="qlora", offload=True),
        _row("full-7b", "fsdp2", "7b", 2, 2, 1024, 16, method="full"),
        _row("full-13b-held", "fsdp2", "13b", 2, 1, 2048, 20, method="full", checkpointing=True),
        _row("full-tiny-offload", "fsdp2", "tiny", 8, 2, 1024, method="full", offload=True),
        _row("lora-qwen3-moe", "fsdp2", "qwen3-moe", 2, 2, 1024, method="lora", targets=_ATTENTION),
        _row("full-qwen3-moe", "fsdp2", "qwen3-moe", 2, 1, 1024, 30, method="full"),
        _row("lora-mixtral", "fsdp2", "mixtral", 2, 1, 1024, method="lora", targets=_ATTENTION),
        _row("full-mixtral", "fsdp2", "mixtral", 1, 1, 1024, 30, method="full"),
        _row("fsdp1-7b", "fsdp1", "7b", 2, 2, 1024, 16),
        _row("fsdp1-tiny", "fsdp1", "tiny", 8, 4, 2048, 18),
        _row("ddp-tiny", "data_parallel", "tiny", 8, 2, 1024, method="full"),
        _row("ddp-qlora-7b", "data_parallel", "7b", 4, 1, 1024, method="qlora"),
        _row("states-tiny", "data_parallel", "tiny", 8, 2, 1024, method="full", zero=True),
        _row("states-7b", "data_parallel", "7b", 2, 1, 1024, method="full", zero=True),
        *(_row(f"zero{n}-tiny", "deepspeed", "tiny", 8, 2, 1024, 14, zero=n) for n in (1, 2, 3)),
        *(_row(f"zero{n}-7b", "deepspeed", "7b", 2, 1, 2048, 24, zero=n, checkpointing=True) for n in (2, 3)),
        _row("zero2-overlap", "deepspeed", "tiny", 8, 2, 1024, 14, zero=2, options={"overlap_comm": False}),
        _row("zero3-offload", "deepspeed", "tiny", 8, 2, 1024, 14, zero=3, offload=True),
        _row("dpo-tiny", "trainer", "tiny", 8, 2, 256, 6, method="dpo"),
        _row("dpo-7b", "trainer", "7b", 4, 1, 512, method="dpo"),
        _row("trainer-ddp", "trainer", "tiny", 8, 2, 1024, 16, method="full"),
        _row("trainer-fsdp2", "trainer", "tiny", 8, 2, 1024, method="full", options={
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }),
        _row("pipeline-tiny", "pipeline", "tiny", 8, 8, 1024),
        _row("pipeline-7b", "pipeline", "7b", 2, 4, 1024),
        _row("experts-qwen3-moe", "experts", "qwen3-moe", 2, 1, 1024, 20),
        _row("tensor-7b", "tensor", "7b", 2, 1, 1024),
        _row("tensor-tiny", "tensor", "tiny", 8, 2, 1024),
        *_published(),
    )
}  # fmt: skip


def folder_of(row: Row, parent: Path, weights: bool) -> Path:
    """A model's folder: its config, and on a GPU its weights (a sparse file, but for what routes tokens)."""
    folder = parent / f"{row['model']}-{row['layers']}"
    cls, keys = MODELS[row["model"]]
    if not folder.exists():
        folder.mkdir(parents=True)
        keys = keys | {"architectures": [cls], "num_hidden_layers": row["layers"], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(keys | {"max_position_embeddings": 32768}))
        if weights and row["kind"] != "published":
            write_weights(folder, cls)
    return folder


def write_weights(folder: Path, cls: str) -> None:
    import torch
    import transformers
    from safetensors import safe_open

    from memtrace.estimate.dryrun.weights import _shapes, write_empty

    file = folder / "model.safetensors"
    kinds = _shapes(getattr(transformers, cls), folder)
    write_empty(file, kinds)
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little") if file.stat().st_size < 1 << 20 else 0
    with file.open("r+b") as stream:
        begin = 8 + int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(begin - 8))
        for name, (_kind, shape, _size) in kinds.items():
            is_norm, is_router = "norm" in name, name.endswith("gate.weight")
            if is_norm or is_router or "embed_tokens" in name:
                values = torch.ones(shape) if is_norm else torch.randn(shape) * (1.0 if is_router else 0.02)
                stream.seek(begin + header[name]["data_offsets"][0])
                stream.write(values.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == set(kinds)


def _environment(row: Row) -> dict[str, str]:
    """Where DeepSpeed is, for what needs it: others that find it import it."""
    known = environment()
    if row["kind"] == "deepspeed":
        known["PYTHONPATH"] += os.pathsep + os.environ.get("DEEPSPEED_PATH", "")
    return known


# on GPUs
class Room:
    """What of every GPU the runs beside each other may take."""

    def __init__(self) -> None:
        self._free, self._changed = MOST_GIB, threading.Condition()

    def take(self, gib: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= gib)
            self._free -= gib

    def give(self, gib: float) -> None:
        with self._changed:
            self._free += gib
            self._changed.notify_all()


def measured(row: Row, folder: Path, ranks: int, gpus: int, logs: Path) -> Row:
    command = [sys.executable, str(SCRIPT), json.dumps(row), str(folder)]
    (folder / f"meeting-{row['name']}").unlink(missing_ok=True)
    known = _environment(row)
    port = 29500 + list(ROWS).index(row["name"].partition("@")[0]) + 100 * ranks
    processes = []
    for rank in range(1 if "ALONE" in os.environ else ranks):
        place = place_of(rank, ranks, gpus) | {"MASTER_PORT": str(port), "MASTER_ADDR": "localhost"}
        log = (logs / f"{row['name']}-{rank}.log").open("w")
        processes.append(
            subprocess.Popen(
                command,
                env=known | place | {"OMP_NUM_THREADS": "4"},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        )
    began, found = time.time(), []
    for rank, process in enumerate(processes):
        try:
            text = process.communicate(timeout=max(1.0, began + TIMEOUT_S - time.time()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0]
        lines = [line for line in text.splitlines() if line.startswith('{"load"')]
        said = (logs / f"{row['name']}-{rank}.log").read_text()[-700:]
        found.append(json.loads(lines[-1]) if lines else {"error": said})
        for made in folder.glob(f"{row['name']}-{rank}.pickle"):
            (logs / f"{made.name}.xz").write_bytes(lzma.compress(made.read_bytes(), preset=1))
            made.unlink()
        if not lines:
            began = min(began, time.time() - TIMEOUT_S + 5)  # the others wait for it in vain
    return {"name": row["name"], "ranks": found, "world_size": ranks}


def chosen_rows(names: list[str]) -> list[tuple[Row, int]]:
    """The rows called ``NAME`` or ``NAME@RANKS``, each with its ranks."""
    parts = [name.partition("@") for name in names]
    return [(ROWS[name] | {"name": name + at + ranks}, int(ranks or 2)) for name, at, ranks in parts]


def measure(out: Path, names: list[str]) -> None:
    import torch

    rows = chosen_rows(names or list(ROWS))
    began, room, writes, gpus = time.time(), Room(), threading.Lock(), torch.cuda.device_count()
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(WORKERS) as pool:
        for row, _ in rows:
            folder_of(row, Path(made), weights=True)

        def one(row: Row, ranks: int) -> None:
            of_each_gpu = row["gib"] * -(-ranks // gpus)
            room.take(of_each_gpu)
            try:
                found = measured(row, folder_of(row, Path(made), True), ranks, gpus, logs)
            finally:
                room.give(of_each_gpu)
            found |= {"torch": torch.__version__, "gpus": gpus, "seconds": round(time.time() - began)}
            with writes, (out / "ranks.jsonl").open("a") as lines:
                print(json.dumps(found), file=lines)
            print(row["name"], found["seconds"], [one.get("error", "")[-200:] for one in found["ranks"]], flush=True)

        list(pool.map(one, *zip(*rows, strict=True)))


# anywhere
def dry(row: Row, folder: Path, rank: int, ranks: int, out: Path, run: Any = None) -> Row:
    """``run``: how, if not in a process of its own (see tests/forked.py)."""
    words = ["--world-size", str(ranks), "--force", "-o", str(out / f"{row['name']}-{rank}.pickle")]
    words += [str(SCRIPT), json.dumps(row), str(folder)]
    done = run(*words, RANK=str(rank)) if run is not None else subprocess.run(
        [sys.executable, "-m", "memtrace", "dryrun", *words],
        env=_environment(row) | {"RANK": str(rank)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (out / f"{row['name']}-{rank}.log").write_text(done.stdout[-4000:] + done.stderr[-9000:])
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"load"')]
    if not lines:
        return {"error": done.stderr[-400:]}
    found = json.loads(lines[-1])
    if (made := folder / f"{row['name']}-{rank}.pickle").exists():  # RECORD
        words = [sys.executable, "-m", "memtrace", "simulate", "--json", str(made)]
        text = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True).stdout
        ran = json.loads(text)["runs"][0]
        found["by_addresses"] = ran["peak_reserved_low_bytes"], ran["peak_reserved_high_bytes"]
    return found


def compare(truth: Path, chosen: list[str], kept: Path | None = None) -> None:
    found = {row["name"]: row for row in map(json.loads, truth.read_text().splitlines())}
    print(f"{'run, rank':44} {'MiB':>8} {'requested':>9} {'allocated':>9} {'reserved':>9}  by addresses")
    with tempfile.TemporaryDirectory() as made:
        for name in chosen or found:
            row, ranks = chosen_rows([name])[0]
            measured, mine = found[name]["ranks"], None
            for rank, real in enumerate(measured):
                if mine is None or real != measured[rank - 1]:  # of ranks that took the same, one is enough
                    mine = dry(row, folder_of(row, Path(made), False), rank, ranks, kept or Path(made))
                for part in ("load", "train"):
                    before, now = real.get(part), mine.get(part)
                    if not before or not now:
                        said = [one.get("error", "").strip().splitlines()[-1:] for one in (real, mine)]
                        print(f"{name} {part} {rank}: measured {said[0] or before}, dry {said[1] or now}")
                        continue
                    errors = " ".join(f"{now[key] / max(1, before[key]) - 1:+9.3%}" for key in KEYS)
                    if "by_addresses" in mine and part == "train":
                        low, high = (size / before["reserved"] - 1 for size in mine["by_addresses"])
                        errors += f"  {low:+.3%} to {high:+.3%}"
                    mib = math.ceil(before["requested"] / 2**20)
                    print(f"{name + ', ' + str(rank) + ' ' + part:44} {mib:8,} {errors}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), sys.argv[3:])
    else:
        compare(Path(sys.argv[2]), sys.argv[3:], Path(os.environ["KEEP"]) if "KEEP" in os.environ else None)
