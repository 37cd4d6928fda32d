"""What a recorder says: single lines on stderr, and never an exception."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def say(line: str) -> None:
    """Print one line on stderr; a closed stderr is no reason to fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"memtrace: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def guarded(doing: str) -> Iterator[None]:
    """Turn any error of the recorder into one line: the program being recorded goes on undisturbed."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        say(f"{doing} failed ({type(error).__name__}: {text}); the program goes on")


def safely(doing: str, function: Callable[..., object], *args: Any) -> None:
    """Call a function in that way, at a third of the price: for what every step comes by."""
    try:
        function(*args)
    except Exception as error:
        with guarded(doing):
            raise error
