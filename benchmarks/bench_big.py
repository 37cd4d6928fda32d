"""Recordings of millions of events: what memtrace's commands cost against a bare ``pickle.load`` of the same file.

    python benchmarks/bench_big.py [--events 7000000] [--runs 5] [--table] [--folder DIR] [RECORDING …]

Makes the recording (see big_recording.py), or takes the ones that are named, and runs whole processes in turn, so that
a machine whose speed drifts favours nobody. ``pickle.load`` runs with the garbage collector off: with it on, a Python
before 3.12 collects within the unpickler, and the comparison would flatter memtrace. Prints Markdown tables of medians:
processor time, wall time and peak memory, each with its ratio. ``--table`` goes from 0.6 to 16 million events (70 MB to
2 GB); it needs 10 GB of memory for the bare load and 4 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

DEFAULT = Path(__file__).parents[1] / "sample_traces" / "llama2-7b_variable-length.pickle.xz"
BARE = "import gc, pickle, sys; gc.disable(); pickle.load(open(sys.argv[1], 'rb'))"
AGAIN = """import gc, pickle, sys
gc.disable()
with open(sys.argv[1], "rb") as source, open(sys.argv[2], "wb") as out:
    pickle.dump(pickle.load(source), out, int(sys.argv[3]))
"""
COUNT = """import sys
from memtrace.snapshot.load import load
print(sum(len(device.trace) for device in load(sys.argv[1]).devices))
"""
TABLE = (600_000, 2_000_000, 7_000_000, 16_000_000)
MEMTRACE = [sys.executable, "-m", "memtrace"]


class Cost(NamedTuple):
    """Processor seconds, wall seconds and peak memory in bytes of one process."""

    seconds: float
    wall_seconds: float
    memory_bytes: int


def make(source: Path, path: Path, events: int) -> None:
    """Write a recording, in a process of its own: a child's peak counts its parent's memory, too."""
    maker = [sys.executable, str(Path(__file__).with_name("big_recording.py")), str(path)]
    subprocess.run([*maker, "--events", str(events), "--from", str(source)], check=True, capture_output=True)


def measure(command: list[str], **environment: str) -> Cost:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return Cost(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss << 10)


def events_of(path: Path) -> int:
    return int(subprocess.run([sys.executable, "-c", COUNT, str(path)], check=True, capture_output=True).stdout)


def compare(path: Path, runs: int, cache: Path, events: int) -> dict[str, Cost]:
    """Medians by command. The cache is empty before the first report and filled by it (from a million events on)."""
    file = str(path)
    part = f"{events // 2}:{events // 2 + max(events // 100, 1)}"
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "`pickle.load`": ([sys.executable, "-c", BARE, file], {}),
        "`report`, plain Python": ([*MEMTRACE, "report", file, "--no-index"], {"MEMTRACE_PLAIN": "1"}),
        "`report`": ([*MEMTRACE, "report", file], {}),
        "`report` again": ([*MEMTRACE, "report", file], {}),
        "`explain`, cached": ([*MEMTRACE, "explain", file], {}),
        "`report --events`, 1 %, cached": ([*MEMTRACE, "report", file, "--events", part], {}),
        "`simulate`, one setting": ([*MEMTRACE, "simulate", file, "--conf", "expandable_segments:True"], {}),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(runs):
        shutil.rmtree(cache, ignore_errors=True)
        for name, (command, more) in commands.items():
            costs[name].append(measure(command, MEMTRACE_CACHE=str(cache), MEMTRACE_NO_INDEX="", **more))
    return {
        name: Cost(*(statistics.median(part) for part in zip(*taken, strict=True))) for name, taken in costs.items()
    }


def show(path: Path, events: int, costs: dict[str, Cost]) -> None:
    bare = costs["`pickle.load`"]
    print(f"\n{events:,} events, {path.stat().st_size / 2**20:,.0f} MiB\n")
    print("| command | processor | wall | memory |\n|---|---:|---:|---:|")
    for name, cost in costs.items():
        print(
            f"| {name} | {cost.seconds:.2f} s ({cost.seconds / bare.seconds:.2f}) "
            f"| {cost.wall_seconds:.2f} s ({cost.wall_seconds / bare.wall_seconds:.2f}) "
            f"| {cost.memory_bytes / 2**20:,.0f} MiB ({cost.memory_bytes / bare.memory_bytes:.2f}) |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path, help="unpacked snapshots to measure as they are")
    parser.add_argument("--events", type=int, default=7_000_000)
    parser.add_argument("--from", dest="source", type=Path, default=DEFAULT)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--repickled", type=int, metavar="PROTOCOL", help="pickled again by Python, with this protocol")
    parser.add_argument("--folder", type=Path, default=None, help="where recordings are made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        made, cache = Path(folder) / "big.pickle", Path(folder) / "cache"
        for wanted in args.recordings or (TABLE if args.table else (args.events,)):
            path = wanted if isinstance(wanted, Path) else made
            if path is made:
                make(args.source, made, wanted)
            if args.repickled is not None:
                again = Path(folder) / "again.pickle"
                subprocess.run([sys.executable, "-c", AGAIN, str(path), str(again), str(args.repickled)], check=True)
                path = again
            events = events_of(path)
            show(path, events, compare(path, args.runs, cache, events))


if __name__ == "__main__":
    main()
