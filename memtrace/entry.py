"""Where the ``memtrace`` command begins.

Ctrl-C ends it with one line and exit code 130. SIGTERM and SIGHUP end it as they end any program, but unfinished files
are removed first. Nothing is imported from the folder it is started in, which may be a stranger's.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_SAFE_PATH = "PYTHONSAFEPATH"
_RUN_PROGRAMS = ("attach", "capture", "dryrun", "run", "sweep")  # verbs that start the user's
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_left_out: list[str] = []
_MANY_OBJECTS = 100_000
_USUAL_OBJECTS = gc.get_threshold()[0]


def main() -> int:
    """Run the command line; returns the exit code."""
    # What a command imports and reads stays until it ends: collecting in between takes a tenth of a short one.
    gc.set_threshold(_MANY_OBJECTS, *gc.get_threshold()[1:])
    runs_program = bool(set(sys.argv[1:2]) & {*_RUN_PROGRAMS})
    if not runs_program:  # numpy's threads, which no answer needs, take as long as its import
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _leave_out_folder()
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        from memtrace.cli import main as answer

        return answer()
    except KeyboardInterrupt:
        print("memtrace: interrupted", file=sys.stderr)
        return 130
    finally:
        if not runs_program:  # looking for cycles in what ends with the process takes a tenth of a short one
            gc.freeze()


def _leave_out_folder() -> None:
    """Take what ``python -m`` puts first off the path of imports: the current folder; for every child, too."""
    if sys.flags.safe_path:
        return
    os.environ[_SAFE_PATH] = "1"
    if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 (pathlib takes long to import)
        _left_out.append(sys.path.pop(0))


def usual_signals() -> None:
    """Signals and garbage collection as the interpreter has them, for verbs that run another program or a terminal
    interface."""
    gc.set_threshold(_USUAL_OBJECTS, *gc.get_threshold()[1:])
    for number in _ENDING:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)


def usual_path() -> None:
    """Imports as the interpreter has them, for running the user's own program."""
    if not sys.flags.safe_path:
        os.environ.pop(_SAFE_PATH, None)
    sys.path[:0] = _left_out
    _left_out.clear()


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: nothing is to be left undone
    raise SystemExit(128 + number)
