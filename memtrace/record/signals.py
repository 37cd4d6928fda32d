"""SIGUSR1 writes a snapshot; SIGTERM writes one before the process dies of it, as a launcher's other ranks do.

Python runs signal handlers only between two byte codes of the main thread, which may sit in a collective operation for
good. So a thread of its own reads the signals from a pipe. Handlers that the program sets take precedence.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from memtrace.record import messages

if TYPE_CHECKING:
    from memtrace.record.recorder import Recorder

_FROM_HANDLER = 128  # added to the number when Python's own handler reports, in case the wake-up pipe was taken over


class SignalWatch:
    """Watches the two signals for one recorder. Does nothing outside the main thread or where they are taken."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._old_wakeup = -1

    def install(self) -> None:
        """Begin to watch."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
            return
        wanted = [s for s in (signal.SIGUSR1, signal.SIGTERM) if signal.getsignal(s) is signal.SIG_DFL]
        if not wanted:
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, end == self._pipe[0])
        self._old_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in wanted:
            self._previous[number] = signal.signal(number, self._handle)
        threading.Thread(target=self._watch, args=(self._pipe[0],), name="memtrace-signals", daemon=True).start()
        self.recorder.in_child.append(self.forked)

    def remove(self) -> None:
        """Give the signals back, except those the program has taken since."""
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous = {}
        self.recorder.in_child.remove(self.forked)
        current = signal.set_wakeup_fd(-1)
        if current != self._pipe[1]:
            signal.set_wakeup_fd(current)
        elif self._old_wakeup != -1:
            signal.set_wakeup_fd(self._old_wakeup)
        pipe, self._pipe = self._pipe, None
        with contextlib.suppress(OSError):
            os.write(pipe[1], b"\0")  # ends the thread, which closes the reading end
        os.close(pipe[1])

    def forked(self) -> None:
        """In a forked child: as if nothing had been installed; the parent's pipe must not hear the child's signals."""
        if self._pipe is None:
            return  # a child of such a child: its signals are the program's own
        signal.set_wakeup_fd(-1)
        for number in self._previous:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
        self._previous, self._pipe = {}, None

    def _handle(self, number: int, _frame: Any) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([number | _FROM_HANDLER]))

    def _watch(self, reading: int) -> None:
        seen: dict[int, int] = {}
        while data := os.read(reading, 1):
            byte = data[0]
            if byte == 0:
                break
            number = byte & ~_FROM_HANDLER
            if byte & _FROM_HANDLER and seen.get(number, 0) > 0:
                seen[number] -= 1
                continue
            seen[number] = seen.get(number, 0) + (0 if byte & _FROM_HANDLER else 1)
            if signal.getsignal(number) == self._handle:
                self._act(number)
        os.close(reading)

    def _act(self, number: int) -> None:
        if number == signal.SIGUSR1:
            file = self.recorder.dump()
            if file is not None:
                messages.say(f"snapshot written to {file} on request")
            return
        if self.recorder.ooms.pending(self.recorder.log.completed):
            self.recorder.ooms.failed(None)
        elif self.recorder.recording:
            file = self.recorder.save("", "terminated")
            if file is not None:
                messages.say(f"terminated; recorded to {file}")
        _die(number)


def _die(number: int) -> None:
    """Let a signal do what it does by default; works from any thread, unlike ``signal.signal``."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, None)
    os.kill(os.getpid(), number)
