"""One what-if setting against a bare ``pickle.load`` of the same file, in processor time of one process.

    python benchmarks/bench_simulate.py [RECORDING.pickle.xz] [--runs N]

Prints medians of the ratios: each simulation is timed right after a load, so that a machine whose speed drifts does
not favour either. The garbage collector is off: it would only slow the load. The last lines run growing parts of the
trace, to show that time grows with events.
"""

from __future__ import annotations

import argparse
import gc
import io
import lzma
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from memtrace.allocator.conf_text import parse_conf
from memtrace.allocator.config import from_snapshot
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.replay.replay import replay_device
from memtrace.allocator.whatif.program import extract
from memtrace.allocator.whatif.whatif import simulate
from memtrace.snapshot.load import load

DEFAULT = Path(__file__).parents[1] / "sample_traces" / "llama2-7b_variable-length.pickle.xz"
CONFS = (
    ("", None),
    ("expandable_segments:True", None),
    ("max_split_size_mb:128", None),
    ("roundup_power2_divisions:8", None),
    ("", 0.9),
    ("garbage_collection_threshold:0.6", 0.95),
)


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    raw = lzma.decompress(args.recording.read_bytes())
    gc.disable()
    snapshot = load(args.recording)
    device = max(snapshot.devices, key=lambda dev: len(dev.trace))
    program = extract(gather(device, from_snapshot(snapshot.settings)))
    peak = simulate(program, from_snapshot(snapshot.settings)).peak_reserved_bytes
    jobs: list[tuple[str, Callable[[], object]]] = [
        ("replay of the recording", lambda: replay_device(device, snapshot.settings)),
        ("program extraction", lambda: extract(gather(device, from_snapshot(snapshot.settings)))),
    ]
    for conf, share in CONFS:
        config = parse_conf(conf).with_limit(None if share is None else int(share * peak))
        label = (conf or "default settings") + ("" if share is None else f", limit {share:.0%} of the peak")
        jobs.append((label, lambda config=config: simulate(program, config)))  # type: ignore[misc]

    print(f"{args.recording.name}: {len(device.trace):,} events, {len(raw) / 2**20:.0f} MiB unpacked")
    for label, work in jobs:
        pairs = [(seconds(lambda: pickle.load(io.BytesIO(raw))), seconds(work)) for _ in range(args.runs)]
        ratio = statistics.median(mine / bare for bare, mine in pairs)
        mine = statistics.median(second for _, second in pairs)
        rate = len(device.trace) / mine / 1e6
        print(f"{label:<58} {mine:6.2f} s  {rate:5.2f} M events/s  ratio to pickle.load {ratio:.2f}")
    for share in (0.25, 0.5, 1.0):
        cut = int(len(program.op) * share)
        part = replace(program, op=program.op[:cut], handle=program.handle[:cut], event=program.event[:cut])
        taken = statistics.median(seconds(lambda part=part: simulate(part, parse_conf(""))) for _ in range(args.runs))  # type: ignore[misc]
        print(f"{share:4.0%} of the program: {taken / np.maximum(cut, 1) * 1e6:.2f} µs an operation")


if __name__ == "__main__":
    main()
