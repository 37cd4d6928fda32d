"""Multi-GPU runs: one row a rank, how uneven they are, and the odd one out with its reason.

Files are read by one process a core, or by the workers of a Dask cluster (--scheduler). A file that can't be read is
reported and the rest go on.
"""

from __future__ import annotations

import argparse
from functools import partial

from memtrace.cli.common import add_shared, option, print_answer, progress
from memtrace.errors import SnapshotError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = "one file a rank, or a folder of them; also s3://, gs://, hf://… with the extra [remote]"
    option(parser, "sources DIR|FILE", sources, nargs="+")
    option(parser, "--device N", "device number in every file (default: the one that matters)", type=int)
    option(parser, "--jobs,-j N", "processes to read with (default: one a core)", type=int)
    cluster = "a Dask cluster (tcp://host:8786) whose workers see the same files (extra [cluster])"
    option(parser, "--scheduler ADDRESS", f"send the work to {cluster}")
    add_shared(parser, "no-index json")


def run(args: argparse.Namespace) -> int:
    from memtrace.ranks.compare import compare_ranks
    from memtrace.ranks.sources import expand
    from memtrace.ranks.summary import summarise
    from memtrace.ranks.workers import in_processes, on_dask
    from memtrace.render.ranks_text import render_ranks

    if args.jobs is not None and args.jobs < 1:
        raise UsageError("--jobs takes a number of processes, 1 or more")
    if args.jobs is not None and args.scheduler is not None:
        raise UsageError("--jobs and --scheduler exclude each other: the cluster has its own workers")
    sources = expand(args.sources)
    if "-" in sources:
        raise UsageError("ranks reads files, not stdin")
    task = partial(summarise, use_index=not args.no_index)
    with progress(f"reading {len(sources)} files") as show:
        on_done = (lambda done: show(done / len(sources))) if show else None
        if args.scheduler is not None:
            answers = on_dask(sources, args.scheduler, args.device, on_done, task)
        else:
            answers = in_processes(sources, args.device, args.jobs, on_done, task)
    answer = compare_ranks(answers)
    print_answer(args.json, answer, lambda width: render_ranks(answer, width))
    if not answer.ranks:
        if all(failure.exit_code == UsageError.exit_code for failure in answer.failed):  # no such device, say
            raise UsageError("no file has what is asked for")
        raise SnapshotError("no file could be read")
    return 0
