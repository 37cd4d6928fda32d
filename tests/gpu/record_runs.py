"""Whole runs of varying lengths near a limit, in fresh processes on a GPU, and what was forecast of them before.

    python tests/gpu/record_runs.py plan PLAN.jsonl            # anywhere: chooses limits, forecasts
    python tests/gpu/record_runs.py run PLAN.jsonl OUT.jsonl   # on the GPU: trains, writes down every step's peaks
    python tests/gpu/record_runs.py compare PLAN.jsonl OUT.jsonl

Models have their full width and few layers; their checkpoints hold zeros, since values decide no size here.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.estimate.forecast import Forecast, RunPlan

Row = dict[str, Any]
DEVICE_TOTAL = 150_109_880_320  # an H200, as PyTorch sees it
MOST_BYTES = 22 << 30  # several runs share the card
JOBS = 8

_LLAMA = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
          "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False}  # fmt: skip
MODELS: dict[str, Row] = {
    "llama": _LLAMA | {"num_hidden_layers": 6},
    "mistral": _LLAMA | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8,
                         "num_hidden_layers": 5, "sliding_window": None, "head_dim": 128},
    "qwen2": {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
              "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 3,
              "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
              "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 6,
              "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
               "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
               "sliding_window": 4096, "num_hidden_layers": 6},
    "phi3": {"model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
             "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 6, "pad_token_id": 0,
             "tie_word_embeddings": False},
    "llama-1b": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 8,
                 "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008,
              "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 4,
              "tie_word_embeddings": False},
    "qwen3-moe": {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                  "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False},
}  # fmt: skip
CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:8",
)
_ATTENTION_ONLY = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lengths_of(kind: str, count: int, seed: int) -> list[int]:
    """Lengths as data sets have them."""
    r = random.Random(seed)
    if kind == "uniform":
        return [r.randint(64, 1300) for _ in range(count)]
    if kind == "lognormal":
        return [min(2048, max(32, round(r.lognormvariate(5.9, 0.6)))) for _ in range(count)]
    if kind == "rare":
        return [r.randint(100, 400) if r.random() < 0.93 else r.randint(900, 2000) for _ in range(count)]
    return [64 + round(1200 * i / count) + r.randint(0, 60) for i in range(count)]  # growing


def specs() -> list[Row]:
    """The runs: model, options, lengths, settings, and what share of the smallest limit that suffices."""
    found = []
    optimizers = ("adamw_torch", "paged_adamw_8bit", "adamw_8bit", "sgd")
    kinds = ("uniform", "lognormal", "rare", "growing")
    shares = (0.97, 1.01, 0.985, 1.03, 0.993, 1.06)
    known = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "llama-1b"]
    for number in range(32):
        model = known[number % len(known)]
        checkpointing = number % 3 == 1
        options: Row = {
            "optimizer": optimizers[number % 4],
            "checkpointing": checkpointing,
            "embeddings_require_grad": checkpointing,
            "attention": "eager" if model == "gemma2" else "sdpa",
            "prepare_kbit": number % 5 != 4 or model == "gemma2",
            "autocast": number in (9, 21),
            "accumulation": 3 if number % 8 == 6 else 1,
            "batch": 2 if number % 8 == 3 else 1,
        }
        steps = 60 + 20 * (number % 5)
        count = steps * options["accumulation"]
        lengths = lengths_of(kinds[number % 4], count, number)
        lengths = [length for length in lengths for _ in range(options["batch"])]  # equal rows: no mask
        conf = CONFS[number // 2 % 5]
        found.append(
            {"name": f"{number:02d}_{model}", "model": model, "options": options, "lengths": lengths, "conf": conf,
             "share": shares[number % 6]}
        )  # fmt: skip
    for number in range(8):
        model = "olmo2" if number % 2 else "qwen3-moe"
        options = {
            "optimizer": optimizers[number // 2 % 2],
            "checkpointing": number % 4 == 3,
            "embeddings_require_grad": number % 4 == 3,
            "attention": "sdpa",
            "prepare_kbit": model == "olmo2",
        }
        if model == "qwen3-moe":
            options["targets"] = _ATTENTION_ONLY
        found.append(
            {"name": f"{32 + number}_{model}", "model": model, "options": options,
             "lengths": lengths_of(kinds[number // 2], 60 + 10 * number, 100 + number),
             "conf": CONFS[number // 2 % 2], "share": shares[number % 6]}
        )  # fmt: skip
    return found + more_specs()


def more_specs() -> list[Row]:
    """Models that only a dry run knows, near enough to their limit to die; and runs with masks of padded rows,
    evaluation and clipped gradients, whose limit is a share of what they reserve without one."""
    off = {"checkpointing": False, "embeddings_require_grad": False}
    moe: Row = {"prepare_kbit": False, "targets": _ATTENTION_ONLY}
    rows: list[tuple[str, Row, str, str, float]] = [
        ("qwen3-moe", off | moe | {"optimizer": "adamw_torch"}, "uniform", "", 0.97),
        ("olmo2", off | {"optimizer": "adamw_8bit"}, "rare", "", 0.97),
        ("qwen3-moe", moe | {"optimizer": "paged_adamw_8bit"}, "lognormal", "expandable_segments:True", 0.985),
        ("olmo2", {"optimizer": "adamw_torch"}, "uniform", "", 0.985),
        ("llama", off | {"optimizer": "paged_adamw_8bit", "batch": 2, "padded": True}, "uniform", "", 0.97),
        ("llama-1b", {"optimizer": "adamw_torch", "batch": 4, "padded": True}, "rare", "", 0.95),
        ("qwen2", {"optimizer": "adamw_8bit", "evaluate_every": 10, "eval_length": 1024}, "uniform", "", 0.95),
        ("mistral", off | {"optimizer": "adamw_torch", "clip": 1.0}, "lognormal", "", 0.97),
    ]
    found = []
    for number, (model, options, kind, conf, share) in enumerate(rows, 40):
        options = {"checkpointing": True, "embeddings_require_grad": True, "attention": "sdpa", "prepare_kbit": True,
                   **options}  # fmt: skip
        lengths = lengths_of(kind, 60 * options.get("batch", 1), 200 + number)
        found.append({"name": f"{number}_{model}", "model": model, "options": options, "lengths": lengths,
                      "conf": conf, "share": share})  # fmt: skip
    return found


LOOP_ONLY = ("padded", "evaluate_every", "eval_length", "clip")  # options of the loop here, not of RunOptions


# ---- before the runs -------------------------------------------------------------------------------------------------
def plan(out: Path, only: list[str]) -> None:
    """Choose every run's limit and forecast it; runs with options of the loop get their limit on the GPU."""
    from memtrace.allocator.conf_text import parse_conf
    from memtrace.estimate.forecast import forecast, needs_bytes, prepare

    done = {json.loads(line)["name"] for line in out.open()} if out.exists() else set()
    for spec in specs():
        if spec["name"] in done or (only and not any(word in spec["name"] for word in only)):
            continue
        row = spec | {"architecture": MODELS[spec["model"]]}
        told = "limit: a share of what it reserves"
        if not any(name in spec["options"] for name in LOOP_ONLY):
            began = time.process_time()
            config = parse_conf(spec["conf"], (2, 11), DEVICE_TOTAL)
            while True:
                run_plan = run_plan_of(row)
                cells = prepare(run_plan)
                free = forecast(run_plan, config.with_limit(None), cells)
                if free.peak_reserved_bytes <= MOST_BYTES:
                    break
                row["lengths"] = [max(length * 2 // 3, 16) for length in row["lengths"]]
            needs = needs_bytes(run_plan, config, free, cells)
            assert needs is not None
            limit = int(needs * spec["share"])
            found = forecast(run_plan, config.with_limit(limit), cells)
            row |= {"limit_bytes": limit, "needs_bytes": needs, "predicted": predicted(found)}
            fate = f"dies in step {found.oom.step}" if found.oom else "survives"
            seconds = time.process_time() - began
            told = f"{limit / 2**30:8.2f} GiB  {fate:<20}{run_plan.source.basis:<14}{seconds:6.1f} s"
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{spec['name']:<16}{told}", flush=True)


def run_plan_of(row: Row) -> RunPlan:
    """The run as ``memtrace forecast`` sees it."""
    from memtrace.estimate.forecast import RunPlan
    from memtrace.estimate.options import RunOptions
    from memtrace.estimate.schedule import MicroBatch, steps_of
    from memtrace.estimate.shapes import FAMILIES, shape_from_config
    from memtrace.estimate.source import ShapeSource, StreamSource

    given, architecture = row["options"], row["architecture"]
    source: StreamSource
    if architecture["model_type"] in FAMILIES:
        source = ShapeSource(shape_from_config(architecture, row["name"]))
    else:
        from memtrace.estimate.dryrun.source import DryRunSource

        source = DryRunSource(row["model"], architecture)
    known = {name: value for name, value in given.items() if name not in LOOP_ONLY}
    targets, clips = tuple(given.get("targets", ["all-linear"])), bool(given.get("clip"))
    options = RunOptions(**{"sequence": 2, **known, "targets": targets, "clips": clips})
    steps = steps_of(row["lengths"], batch=options.batch, accumulation=options.accumulation)
    held_out = (MicroBatch(1, given["eval_length"]),) if "eval_length" in given else ()
    return RunPlan(source, options, steps, evaluation=held_out, evaluate_every=given.get("evaluate_every"))


def predicted(found: Forecast) -> Row:
    """What a forecast says, to be compared."""
    oom = found.oom
    return {
        "oom_step": None if oom is None else oom.step,
        "phase": None if oom is None else oom.phase,
        "micro_batch": None if oom is None else oom.micro_batch,
        "requested_bytes": None if oom is None else oom.requested_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "reserved_bytes": [step.peak_reserved_bytes for step in found.steps],
        "allocated_bytes": [step.peak_allocated_bytes for step in found.steps],
    }


# ---- on the GPU ------------------------------------------------------------------------------------------------------
def write_zeros(architecture: Row, folder: Path) -> None:
    """A bf16 checkpoint of zeros, as a sparse file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(architecture)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    header: Row = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in model.named_parameters():  # shared ones once
        size = 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def one(row: Row, folder: Path) -> Row:
    """Train one run in this process; what was measured."""
    import torch

    from memtrace.record import qlora

    options, total = row["options"], torch.cuda.get_device_properties(0).total_memory
    if row.get("limit_bytes"):
        torch.cuda.set_per_process_memory_fraction(row["limit_bytes"] / total)
    cfg = qlora.StepConfig(
        quant="nf4-dq", rank=16, dropout=0.05, optim=options["optimizer"], attn=options["attention"],
        checkpointing=options["checkpointing"], prepare_kbit=options["prepare_kbit"],
        autocast=options.get("autocast", False), targets=tuple(options.get("targets", ["all-linear"])),
    )  # fmt: skip
    refused: list[Row] = []
    where = {"step": -1, "phase": "load", "micro_batch": -1}

    def seen(device: int, asked: int, device_total: int, device_free: int) -> None:
        stats = torch.cuda.memory_stats()
        refused.append(where | {"requested_bytes": asked} | counters(stats))

    torch._C._cuda_attach_out_of_memory_observer(seen)
    steps: list[Row] = []
    result: Row = {"name": row["name"], "torch": torch.__version__, "device_total_bytes": total, "steps": steps}
    try:
        model = qlora.add_adapters(qlora.load_base(folder, cfg, "cuda:0"), cfg)
        optimizer = qlora.make_optimizer(model, cfg)
        vocab = qlora.vocabulary(model)
        model.train()
        batch, accumulation = options.get("batch", 1), options.get("accumulation", 1)
        micro = [row["lengths"][i : i + batch] for i in range(0, len(row["lengths"]), batch)]
        for step in range(0, len(micro), accumulation):
            torch.cuda.reset_peak_memory_stats()
            for number, group in enumerate(micro[step : step + accumulation]):
                where.update(step=step // accumulation, phase="forward", micro_batch=number)
                ids = torch.randint(0, vocab, (len(group), max(group))).to("cuda")
                mask = None
                if options.get("padded"):
                    places = torch.arange(max(group))
                    mask = torch.stack([(places < length).long() for length in group]).to("cuda")
                with torch.autocast("cuda", torch.bfloat16, enabled=cfg.autocast):
                    out = model(input_ids=ids, attention_mask=mask, labels=ids)
                loss = out.loss
                del out
                where["phase"] = "backward"
                loss.backward()
                del loss
            where["phase"] = "optimizer"
            if options.get("clip"):
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], options["clip"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if options.get("evaluate_every") and (step // accumulation + 1) % options["evaluate_every"] == 0:
                where["phase"] = "evaluation"
                model.eval()
                with torch.no_grad():
                    held_out = torch.randint(0, vocab, (1, options["eval_length"])).to("cuda")
                    model(input_ids=held_out, labels=held_out)
                del held_out
                model.train()
            stats = torch.cuda.memory_stats()
            steps.append([stats[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved")])
    except torch.OutOfMemoryError as error:
        result["message"] = str(error)[:400]
    result["oom"] = refused[-1] if "message" in result and refused else None
    result["end"] = counters(torch.cuda.memory_stats())
    return result


def counters(stats: Row) -> Row:
    """What the allocator counted, in memtrace's words."""
    return {
        "allocated_bytes": stats["allocated_bytes.all.current"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "segment_allocs": stats["num_device_alloc"],
        "segment_frees": stats["num_device_free"],
    }


def in_child(row: Row, folder: Path, deadline: float) -> Row:
    """One run in a fresh process."""
    environment = os.environ | {"PYTORCH_ALLOC_CONF": row["conf"], "OMP_NUM_THREADS": "2"}
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "one", str(folder)], input=json.dumps(row), capture_output=True, text=True,
            env=environment, timeout=max(deadline - began, 1),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"name": row["name"], "failed": "no time left"}
    seconds = round(time.monotonic() - began, 1)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"name": row["name"], "failed": done.stderr[-900:], "seconds": seconds}
    return json.loads(lines[-1]) | {"seconds": seconds}


def limited(row: Row, folder: Path, deadline: float) -> Row:
    """One run; where no limit is planned, a share of what it reserves without one, which takes a run to find out."""
    if "limit_bytes" not in row:
        free = in_child(row, folder, deadline)
        if "failed" in free:
            return free
        peak = max(step[2] for step in free["steps"])
        row = row | {"limit_bytes": int(row["share"] * peak)}
        return in_child(row, folder, deadline) | {"limit_bytes": row["limit_bytes"], "free_steps": free["steps"]}
    return in_child(row, folder, deadline)


def run(plan_file: Path, out: Path, seconds: float) -> None:
    """All planned runs, several at a time; what is done when ``seconds`` are over is kept."""
    deadline = time.monotonic() + seconds
    rows = [json.loads(line) for line in plan_file.open()]
    folders = {row["model"]: Path("/tmp/zeros") / row["model"] for row in rows}
    for model, folder in folders.items():
        write_zeros(MODELS[model], folder)
    with ThreadPoolExecutor(JOBS) as pool, out.open("w") as file:
        for found in pool.map(lambda row: limited(row, folders[row["model"]], deadline), rows):
            file.write(json.dumps(found) + "\n")
            file.flush()
            print(found["name"], found.get("failed", "done")[-200:], found.get("seconds"), flush=True)


# ---- after the runs --------------------------------------------------------------------------------------------------
def afterwards(row: Row) -> Row:
    """The forecast of a run whose limit was not known before."""
    from memtrace.allocator.conf_text import parse_conf
    from memtrace.estimate.forecast import forecast

    config = parse_conf(row["conf"], (2, 11), DEVICE_TOTAL).with_limit(row["limit_bytes"])
    return predicted(forecast(run_plan_of(row), config))


def compare(plan_file: Path, out: Path) -> None:
    """One line a run, and how many were right."""
    planned = {row["name"]: row for row in map(json.loads, plan_file.open())}
    right = close = count = exact = total = 0
    for found in map(json.loads, out.open()):
        row = planned[found["name"]]
        if "failed" in found:
            print(found["name"], "FAILED", found["failed"][-150:])
            continue
        count += 1
        oom = found["oom"]
        guess = row["predicted"] if "predicted" in row else afterwards(row | {"limit_bytes": found["limit_bytes"]})
        real_step = None if oom is None else oom["step"]
        pairs = list(zip(guess["reserved_bytes"], (step[2] for step in found["steps"]), strict=False))
        same = sum(a == b for a, b in pairs)
        finished = len(found["steps"]) or None  # after a refusal the allocator has given back what it could
        peak = max(step[2] for step in found["steps"])
        off = max(guess["reserved_bytes"][:finished]) / peak - 1
        right += guess["oom_step"] == real_step
        close += abs(off) <= 0.001
        exact, total = exact + same, total + len(pairs)
        print(f"{found['name']:<16}{row['conf'][:22]:<24}{guess['oom_step']!s:>6}{real_step!s:>6}"
              f"{same:>5}/{len(pairs):<5}{off:>+9.3%}{peak / 2**30:>8.2f} GiB")  # fmt: skip
    print(f"{count} runs: step of death right in {right}, reserved peak within 0.1 % in {close}, "
          f"steps exact {exact}/{total}")  # fmt: skip


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "plan":
        plan(Path(arguments[0]), arguments[1:])
    elif command == "run":
        run(Path(arguments[0]), Path(arguments[1]), float(arguments[2]) if len(arguments) > 2 else 480)
    elif command == "compare":
        compare(Path(arguments[0]), Path(arguments[1]))
    else:
        print(json.dumps(one(json.load(sys.stdin), Path(arguments[0]))))
