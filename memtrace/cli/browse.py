"""Browse a snapshot in the terminal: budget, timeline, segment map, allocations, stacks, findings and events.

Two files open the comparison of the two. With --serve the same screens are served to a web browser.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import signal
import stat
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.common import add_shared, option, progress, usual_signals
from memtrace.cli.leads import lead
from memtrace.errors import MissingDependencyError, UsageError
from memtrace.ranges import check_ranges
from memtrace.units import printable

if TYPE_CHECKING:
    from memtrace_tui.app import BrowseApp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at events steps rules")
    option(parser, "other FILE2", "a second snapshot to compare with", nargs="?")
    option(parser, "--serve", "serve to a web browser instead (extra: torch-memtrace[serve])")
    option(parser, "--host", "address to serve on (default: localhost, this machine only)", default="localhost")
    option(parser, "--port", "port to serve on (default: 8000)", type=int, default=8000)


def run(args: argparse.Namespace) -> int:
    """Open the browser; returns its exit code."""
    if args.serve:
        return _serve(args)
    check_ranges(args.events, args.steps)
    _look_at(args)
    if args.file != "-" and not _comes_once(args.file) and lead(args.file, "browse") is not None:
        raise UsageError("browse shows recordings")  # what takes the file is added to it
    if not sys.stdout.isatty() and not os.environ.get("TEXTUAL_DRIVER"):
        file = args.file if args.file != "-" else "FILE"
        raise UsageError(
            f"browse needs a terminal; memtrace explain {file} says why it ran out of memory, memtrace report {file} "
            "where every byte was"
        )
    # Imports and the first screen make some hundred thousand objects that stay: collecting in between finds nothing.
    gc.disable()
    from memtrace_tui.app import BrowseApp
    from memtrace_tui.provider import BrowsedRecording, StartView

    gc.freeze()
    gc.enable()
    view = StartView(args.device, args.at, args.events, args.steps)
    use_index = not args.no_index
    usual_signals()
    if args.file != "-":
        return run_app(BrowseApp(args.file, args.other, view, rules=args.rules, use_index=use_index))
    if args.other is not None:
        raise UsageError("a second file can't be compared with standard input")
    with progress("reading") as on_progress:
        recording = BrowsedRecording.open("-", view, on_progress, args.rules)
    _keys_from_terminal()
    return run_app(BrowseApp("stdin", recording=recording))


def run_app(app: BrowseApp) -> int:
    """Its exit code. A crash is one line, once the terminal is as it was, and exit code 1."""
    if hasattr(signal, "SIGHUP"):  # where a shell has it ignored, a terminal that is gone would be read for ever
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    code = app.run()
    if app.crash is None:
        return code or 0
    where = traceback.extract_tb(app.crash.__traceback__)[-1:]
    places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in where)
    what = printable(" ".join(str(app.crash).split()))[:200]
    print(f"memtrace: the browser failed: {type(app.crash).__name__}: {what} ({places}); please report this",
          file=sys.stderr)  # fmt: skip
    return 1


def _look_at(args: argparse.Namespace) -> None:
    """What can't be a snapshot is refused before the screen changes; of each file only the beginning is read."""
    from memtrace.snapshot.container import open_stream

    for file in (args.file, args.other):
        if file is not None and file != "-" and not _comes_once(file):
            with open_stream(file):
                pass


def _comes_once(file: str) -> bool:
    """Whether it is a pipe or the like: what is read from it is gone."""
    try:
        mode = Path(file).stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _keys_from_terminal() -> None:
    """Standard input was the snapshot; the keys come from the terminal itself."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        raise UsageError("no terminal to read keys from; save the snapshot to a file and browse that") from None
    os.dup2(terminal, 0)
    os.close(terminal)


def _serve(args: argparse.Namespace) -> int:
    try:
        from memtrace_tui.serving import serve
    except ImportError:
        raise MissingDependencyError.of_extra("--serve needs textual-serve", "serve") from None
    if args.file == "-":
        raise UsageError("--serve needs a file: every load of the page reads it anew")
    check_ranges(args.events, args.steps)
    _look_at(args)
    command = [sys.executable, "-P", "-m", "memtrace", "browse", args.file]
    command += [args.other] if args.other else []
    command += ["--device", str(args.device)] if args.device is not None else []
    for name, value in (("--at", args.at), ("--events", args.events), ("--steps", args.steps)):
        command += [name, value] if value else []
    command += ["--no-index"] if args.no_index else []
    command += ["--rules", args.rules_file] if args.rules else []
    serve(shlex.join(command), args.host, args.port)
    return 0
