"""Mutations of structure, opcodes, bytes, JSON and containers: each must end in an answer or one line, in seconds,
in little memory.


python fuzz/run.py [--count 100000] [--first 0]
"""

from __future__ import annotations

import argparse
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    readable = failures = 0
    start = time.monotonic()
    for seed in range(args.first, args.first + args.count):
        try:
            with time_limit():
                readable += check_file(packed(seed)) if seed % 4 == 3 else check(damaged(seed))
        except Exception as error:
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        done = seed + 1 - args.first
        if done % _EVERY == 0:
            print(f"{done} done, {readable} readable, {failures} failures", flush=True)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{args.count} damaged snapshots in {time.monotonic() - start:.0f} s: {readable} readable, "
        f"{failures} failures, peak memory {peak_mib} MiB"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
