"""What memtrace's commands cost against a bare ``pickle.load`` of the same file: the tables of docs/big-files.md.

    python benchmarks/bench_big.py [--runs 5] [--without-plain] [--forms] [--folder DIR]  7 M events, 0.56 M, a tiny one
    python benchmarks/bench_big.py RECORDING … [--runs 3] [--without-plain]         these, unpacked snapshots
    python benchmarks/bench_big.py --growth                                         from 0.6 to 16 million events

Whole processes run in turn, so that a machine whose speed drifts favours nobody. ``pickle.load`` runs with the garbage
collector off: with it on, a Python before 3.12 collects within the unpickler, and that would flatter memtrace.
Prints Markdown tables of medians: processor time, wall time and peak memory, each with its ratio; and how busy the
machine was. Recordings of millions of events are made out of a real one's steps (see big_recording.py). Bytecode files
are written first, as an installation has them.
"""

from __future__ import annotations

import argparse
import compileall
import lzma
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "sample_traces"
DEFAULT = SAMPLES / "llama2-7b_variable-length.pickle.xz"
TINY = SAMPLES / "tiny-llama_3-steps.pickle.xz"
LOAD = "import gc, pickle, sys; gc.disable(); pickle.load(open(sys.argv[1], 'rb'))"
AGAIN = """import gc, pickle, sys
gc.disable()
path, other, form, target = sys.argv[1:]
raw = pickle.load(open(path, "rb"))
if form == "merged":
    more = pickle.load(open(other, "rb"))
    raw["segments"] += [{**segment, "device": 1} for segment in more["segments"]]
    raw["device_traces"] = [raw["device_traces"][0], more["device_traces"][0]]
elif form == "cut":
    del raw["device_traces"][0][: len(raw["device_traces"][0]) // 10]
pickle.dump(raw, open(target, "wb"), int(form[-1]) if form.startswith("protocol") else 4)
"""
FORMS = ("protocol 2", "protocol 3", "protocol 4", "protocol 5", "merged", "cut", "zstd")
COUNT = """import sys
from memtrace.snapshot.load import load
print(sum(len(device.trace) for device in load(sys.argv[1]).devices))
"""
GROWTH = (600_000, 2_000_000, 7_000_000, 16_000_000)
CACHED_FROM = 1_000_000  # events; shorter recordings are not cached


class Cost(NamedTuple):
    """Processor seconds, wall seconds and peak memory in bytes of one process."""

    seconds: float
    wall_seconds: float
    memory_bytes: int


class Job(NamedTuple):
    """A row of a table: the arguments of a Python process, and whether it is too slow to run more than once."""

    name: str
    arguments: list[str]
    is_plain: bool = False
    runs_once: bool = False


def measure(job: Job, cache: Path) -> Cost:
    """Run one process; its output is thrown away."""
    more = {"MEMTRACE_CACHE": str(cache), "MEMTRACE_NO_INDEX": "", "MEMTRACE_PLAIN": "1" if job.is_plain else ""}
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *job.arguments], stdout=subprocess.DEVNULL, env={**os.environ, **more})
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(job.arguments)} failed")
    return Cost(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss << 10)


def memtrace(verb: str, *arguments: str | Path) -> list[str]:
    return ["-m", "memtrace", verb, *map(str, arguments)]


def show(title: str, jobs: list[Job], runs: int, cache: Path) -> None:
    """Print a table of medians, compared with the first row. Each round begins with an empty cache."""
    costs: dict[str, list[Cost]] = {job.name: [] for job in jobs}
    for number in range(runs):
        shutil.rmtree(cache, ignore_errors=True)
        for job in jobs:
            if number == 0 or not job.runs_once:
                costs[job.name].append(measure(job, cache))
    print(f"\n{title}, medians of {runs}; load of the machine {os.getloadavg()[0]:.1f}\n")
    print("| command | processor | wall | memory |\n|---|---:|---:|---:|")
    medians = {name: Cost(*map(statistics.median, zip(*taken, strict=True))) for name, taken in costs.items()}
    bare = medians[jobs[0].name]
    for job in jobs:
        cost = medians[job.name]
        print(
            f"| {job.name}{' (one run)' * job.runs_once} | {cost.seconds:.2f} s ({cost.seconds / bare.seconds:.2f}) "
            f"| {cost.wall_seconds:.2f} s ({cost.wall_seconds / bare.wall_seconds:.2f}) "
            f"| {cost.memory_bytes / 2**20:,.0f} MiB ({cost.memory_bytes / bare.memory_bytes:.2f}) |",
            flush=True,
        )


def compare(path: Path, runs: int, folder: Path, with_plain: bool) -> None:
    """The table of one recording. From a million events on, the first report fills the cache that the others use."""
    count = subprocess.run([sys.executable, "-c", COUNT, str(path)], check=True, capture_output=True)
    events = int(count.stdout)
    is_cached = events >= CACHED_FROM
    cached = ", cached" if is_cached else ""
    part = f"{events // 2}:{events // 2 + max(events // 100, 1)}"
    jobs = [Job("`pickle.load`", ["-c", LOAD, str(path)]), Job("`report`", memtrace("report", path))]
    if is_cached:
        jobs.append(Job("`report` again", memtrace("report", path)))
    jobs += [
        Job(f"`explain`{cached}", memtrace("explain", path)),
        Job(f"`report --events`, 1 %{cached}", memtrace("report", path, "--events", part)),
        Job("`simulate`, one setting", memtrace("simulate", path, "--conf", "expandable_segments:True")),
    ]
    if not is_cached:
        jobs.append(Job("`simulate --search`", memtrace("simulate", path, "--search"), runs_once=True))
    if with_plain:
        jobs.append(
            Job("`report`, plain Python", memtrace("report", path, "--no-index"), is_plain=True, runs_once=True)
        )
    show(f"{events:,} events, {path.stat().st_size / 2**20:,.0f} MiB", jobs, runs, folder / "cache")


def compare_forms(path: Path, other: Path, runs: int, folder: Path) -> None:
    """First reports of the same events as a script may write them, each against ``pickle.load`` of that file (packed:
    of the plain one). A merged file has the ``other`` one's events as its second device."""
    print(f"\nThe same in other forms, medians of {runs}; load of the machine {os.getloadavg()[0]:.1f}\n")
    print("| form | `pickle.load` | `report` | its memory |\n|---|---:|---:|---:|")
    for form in FORMS if shutil.which("zstd") else FORMS[:-1]:
        made = folder / "form.pickle"
        if form == "zstd":
            subprocess.run(["zstd", "-qf", str(path), "-o", str(made)], check=True)
        else:
            subprocess.run([sys.executable, "-c", AGAIN, str(path), str(other), form, str(made)], check=True)
        costs: list[list[Cost]] = []
        for _ in range(runs):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            jobs = (
                Job("", ["-c", LOAD, str(path if form == "zstd" else made)]),
                Job("", memtrace("report", made, "--device", "0")),
            )
            costs.append([measure(job, folder / "cache") for job in jobs])
        bare, cost = (Cost(*map(statistics.median, zip(*each, strict=True))) for each in zip(*costs, strict=True))
        print(
            f"| {form} | {bare.seconds:.2f} s | {cost.seconds:.2f} s ({cost.seconds / bare.seconds:.2f}) "
            f"| {cost.memory_bytes / 2**20:,.0f} MiB ({cost.memory_bytes / bare.memory_bytes:.2f}) |",
            flush=True,
        )
        made.unlink()


def compare_start(runs: int, folder: Path) -> None:
    """What a file of a few events costs, against numpy's own start."""
    tiny = unpacked(TINY, folder / "tiny.pickle")
    jobs = [Job("`import numpy`", ["-c", "import numpy"])]
    jobs += [Job(f"`{verb}`", memtrace(verb, tiny)) for verb in ("report", "explain", "info")]
    show("A tiny file, cold start", jobs, runs, folder / "cache")


def unpacked(source: Path, path: Path) -> Path:
    """In parts: a child's peak counts its parent's memory, too."""
    with lzma.open(source) as packed, path.open("wb") as out:
        shutil.copyfileobj(packed, out)
    return path


def make(path: Path, events: int) -> Path:
    """Write a recording, in a process of its own, for the same reason."""
    maker = [sys.executable, str(Path(__file__).with_name("big_recording.py")), str(path), "--events", str(events)]
    subprocess.run(maker, check=True, capture_output=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path, help="unpacked snapshots to measure as they are")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--growth", action="store_true", help="needs 10 GB of memory and 4 GB of disk")
    parser.add_argument("--without-plain", action="store_true", help="leave out the runs without compiled parts")
    parser.add_argument(
        "--forms", action="store_true", help="other forms of the 7 million events, too (12 GB of memory)"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where recordings are made")
    args = parser.parse_args()
    compileall.compile_dir(ROOT / "memtrace", quiet=1)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    with_plain = not args.without_plain
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        for path in args.recordings:
            compare(path, args.runs, folder, with_plain)
        for events in GROWTH if args.growth else ():
            compare(make(folder / "big.pickle", events), args.runs, folder, with_plain=False)
        if not args.recordings and not args.growth:
            compare_start(4 * args.runs, folder)
            middle = unpacked(DEFAULT, folder / "middle.pickle")
            compare(middle, args.runs, folder, with_plain)
            compare_forms(middle, middle, args.runs, folder)
            big = make(folder / "big.pickle", 7_000_000)
            compare(big, args.runs, folder, with_plain)
            if args.forms:
                compare_forms(big, middle, args.runs, folder)


if __name__ == "__main__":
    main()
