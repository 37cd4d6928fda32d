"""What memtrace's recording costs above PyTorch's own, on one training step: paired and interleaved.

    python3 tests/gpu/overhead.py MODEL_FOLDER OUT.json [--length 1024] [--pairs 10] [--steps 4]

Each pair runs the same steps once under PyTorch's own recording and once under memtrace's, in alternating order, with
the same stacks and ring; seconds of each step (GPU synchronised) and the peaks of memory are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent)]

import torch  # noqa: E402

from memtrace.capture import qlora  # noqa: E402
from memtrace.capture.recorder import Recorder, RecordOptions  # noqa: E402

PEAKS = ("requested_bytes.all.peak", "allocated_bytes.all.peak", "reserved_bytes.all.peak", "active_bytes.all.peak")
ENTRIES = 400_000


def block(model: Any, optimizer: Any, ids: Any, steps: int) -> dict[str, Any]:
    """One warm step, then ``steps`` timed ones and their peaks."""
    times = []
    for number in range(steps + 1):
        if number == 1:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    stats = torch.cuda.memory_stats()
    return {"first_s": times[0], "steps_s": times[1:], "peaks": {key: stats[key] for key in PEAKS}}


def recorded(how: str, stacks: str, run: Any) -> dict[str, Any]:
    """Run under one of the two recordings."""
    if how == "torch":
        torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks=stacks, max_entries=ENTRIES)
        found: dict[str, Any] = run()
        torch.cuda.memory._record_memory_history(enabled=None)
        return found
    recorder = Recorder(RecordOptions(Path(tempfile.gettempdir()), "overhead", stacks=stacks, max_entries=ENTRIES))
    recorder.begin()
    found = run()
    recorder.end()
    return found


def compare(run: Any, stacks: str, pairs: int) -> dict[str, Any]:
    """Interleaved pairs, and what they say."""
    blocks: list[dict[str, Any]] = []
    for number in range(pairs):
        pair = {}
        for how in ("torch", "memtrace") if number % 2 == 0 else ("memtrace", "torch"):
            pair[how] = recorded(how, stacks, run)
        blocks.append(pair)
    ratios = [
        statistics.median(pair["memtrace"]["steps_s"]) / statistics.median(pair["torch"]["steps_s"]) for pair in blocks
    ]
    return {
        "stacks": stacks,
        "median_step_s": {
            how: statistics.median(s for pair in blocks for s in pair[how]["steps_s"]) for how in ("torch", "memtrace")
        },
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "first_step_ratio": statistics.median(p["memtrace"]["first_s"] / p["torch"]["first_s"] for p in blocks),
        "peaks_equal": all(pair["torch"]["peaks"] == pair["memtrace"]["peaks"] for pair in blocks[1:]),
        "peaks": [{how: pair[how]["peaks"] for how in pair} for pair in blocks],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    cfg = qlora.StepConfig(seq_len=args.length)
    model = qlora.add_adapters(qlora.load_base(args.model, cfg, "cuda:0"), cfg)
    optimizer = qlora.make_optimizer(model, cfg)
    model.train()
    ids = torch.randint(0, qlora.vocabulary(model), (1, args.length), device="cuda:0")

    def run() -> dict[str, Any]:
        return block(model, optimizer, ids, args.steps)

    run()  # states, workspaces, autotuning
    plain = run()
    results = {"off_step_s": statistics.median(plain["steps_s"]), "off_peaks": plain["peaks"], "recordings": []}
    for stacks, pairs in (("python", args.pairs), ("all", max(2, args.pairs // 2))):
        results["recordings"].append(compare(run, stacks, pairs))
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
