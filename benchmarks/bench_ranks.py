"""``memtrace ranks`` on many copies of one recording: wall time against the ideal, and memory a worker.

    python benchmarks/bench_ranks.py [RECORDING.pickle.xz] [--copies 64] [--jobs 2] [--dask]

The ideal is the time one worker needs for all copies, divided by the number of workers; both are measured in turn, in
one run. Processor time is shown beside it: where other work competes for the cores, wall times say little, and its
ratio still shows what the workers cost. Memory is the largest worker's, against a process that reads one.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from memtrace.ranks.summary import Failure, Rank
from memtrace.ranks.workers import in_processes, on_dask

DEFAULT = Path(__file__).parents[1] / "sample_traces" / "llama2-7b_baseline.pickle.xz"
ONE = (
    "import resource, sys; from memtrace.ranks.summary import summarise; summarise(sys.argv[1]);"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)


def timed(work: Callable[[], list[Rank | Failure]]) -> tuple[float, float, list[Rank | Failure]]:
    """(wall seconds, processor seconds of the workers, answers)."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    answers = work()
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return time.perf_counter() - start, processor, answers


def dask_run(sources: list[str], jobs: int) -> list[Rank | Failure]:
    """The same over a scheduler with ``jobs`` worker processes, its start not counted by the caller."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=jobs, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster:
        elapsed, _, answers = timed(lambda: on_dask(sources, cluster.scheduler_address))
        print(f"dask, {jobs} workers     {elapsed:7.2f} s (cluster already up)")
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--copies", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dask", action="store_true", help="also over a local Dask scheduler")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = [str(Path(folder) / f"rank{number}.pickle.xz") for number in range(args.copies)]
        for source in sources:
            Path(source).symlink_to(args.recording.resolve())
        one = subprocess.run([sys.executable, "-c", ONE, sources[0]], capture_output=True, text=True, check=True)
        one_mib = int(one.stdout) / 1024
        half = len(sources) // 2
        # In halves, so that a machine whose speed drifts favours neither side.
        first, first_cpu, alone = timed(lambda: in_processes(sources[:half], jobs=1))
        many, many_cpu, answers = timed(lambda: in_processes(sources, jobs=args.jobs))
        second, second_cpu, rest = timed(lambda: in_processes(sources[half:], jobs=1))
        worker_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        assert answers == alone + rest, "the number of workers changed the answer"
        ideal = (first + second) / args.jobs
        print(f"{args.copies} copies of {args.recording.name}")
        one_cpu = first_cpu + second_cpu
        print(f"one worker           {first + second:7.2f} s wall, {one_cpu:.2f} s of processor")
        print(f"{args.jobs} workers            {many:7.2f} s wall, {many_cpu:.2f} s of processor")
        print(f"ratio to the ideal   {many / ideal:7.2f} wall, {many_cpu / one_cpu:.2f} processor")
        print(f"largest worker       {worker_mib:7.0f} MiB; a process that reads one copy {one_mib:.0f} MiB")
        if args.dask:
            assert dask_run(sources, args.jobs) == answers, "Dask changed the answer"


if __name__ == "__main__":
    main()
