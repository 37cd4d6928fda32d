"""A recording of millions of events: ``memtrace report``, again from the cache, and of a part of it from the cache,
against a bare ``pickle.load``.

    python benchmarks/bench_big.py [--events 7000000] [--runs 1] [--table] [--folder DIR]

Makes the recording (see big_recording.py), then runs whole processes in turn. Times are processor time, so that other
work on the machine counts for neither side. ``--table`` goes from 0.6 to 16 million events (70 MB to 2 GB) to show
that cost grows linearly; it needs 10 GB of memory for the bare load and 4 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

DEFAULT = Path(__file__).parents[1] / "sample_traces" / "llama2-7b_variable-length.pickle.xz"
BARE = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
TABLE = (600_000, 2_000_000, 7_000_000, 16_000_000)


class Cost(NamedTuple):
    """Processor seconds and peak memory in bytes of one process."""

    seconds: float
    memory_bytes: int


def make(source: Path, path: Path, events: int) -> tuple[int, int]:
    """Write a recording; (events, bytes). In a process of its own: a child's peak counts its parent's memory, too."""
    maker = [sys.executable, str(Path(__file__).with_name("big_recording.py")), str(path)]
    said = subprocess.run(
        [*maker, "--events", str(events), "--from", str(source)], check=True, capture_output=True, text=True
    )
    return int(said.stdout.rsplit(": ", 1)[1].split()[0].replace(",", "")), path.stat().st_size


def measure(command: list[str], environment: dict[str, str]) -> Cost:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)


def compare(path: Path, runs: int, cache: Path, events: int) -> list[Cost]:
    """Medians of bare pickle.load, memtrace report, again from the cache, and of one hundredth of the events."""
    report = [sys.executable, "-m", "memtrace", "report", str(path)]
    home = {"MEMTRACE_CACHE": str(cache), "MEMTRACE_NO_INDEX": ""}
    middle = events // 2
    part = ["--events", f"{middle}:{middle + events // 100}"]
    costs: list[list[Cost]] = [[], [], [], []]
    for _ in range(runs):
        shutil.rmtree(cache, ignore_errors=True)
        costs[0].append(measure([sys.executable, "-c", BARE, str(path)], home))
        costs[1].append(measure(report, home))  # fills the cache, too
        costs[2].append(measure(report, home))
        costs[3].append(measure([*report, *part], home))
    shutil.rmtree(cache, ignore_errors=True)
    return [
        Cost(statistics.median(c.seconds for c in side), int(statistics.median(c.memory_bytes for c in side)))
        for side in costs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=7_000_000)
    parser.add_argument("--from", dest="source", type=Path, default=DEFAULT)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="where recordings are made")
    args = parser.parse_args()
    print("   events      MiB | pickle.load     | report          (ratio)     | again           (ratio)     | a part")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for wanted in TABLE if args.table else (args.events,):
            path = Path(folder) / "big.pickle"
            events, size_bytes = make(args.source, path, wanted)
            bare, *others = compare(path, args.runs, Path(folder) / "cache", events)
            cells = [
                f"{events:9,} {size_bytes / 2**20:8,.0f}",
                f"{bare.seconds:6.2f} s {bare.memory_bytes >> 20:5,} MiB",
            ]
            cells += [
                f"{cost.seconds:6.2f} s {cost.memory_bytes >> 20:5,} MiB "
                f"({cost.seconds / bare.seconds:.2f}, {cost.memory_bytes / bare.memory_bytes:.2f})"
                for cost in others
            ]
            print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
