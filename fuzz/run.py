"""Mutations of structure, opcodes, bytes, JSON and containers: each must end in an answer or one line, in seconds,
in little memory.


python fuzz/run.py [--count 100000] [--first 0] [--jobs 4] [--seconds 600]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from check import check, check_file  # noqa: E402
from mutate import damaged, packed  # noqa: E402

SECONDS = 20  # of processor time: other work on the machine must not look like a hang
_EVERY = 10_000
_PART = 250


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def tried(seeds: range) -> tuple[int, int, list[str], int]:
    """How many seeds were tried, how many made a readable snapshot, what failed, and the peak of memory in MiB."""
    readable, failed = 0, []
    for seed in seeds:
        try:
            with time_limit():
                readable += check_file(packed(seed)) if seed % 4 == 3 else check(damaged(seed))
        except Exception as error:
            failed.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
    return len(seeds), readable, failed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these, done or not")
    args = parser.parse_args()
    done = readable = failures = peak_mib = 0
    start = time.monotonic()
    parts = [range(seed, min(seed + _PART, args.first + args.count))
             for seed in range(args.first, args.first + args.count, _PART)]  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for tries, found, failed, mib in pool.imap_unordered(tried, parts):
            before = done // _EVERY
            done, readable, failures = done + tries, readable + found, failures + len(failed)
            peak_mib = max(peak_mib, mib)
            for line in failed:
                print(line, flush=True)
            if done // _EVERY > before:
                print(f"{done} done, {readable} readable, {failures} failures", flush=True)
            if time.monotonic() - start > args.seconds:
                break
    print(
        f"{done} damaged snapshots in {time.monotonic() - start:.0f} s: {readable} readable, "
        f"{failures} failures, peak memory {peak_mib} MiB"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
