"""Predicted against real: a recorded program run again on a real caching allocator under other settings.

    python benchmarks/gpu_whatif.py [RECORDING…] [--out TABLE.json]        (needs a CUDA device and torch)

Each row starts a fresh process with that settings string and limit, makes the recorded requests in order
(allocations are not touched, only held), and compares PyTorch's own statistics with what the simulation said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.allocator.addresses import Policy
from memtrace.allocator.conf_text import parse_conf
from memtrace.allocator.config import from_snapshot
from memtrace.allocator.evidence import gather
from memtrace.allocator.program import Op, Program, extract
from memtrace.allocator.whatif import simulate
from memtrace.snapshot.load import load

SAMPLES = Path(__file__).parents[1] / "sample_traces"
DEFAULT = ("llama2-7b_variable-length", "llama2-7b_oom-fragmentation", "qwen2-7b_large-vocabulary")
CONFS = (
    "", "expandable_segments:True", "max_split_size_mb:64", "max_split_size_mb:128", "max_split_size_mb:512",
    "roundup_power2_divisions:4", "roundup_power2_divisions:[64:8,256:4,>:2]", "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.8,max_split_size_mb:128", "max_split_size_mb:100,max_non_split_rounding_mb:64",
    "large_segment_size_mb:64",
)  # fmt: skip
SHARES = (0, 0.95, 0.85)  # of the peak under default settings, as the limit; 0 is none
KEYS = (
    "reserved_bytes.all.peak", "allocated_bytes.all.peak", "reserved_bytes.all.current", "num_alloc_retries",
    "num_ooms", "num_device_alloc", "num_device_free", "segment.all.allocated", "inactive_split_bytes.all.peak",
)  # fmt: skip


def read(file: Path) -> Program:
    """The program behind the busiest device of a recording."""
    snapshot = load(file)
    device = max(snapshot.devices, key=lambda dev: len(dev.trace))
    return extract(gather(device, from_snapshot(snapshot.settings)))


def save(program: Program, path: Path) -> None:
    """What the child needs, so that it need not read the recording."""
    refusals = np.array([(r.size_bytes, r.stream) for r in program.refusals], dtype=np.int64).reshape(-1, 2)
    np.savez(
        path, op=program.op, handle=program.handle, event=program.event, size=program.requested_bytes,
        stream=program.stream, refusals=refusals,
    )  # fmt: skip


def run_for_real(path: Path, limit: int) -> dict[str, Any]:
    """Make the requests of a program on this process's allocator; returns its statistics. In a fresh process."""
    import torch

    program = np.load(path)
    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    if limit:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    raw_streams = np.unique(program["stream"]).tolist()
    made = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in raw_streams[1:])]
    streams = dict(zip(raw_streams, (stream.cuda_stream for stream in made), strict=True))
    take, give = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
    sizes, stream_of = program["size"].tolist(), [streams[s] for s in program["stream"].tolist()]
    refusals = program["refusals"].tolist()
    pointers: dict[int, int] = {}
    stopped_at = None
    steps = zip(program["op"].tolist(), program["handle"].tolist(), program["event"].tolist(), strict=True)
    for code, handle, event in steps:
        if code == Op.MALLOC:
            try:
                pointers[handle] = take(sizes[handle], stream_of[handle])
            except torch.OutOfMemoryError:
                stopped_at = event
                break
        elif code in (Op.FREE, Op.DEFER):
            give(pointers.pop(handle))
        elif code == Op.FLUSH:
            torch.cuda.empty_cache()
        elif code == Op.REFUSE:
            size, stream = refusals[handle]
            with contextlib.suppress(torch.OutOfMemoryError):
                give(take(size, streams[stream]))
    statistics = torch.cuda.memory_stats()
    limit_bytes = None if not limit else int(limit / total * total)  # as PyTorch computes it
    return {"stopped_at": stopped_at, "limit": limit_bytes, "torch": torch.__version__} | {
        key: statistics.get(key, 0) for key in KEYS
    }


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a torch version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def row(name: str, program: Program, saved: Path, conf: str, limit: int) -> dict[str, Any]:
    """One prediction and its reality. ``limit`` 0 is none."""
    command = [sys.executable, __file__, str(saved), "--child", str(limit)]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    head = {"recording": name, "conf": conf}
    if done.returncode:
        return head | {"error": done.stderr.strip()[-300:]}
    real = json.loads(done.stdout.splitlines()[-1])
    config = parse_conf(conf, release(real["torch"])).with_limit(real["limit"])
    said = simulate(program, config, Policy.FALLING, counters=True)
    statistics = said.statistics()
    predicted = {key: statistics[key] for key in KEYS} | {"stopped_at": said.stopped_at}
    peaks = {"falling": said.peak_reserved_bytes}
    for policy in (Policy.RISING, Policy.DRIVER):
        peaks[policy.value] = simulate(program, config, policy).peak_reserved_bytes
    return head | {
        "real": real, "predicted": predicted, "peak_by_addresses": peaks,
        "peak_error": said.peak_reserved_bytes / max(real["reserved_bytes.all.peak"], 1) - 1,
        "different": {key: (value, real[key]) for key, value in predicted.items() if value != real[key]},
    }  # fmt: skip


def describe(one: dict[str, Any]) -> str:
    """One line for people."""
    if "error" in one:
        return f"{one['recording']} {one['conf']!r}: {one['error']}"
    limit = one["real"]["limit"]
    return (
        f"{one['recording']:<30} {one['conf']:<56} {'none' if limit is None else f'{limit / 2**30:.2f}':>6} "
        f"real {one['real']['reserved_bytes.all.peak']:>12} error {one['peak_error']:+.3%} "
        f"{one['different'] or 'all equal'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, help="write the whole table as JSON")
    parser.add_argument("--parallel", type=int, default=4, help="processes on the GPU at a time")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(run_for_real(args.recordings[0], args.child)))
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.parallel) as workers:
        jobs = []
        for file in args.recordings or [SAMPLES / f"{name}.pickle.xz" for name in DEFAULT]:
            program, name = read(file), file.name.removesuffix(".pickle.xz")
            saved = Path(folder) / f"{name}.npz"
            save(program, saved)
            peak = simulate(program, parse_conf("")).peak_reserved_bytes
            limits = [int(share * peak) >> 21 << 21 for share in SHARES]
            jobs += [
                workers.submit(row, name, program, saved, conf, limit)
                for conf, limit in product(CONFS, limits)
                if limit or "garbage" not in conf
            ]
        rows = []
        for job in jobs:
            rows.append(job.result())
            print(describe(rows[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
