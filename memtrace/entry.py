"""Where the ``memtrace`` command begins: Ctrl-C at any time ends it with one line and exit code 130.

Importing takes a tenth of a second, in which an interrupt would be a traceback of whatever was being imported; so the
answer to it is set up here, with nothing imported but what the interpreter has loaded already. While a verb works, an
interrupt is the usual KeyboardInterrupt, so that unfinished files are removed; before and after, where there is nothing
to undo, the process ends at once.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # the part in C: signal itself imports enum, which takes long
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_LINE = b"memtrace: interrupted\n"
_CODE = 130
_AGAIN_S, _LOST_S = 0.002, 1.0


class _Interrupts:
    """What SIGINT does: ``raises`` says whether a verb is at work, ``seen`` whether one came meanwhile."""

    def __init__(self) -> None:
        self.raises = self.seen = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.raises:
            self.seen = True
            _remind(self.again, _LOST_S)
            raise KeyboardInterrupt
        _leave()

    def again(self, number: int, frame: FrameType | None) -> None:
        """An extension module has swallowed the interrupt, or what is to be undone takes long."""
        if self.raises:
            raise KeyboardInterrupt

    def lost(self, unraisable: sys.UnraisableHookArgs) -> None:
        """An interrupt that came within a callback, where nothing can be raised: try again in a moment."""
        if unraisable.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(unraisable)
        elif not _remind(self.again, _AGAIN_S):
            _leave()


def _remind(answer: Callable[[int, FrameType | None], None], seconds: float) -> bool:
    """Call ``answer`` once after a while, 0 for never; False where the system has no such timer."""
    if not hasattr(signal, "setitimer"):
        return False
    signal.signal(signal.SIGALRM, answer)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return True


def _leave() -> None:
    """End here and now."""
    try:
        os.write(2, _LINE)
    finally:
        os._exit(_CODE)


_interrupts = _Interrupts()
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as nohup does
    signal.signal(signal.SIGINT, _interrupts)
    sys.unraisablehook = _interrupts.lost


def as_usual() -> None:
    """Interrupts as the interpreter has them, for verbs that run another program or a terminal interface."""
    if signal.getsignal(signal.SIGINT) is _interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = sys.__unraisablehook__


def main() -> int:
    """Run the command line; returns the exit code."""
    from memtrace.cli import main as answer

    try:
        _interrupts.raises = True
        code = answer()
        _interrupts.raises = False
    except BaseException:
        _interrupts.raises = False
        if not _interrupts.seen:
            raise
        _leave()  # it came where no verb answers it, or an extension module made another error of it
    if _interrupts.seen:
        _remind(_interrupts.again, 0)
    return code
