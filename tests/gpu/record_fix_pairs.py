"""Record pairs of runs of which the second has one thing fixed, to see whether ``memtrace diff`` names it first.

    python3 tests/gpu/record_fix_pairs.py --out DIR [--only NAME…] [--workers 14]     # on a machine with a GPU
    python3 tests/gpu/record_fix_pairs.py --judge DIR                                 # anywhere: a table in Markdown

Each run is a plain loop over a small Llama with random weights in a process of its own, recorded by PyTorch alone: what
was changed has to be read off the tensors. ``DIR/fix_pairs.tar`` holds ``NAME.before.pickle.xz`` and
``NAME.after.pickle.xz``.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [300, 1400, 500, 900, 1700, 200, 1100, 600]
# name -> (the cause that diff must name first, options before, options after); what neither names is USUAL.
USUAL: dict[str, Any] = {
    "layers": 3, "length": 1024, "batch": 2, "accumulation": 1, "steps": 3, "rank": 16,
    "targets": "all-linear",
    "optimizer": "AdamW", "attention": "sdpa", "checkpointing": True, "loss": "full", "vocabulary": 32000,
    "dtype": "bfloat16", "head": "as the model", "leak": "", "conf": "", "reference": "", "lengths": [],
    "eval_batch": 0, "keep_logits": False, "cap_mib": 0,
}  # fmt: skip
PLAIN = {"checkpointing": False}
_EIGHT = {"steps": 8}
_VARIED = {"lengths": LENGTHS, "steps": 8} | PLAIN
_SHORT = {"steps": 12}
_CAPPED = {"steps": 14, "cap_mib": 3200}
_WIDE = {"vocabulary": 128256}
_FULL = {"rank": 0}
_LONG = {"length": 4096, "batch": 1}
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "leak-graphs": ("growth_across_steps", {"leak": "loss"} | _EIGHT | PLAIN, _EIGHT | PLAIN),
    "leak-logits": ("growth_across_steps", {"leak": "logits"} | _EIGHT, _EIGHT),
    "leak-hidden": ("growth_across_steps", {"leak": "hidden"} | _SHORT, _SHORT),
    "leak-oom": ("growth_across_steps", {"leak": "logits"} | _CAPPED, _CAPPED),
    "checkpointing": ("checkpointing", PLAIN, {}),
    "checkpointing-full": ("checkpointing", _FULL | PLAIN, _FULL),
    "expandable": ("allocator_setting", _VARIED, {"conf": "expandable_segments:True"} | _VARIED),
    "max-split": ("allocator_setting", {"conf": "max_split_size_mb:32"} | _VARIED, _VARIED),
    "loss-chunked": ("loss", _WIDE, {"loss": "chunked"} | _WIDE),
    "logits-dropped": ("loss", {"keep_logits": True} | _WIDE, {"loss": "chunked"} | _WIDE),
    "optimizer-sgd": ("optimizer", _FULL, {"optimizer": "SGD"} | _FULL),
    "optimizer-adafactor": ("optimizer", _FULL, {"optimizer": "Adafactor"} | _FULL),
    "rank": ("adapters", {"rank": 512}, {"rank": 256}),
    "targets": ("adapters", {"rank": 512}, {"rank": 512, "targets": "q_proj,v_proj"}),
    "padding": ("tokens", {"length": 2048, "batch": 4}, {"length": 700, "batch": 4}),
    "length": ("tokens", {"length": 2048} | PLAIN, PLAIN),
    "micro-batch": ("tokens", {"batch": 8}, {"batch": 2, "accumulation": 4}),
    "reference": ("reference_model", {"reference": "copy"}, {"reference": "shared"}),
    "attention": ("attention", {"attention": "eager", "length": 2048} | PLAIN, {"length": 2048} | PLAIN),
    "attention-checkpointed": ("attention", {"attention": "eager"} | _LONG, _LONG),
    "eval-batch": ("eval_peak", {"eval_batch": 24}, {"eval_batch": 2}),
    "cast-model": ("cast", {"dtype": "float32"}, {}),
    "cast-head": ("cast", {"head": "float32"} | _WIDE, _WIDE),
}


def run(options: dict[str, Any], target: Path) -> None:
    """One run in this process; the snapshot is taken at its end or at its out-of-memory error."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    dump: list[Any] = []
    if options["cap_mib"]:
        torch.cuda.set_per_process_memory_fraction(
            (options["cap_mib"] << 20) / torch.cuda.get_device_properties(0).total_memory
        )
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: dump.append(torch.cuda.memory._snapshot()))
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=options["layers"], num_attention_heads=16,
        num_key_value_heads=16, vocab_size=options["vocabulary"], use_cache=False,
        attn_implementation=options["attention"],
    )  # fmt: skip
    dtype = getattr(torch, options["dtype"])

    def build() -> Any:
        torch.set_default_dtype(dtype)
        with torch.device("cuda"):
            return LlamaForCausalLM(config)

    model = build()
    reference = build().eval() if options["reference"] == "copy" else None
    torch.set_default_dtype(torch.float32)
    if options["head"] == "float32":
        model.lm_head.float()
        model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    if options["rank"]:
        from peft import LoraConfig, get_peft_model

        wanted = options["targets"]
        names: Any = wanted if wanted == "all-linear" else wanted.split(",")
        model = get_peft_model(model, LoraConfig(r=options["rank"], target_modules=names, lora_dropout=0.05))
    if options["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, options["optimizer"])(trained, lr=1e-4)
    model.train()
    kept: list[Any] = []
    try:
        for step in range(options["steps"]):
            length = options["lengths"][step % len(options["lengths"])] if options["lengths"] else options["length"]
            for _ in range(options["accumulation"]):
                train_step(model, reference, options, length, kept)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if options["eval_batch"]:
            evaluate(model, options)
    except torch.cuda.OutOfMemoryError:
        pass
    snapshot = dump[0] if dump else torch.cuda.memory._snapshot()
    with lzma.open(target, "wb", preset=6) as out:
        pickle.dump(snapshot, out, protocol=4)


def train_step(model: Any, reference: Any, options: dict[str, Any], length: int, kept: list[Any]) -> None:
    """Forward and backward pass of one micro-batch."""
    import torch
    from torch.nn.functional import cross_entropy

    ids = torch.randint(0, options["vocabulary"], (options["batch"], length), device="cuda")
    if options["reference"]:
        with torch.no_grad():
            if reference is not None:
                reference(input_ids=ids)
            else:
                with model.disable_adapter():
                    model(input_ids=ids)
    if options["loss"] == "chunked":
        base = model.get_base_model() if options["rank"] else model
        hidden = base.model(input_ids=ids).last_hidden_state[:, :-1].reshape(-1, 2048)
        labels = ids[:, 1:].reshape(-1)
        loss: Any = 0.0
        for low in range(0, len(labels), 256):

            def chunk(part: Any, wanted: Any) -> Any:
                return cross_entropy(base.lm_head(part).float(), wanted, reduction="sum")

            part = hidden[low : low + 256]
            loss = loss + torch.utils.checkpoint.checkpoint(chunk, part, labels[low : low + 256], use_reentrant=True)
        loss = loss / len(labels)
        out = None
    else:
        out = model(input_ids=ids, labels=ids, output_hidden_states=options["leak"] == "hidden")
        loss = out.loss
    if options["leak"] == "loss":
        kept.append(loss)
    elif options["leak"] == "logits":
        kept.append(out.logits.detach())
    elif options["leak"] == "hidden":
        kept.append([part.detach() for part in out.hidden_states])
    if not options["keep_logits"]:
        del out
    loss.backward(retain_graph=options["leak"] == "loss")


def evaluate(model: Any, options: dict[str, Any]) -> None:
    """Three batches without gradient, whose logits are kept as metrics need them."""
    import torch

    model.eval()
    with torch.no_grad():
        kept = []
        for _ in range(3):
            ids = torch.randint(0, options["vocabulary"], (options["eval_batch"], options["length"]), device="cuda")
            kept.append(model(input_ids=ids, labels=ids).logits)


def record(out: Path, only: list[str], workers: int) -> int:
    """All runs, a process each; returns how many failed."""
    jobs = [
        (f"{name}.{side}", USUAL | options)
        for name, (_, before, after) in PAIRS.items()
        if not only or name in only
        for side, options in (("before", before), ("after", after))
    ]

    def one(job: tuple[str, dict[str, Any]]) -> str | None:
        name, options = job
        env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": options["conf"], "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--run", json.dumps(options), str(out / f"{name}.pickle.xz")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        return None if done.returncode == 0 else f"{name}: {done.stderr[-600:]}"

    with ThreadPoolExecutor(workers) as pool:
        failed = [line for line in pool.map(one, jobs) if line is not None]
    print("\n".join(failed) or f"{len(jobs)} runs recorded")
    files = sorted(out.glob("*.pickle.xz"))
    with tarfile.open(out / "fix_pairs.tar", "w") as tar:
        for file in files:
            tar.add(file, file.name)
            file.unlink()
    return len(failed)


def judge(folder: Path) -> int:
    """Print a table of what ``memtrace diff`` says of each pair; returns how many have another first cause."""
    sys.path.insert(0, str(ROOT))
    from memtrace.analysis import analyse
    from memtrace.explain.causes import story_of
    from memtrace.history.timeline import build
    from memtrace.snapshot.load import load
    from memtrace.units import format_delta

    wrong = 0
    print("| pair | change | first cause | its bytes | second | sums |\n|---|---:|---|---:|---|---|")
    for name, (expected, _, _) in PAIRS.items():
        files = [folder / f"{name}.{side}.pickle.xz" for side in ("before", "after")]
        if not all(file.exists() for file in files):
            continue
        snapshots = [load(str(file)) for file in files]
        story = story_of(*(analyse(build(snapshot, snapshot.devices[0])) for snapshot in snapshots))
        first, *rest = story.causes
        sums = sum(cause.bytes for cause in story.causes) == story.change_bytes
        wrong += first.id != expected or not sums
        mark = first.id if first.id == expected else f"**{first.id}** (not {expected})"
        second = f"{rest[0].id} {format_delta(rest[0].bytes)}" if rest and rest[0].bytes else ""
        print(
            f"| {name} | {format_delta(story.change_bytes)} {story.explains.split('_')[1]} | {mark} | "
            f"{format_delta(first.bytes)} | {second} | {'yes' if sums else 'NO'} |"
        )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--run", nargs=2)
    args = parser.parse_args()
    if args.run:
        run(json.loads(args.run[0]), Path(args.run[1]))
        return 0
    if args.judge:
        return judge(args.judge)
    args.out.mkdir(parents=True, exist_ok=True)
    return record(args.out, args.only, args.workers)


if __name__ == "__main__":
    sys.exit(main())
