"""Give memory that big temporary work has left over back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Drop what only cycles hold, and ask glibc to return free pages. Loading and replays free hundreds of megabytes
    that would otherwise stay with the process for as long as the browser is open; where there is no glibc only the
    first happens."""
    gc.collect()
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
