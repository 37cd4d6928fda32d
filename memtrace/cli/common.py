"""What the reading verbs share: the input arguments, loading with a progress bar, JSON on stdout."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.timeline import At, Timeline

_PROGRESS_AFTER_S = 1.0


def add_input(parser: argparse.ArgumentParser, at: bool = True) -> None:
    """FILE, --device and, with ``at``, --at."""
    parser.add_argument("file", metavar="FILE", help="snapshot: .pickle or .json, plain or .gz/.xz/.zst; - is stdin")
    parser.add_argument(
        "--device", type=int, metavar="N", help="device number (default: the one that matters, and it says which)"
    )
    if at:
        parser.add_argument(
            "--at",
            metavar="WHEN",
            help="peak, reserved-peak, end, oom or an event number (default: oom if there is one, else peak)",
        )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; sizes in bytes, times in µs")


def print_json(answer: Any) -> None:
    """One JSON object and a newline on stdout."""
    import orjson

    data = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@contextmanager
def progress(label: str) -> Iterator[Callable[[float], None] | None]:
    """A progress callback (share 0 to 1) that draws a bar on stderr once work has taken longer than a second.

    Yields None where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    start = time.monotonic()
    drawn = False

    def show(share: float) -> None:
        nonlocal drawn
        if time.monotonic() - start > _PROGRESS_AFTER_S:
            filled = round(30 * share)
            print(f"\r{label} {'█' * filled}{'░' * (30 - filled)} {share:4.0%}", end="", file=sys.stderr, flush=True)
            drawn = True

    try:
        yield show
    finally:
        if drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def open_timeline(args: argparse.Namespace) -> Timeline:
    """Load FILE, choose the device, replay it. Says on stderr which device was chosen where there was a choice."""
    from memtrace.snapshot.load import load
    from memtrace.timeline import build, choose_device

    with progress("reading") as on_progress:
        snapshot = load(args.file, on_progress)
    device, why = choose_device(snapshot, args.device)
    if why is not None:
        print(f"memtrace: {why}", file=sys.stderr)
    return build(snapshot, device)


def open_at(args: argparse.Namespace) -> tuple[Timeline, At]:
    """:func:`open_timeline` plus the event that --at names."""
    from memtrace.timeline import choose_event

    timeline = open_timeline(args)
    return timeline, choose_event(timeline, args.at)
