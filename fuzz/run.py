"""Mutations of structure, opcodes, bytes, JSON, containers and logs: each must end in an answer or one line, in
seconds, in little memory.


python fuzz/run.py [--count 100000] [--first 0] [--jobs 4] [--seconds 600] [--found FOLDER]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from check import check, check_file, check_log  # noqa: E402
from mutate import damaged, log, packed  # noqa: E402

SECONDS = 20  # of processor time: other work on the machine must not look like a hang
_MOST_MIB = 1024
_EVERY = 10_000
_PART = 250
_working: Any = None  # which seed each process is at: what is left of one that died


def case(seed: int) -> tuple[Callable[[bytes], bool], bytes]:
    """The input of a seed, and what it must satisfy."""
    if seed % 4 == 3:
        return check_file, packed(seed)
    return (check_log, log(seed)) if seed % 8 == 5 else (check, damaged(seed))


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * SECONDS)  # ends the process: compiled code does not see the other
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def begin(working: Any) -> None:
    """What a process keeps to tell where it was."""
    global _working
    _working = working


def tried(seeds: range) -> tuple[int, int, list[tuple[int, str]], int]:
    """How many seeds were tried, how many made a readable snapshot, what failed, and the peak of memory in MiB."""
    readable, failed = 0, []
    place = 0 if _working is None else seeds.start // _PART % len(_working)
    for seed in seeds:
        if _working is not None:
            _working[place] = seed
        try:
            ask, data = case(seed)
            with time_limit():
                readable += ask(data)
        except Exception as error:
            failed.append((seed, f"{type(error).__name__}: {str(error)[:200]}"))
    if _working is not None:
        _working[place] = -1
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    if peak_mib > _MOST_MIB:
        failed.append((seeds.start, f"{peak_mib} MiB of memory by seed {seeds.stop - 1}"))
    return len(seeds), readable, failed, peak_mib


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these, done or not")
    parser.add_argument("--found", type=Path, help="a folder for the inputs that failed")
    args = parser.parse_args()
    done = readable = failures = peak_mib = 0
    start = time.monotonic()
    parts = [range(seed, min(seed + _PART, args.first + args.count))
             for seed in range(args.first, args.first + args.count, _PART)]  # fmt: skip

    def found(seed: int, line: str) -> None:
        print(f"seed {seed}: {line}", flush=True)
        if args.found:
            args.found.mkdir(parents=True, exist_ok=True)
            (args.found / str(seed)).write_bytes(case(seed)[1])

    context = multiprocessing.get_context("spawn")
    working = context.Array("q", [-1] * len(parts), lock=False)
    pool = ProcessPoolExecutor(args.jobs, context, begin, (working,))
    try:
        for future in as_completed([pool.submit(tried, part) for part in parts]):
            tries, good, failed, mib = future.result()
            before = done // _EVERY
            done, readable, failures = done + tries, readable + good, failures + len(failed)
            peak_mib = max(peak_mib, mib)
            for seed, line in failed:
                found(seed, line)
            if done // _EVERY > before:
                print(f"{done} done, {readable} readable, {failures} failures", flush=True)
            if time.monotonic() - start > args.seconds:
                break
    except BrokenProcessPool:
        failures += 1
        for seed in working:
            if seed >= 0:
                found(seed, "a process died, at this seed or at another of these")
    finally:
        for process in (pool._processes or {}).values():
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
    print(
        f"{done} mutations in {time.monotonic() - start:.0f} s: {readable} readable, "
        f"{failures} failures, peak memory {peak_mib} MiB"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
