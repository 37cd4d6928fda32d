"""The light log: allocated, reserved and peak bytes of every step, whether or not the full history is recorded.

A step costs one reading of PyTorch's statistics and ten numbers, some tens of microseconds; 72 hours of one a second
are 21 MB here and some 30 MB in a file. A step's peak is had by resetting PyTorch's peak statistics after each one.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator
from typing import Any

from memtrace.record.backend import CudaBackend
from memtrace.record.phases import now_us

MAX_ROWS = 260_000
COLUMNS = (
    "step", "time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "tokens",
    "longest_tokens", "holes_bytes", "retries",
)  # fmt: skip
_WIDTH = len(COLUMNS)
_SHARE = 1000
_DROPPED_AT_ONCE = 5_000  # so that forgetting old rows costs a step nothing


class StepLog:
    """One row a step. ``tokens`` and ``longest_tokens`` (of one micro-batch, the longest sequence) are 0 if unknown.

    Without ``resets`` PyTorch's statistics are only read, the peaks are those of the whole run so far, and steps so
    short that reading would take more than a thousandth of the time have no row each.
    """

    def __init__(self, backend: CudaBackend, resets: bool = True) -> None:
        self.backend = backend
        self.resets = resets
        self.device: int | None = None  # the one that the program used last, seen from its own thread
        self._cells = array("q")
        self._forgotten = 0  # rows that were there before the first one kept
        self._tokens = self._longest = 0
        self._failed = False
        self._not_before = 0.0

    def called(self, rows: int, length: int) -> None:
        """A model was called with so many rows of so many tokens."""
        self._tokens = max(self._tokens, rows * length)
        self._longest = max(self._longest, length)

    def note(self, step: int) -> None:
        """A step has ended. Never raises: a log must not stop a run."""
        began = time.perf_counter()
        if self._failed or (not self.resets and began < self._not_before):
            return
        try:
            self.device = self.backend.current_device()
            *levels, holes, retries = self.backend.levels(self.device)
            if self.resets:
                self.backend.reset_peaks(self.device)
        except (RuntimeError, AttributeError):
            self._failed = True
            return
        self._cells.extend((step, now_us(), *levels, self._tokens, self._longest, holes, retries))
        self._tokens = self._longest = 0
        ended = time.perf_counter()
        self._not_before = ended + _SHARE * (ended - began)
        if len(self) > MAX_ROWS:
            del self._cells[: _DROPPED_AT_ONCE * _WIDTH]
            self._forgotten += _DROPPED_AT_ONCE

    def since(self, number: int, most: int = MAX_ROWS) -> tuple[list[list[int]], int]:
        """At most ``most`` rows from the ``number``-th ever noted on, as far as they are kept, and the number of the
        one after them. Safe in any thread, and nobody waits for it."""
        while True:
            forgotten = self._forgotten
            first = max(number, forgotten)
            low = (first - forgotten) * _WIDTH
            cells = self._cells[low : low + most * _WIDTH].tolist()
            if self._forgotten == forgotten:
                rows = [cells[at : at + _WIDTH] for at in range(0, len(cells) - _WIDTH + 1, _WIDTH)]
                return rows, first + len(rows)

    def rows(self) -> dict[str, Any]:
        """For a snapshot's extra key: the column names and one list a step; builtin containers only."""
        return {"columns": list(COLUMNS), "rows": self.since(0)[0]}

    def as_json_lines(self) -> Iterator[bytes]:
        """A line with the names of the columns, then one line of numbers a step."""
        yield json.dumps({"columns": COLUMNS}).encode() + b"\n"
        rows, following = self.since(0, 1000)
        while rows:
            yield b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
            rows, following = self.since(following, 1000)

    def __len__(self) -> int:
        return len(self._cells) // _WIDTH
