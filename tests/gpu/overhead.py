"""What memtrace's recording costs above PyTorch's own, on one training step: paired and interleaved.
Also what the light step log costs above no recording at all.

    python3 tests/gpu/overhead.py MODEL_FOLDER OUT.json [--length 1024] [--pairs 40]

A pair is two steps next to each other, one under PyTorch's own recording and one under memtrace's, in alternating
order, with the same stacks and ring. Single steps vary by tens of percent on a shared machine, so besides the paired
ratio (and its 95 % interval by bootstrap) the seconds that memtrace's own code took in a step are measured directly.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent)]

import torch  # noqa: E402

from memtrace.record import qlora  # noqa: E402
from memtrace.record.backend import get as get_backend  # noqa: E402
from memtrace.record.recorder import Recorder, RecordOptions  # noqa: E402
from memtrace.record.steplog import StepLog  # noqa: E402

PEAKS = ("requested_bytes.all.peak", "allocated_bytes.all.peak", "reserved_bytes.all.peak", "active_bytes.all.peak")
ENTRIES = 400_000
OWN = ("_begins", "_ends", "_optimizer_begins", "_optimizer_ends")


class Timed:
    """Adds up the seconds of a recorder's hooks. The wrapper's own microsecond counts against memtrace."""

    def __init__(self, recorder: Recorder) -> None:
        self.seconds = 0.0
        for name in OWN:
            setattr(recorder.hooks, name, self.timed(getattr(recorder.hooks, name)))

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - began
            return result

        return call


class Bench:
    """One model and its step."""

    def __init__(self, folder: str, length: int) -> None:
        cfg = qlora.StepConfig(seq_len=length)
        self.model = qlora.add_adapters(qlora.load_base(folder, cfg, "cuda:0"), cfg)
        self.optimizer = qlora.make_optimizer(self.model, cfg)
        self.model.train()
        self.ids = torch.randint(0, qlora.vocabulary(self.model), (1, length), device="cuda:0")

    def step(self) -> float:
        """Seconds of one step, the GPU waited for."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        del loss
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def recorded_step(self, how: str, stacks: str, known: bool = True) -> dict[str, Any]:
        """One step under one of the two recordings; ``known``: memtrace knows the model already."""
        torch.cuda.reset_peak_memory_stats()
        own_s = 0.0
        if how == "torch":
            record = torch.cuda.memory._record_memory_history
            record(enabled="all", context="all", stacks=stacks, max_entries=ENTRIES)
            seconds = self.step()
            record(enabled=None)
        else:
            options = RecordOptions(Path(tempfile.gettempdir()), "overhead", stacks=stacks, max_entries=ENTRIES)
            recorder = Recorder(options, self.model if known else None)
            timed = Timed(recorder)
            recorder.begin()
            if known:
                recorder.hooks._end_discovery()
            seconds = self.step()
            own_s = timed.seconds
            recorder.end()
        stats = torch.cuda.memory_stats()
        return {"seconds": seconds, "own_s": own_s, "peaks": {key: stats[key] for key in PEAKS}}

    def pairs(self, count: int, stacks: str, known: bool = True) -> list[dict[str, dict[str, Any]]]:
        """Interleaved pairs in alternating order."""
        found = []
        for number in range(count):
            order = ("torch", "memtrace") if number % 2 == 0 else ("memtrace", "torch")
            found.append({how: self.recorded_step(how, stacks, known) for how in order})
        return found

    def logged_steps(self, count: int) -> dict[str, Any]:
        """Pairs of a bare step and one with the light step log, and the seconds the log's own code took."""
        log = StepLog(get_backend())
        own: list[float] = []
        ratios: list[float] = []
        for number in range(count):
            seconds: dict[str, float] = {}
            for how in ("bare", "logged") if number % 2 == 0 else ("logged", "bare"):
                seconds[how] = self.step()
                if how == "logged":
                    began = time.perf_counter()
                    log.note(number)
                    own.append(time.perf_counter() - began)
                    seconds[how] += own[-1]
            ratios.append(seconds["logged"] / seconds["bare"])
        step_s = statistics.median(self.step() for _ in range(10))
        return {
            "pairs": count, "median_ratio": statistics.median(ratios), "ratio_95_percent": interval(ratios),
            "own_us": 1e6 * statistics.median(own), "step_s": step_s, "own_share": statistics.median(own) / step_s,
        }  # fmt: skip


def ratios_of(pairs: list[dict[str, dict[str, Any]]]) -> list[float]:
    return [pair["memtrace"]["seconds"] / pair["torch"]["seconds"] for pair in pairs]


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def summary(pairs: list[dict[str, dict[str, Any]]], stacks: str) -> dict[str, Any]:
    """What the pairs say."""
    ratios = ratios_of(pairs)
    step_s = {how: statistics.median(pair[how]["seconds"] for pair in pairs) for how in ("torch", "memtrace")}
    own_s = statistics.median(pair["memtrace"]["own_s"] for pair in pairs)
    return {
        "stacks": stacks,
        "median_step_s": step_s,
        "median_ratio": statistics.median(ratios),
        "ratio_95_percent": interval(ratios),
        "own_s": own_s,
        "own_share": own_s / step_s["torch"],
        "ratios": ratios,
        "peaks_equal": len({json.dumps(pair[how]["peaks"]) for pair in pairs for how in pair}) == 1,
        "peaks": pairs[0]["memtrace"]["peaks"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    bench = Bench(args.model, args.length)
    off = [bench.step() for _ in range(10)][2:]
    results: dict[str, Any] = {"off_step_s": statistics.median(off), "off_steps_s": off, "recordings": []}
    for stacks, count in (("python", args.pairs), ("all", args.pairs // 2)):
        bench.pairs(2, stacks)
        results["recordings"].append(summary(bench.pairs(count, stacks), stacks))
    results["step_log"] = bench.logged_steps(args.pairs)
    first = bench.pairs(10, "python", known=False)
    results["first_step"] = {
        "percent": round(100 * (statistics.median(ratios_of(first)) - 1), 2),
        "own_code_ms": round(1000 * statistics.median(pair["memtrace"]["own_s"] for pair in first), 2),
    }
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
