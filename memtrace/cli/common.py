"""What the reading verbs share: the input arguments, loading with a progress bar, JSON on stdout."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from memtrace.errors import UsageError

if TYPE_CHECKING:
    from memtrace.report import Analysis
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


def add_rules(parser: argparse.ArgumentParser) -> None:
    """--rules, for verbs that attribute."""
    parser.add_argument("--rules", metavar="FILE.toml", help="your own attribution rules (see docs/attribution.md)")


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


def open_analysis(args: argparse.Namespace) -> tuple[Analysis, At]:
    """:func:`open_at` plus the attribution, by --rules where given."""
    from memtrace.report import analyse

    timeline, at = open_at(args)
    rules = None
    if getattr(args, "rules", None):
        from memtrace.attribution.user_rules import read_rules

        rules = read_rules(args.rules)
    return analyse(timeline, rules), at


def add_output(parser: argparse.ArgumentParser) -> None:
    """--output and --force."""
    parser.add_argument("--output", "-o", metavar="FILE", help="write to FILE instead of stdout")


def add_force(parser: argparse.ArgumentParser) -> None:
    """--force."""
    parser.add_argument("--force", action="store_true", help="overwrite an existing output file")


def check_target(path: Path, force: bool) -> None:
    """Raise UsageError before any work is done if writing ``path`` would lose something or can't succeed."""
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force overwrites it")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder")


@contextmanager
def output_stream(args: argparse.Namespace) -> Iterator[IO[bytes]]:
    """Binary stdout, or --output written whole or not at all (a temporary file beside it, then renamed)."""
    if args.output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(args.output)
    check_target(target, getattr(args, "force", False))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as out:
            yield out
        partial.replace(target)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
