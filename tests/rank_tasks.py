"""Tasks for worker tests: summaries of recordings by workers that die."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from memtrace.ranks.summary import Failure, Rank, summarise


def dies_once(source: str, device: int | None) -> Rank | Failure:
    """Kills its worker at the first try of a file whose folder holds a file ``kill``; that file is removed."""
    mark = Path(source).parent / "kill"
    if "rank3" in source and mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return summarise(source, device)


def always_dies(source: str, device: int | None) -> Rank | Failure:
    """Kills its worker for one file, every time."""
    if "rank3" in source:
        os.kill(os.getpid(), signal.SIGKILL)
    return summarise(source, device)


def waits(source: str, device: int | None) -> Rank | Failure:
    """Works for ever, and says that it began and that it gave up: files ``PID.pid`` and ``PID.undone``."""
    folder = Path(source).parent
    (folder / f"{os.getpid()}.pid").touch()
    try:
        while True:
            time.sleep(0.05)
    finally:
        (folder / f"{os.getpid()}.undone").touch()
