"""The light log: allocated, reserved and peak bytes of every step, whether or not the full history is recorded.

A step costs one reading of PyTorch's statistics and one tuple, some tens of microseconds. The peak of a step is had by
resetting PyTorch's peak statistics after each one.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from memtrace.record.backend import CudaBackend
from memtrace.record.phases import now_us

MAX_ROWS = 200_000
COLUMNS = (
    "step", "time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "tokens",
    "longest_tokens",
)  # fmt: skip
Row = tuple[int, int, int, int, int, int, int, int]


class StepLog:
    """One row a step. ``tokens`` and ``longest_tokens`` (of one micro-batch, the longest sequence) are 0 if unknown."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        self._rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self._tokens = self._longest = 0
        self._handles: list[Any] = []
        self._failed = False

    def follow(self, model: Any) -> None:
        """Note the shape of what the model is called with; nothing is read from the device."""
        with contextlib.suppress(AttributeError, TypeError):
            self._handles.append(model.register_forward_pre_hook(self._called, with_kwargs=True))

    def _called(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        shape: Sequence[int] = getattr(ids, "shape", ())
        if len(shape) == 2:
            self._tokens = max(self._tokens, int(shape[0]) * int(shape[1]))
            self._longest = max(self._longest, int(shape[1]))

    def note(self, step: int) -> None:
        """A step has ended. Never raises: a log must not stop a run."""
        if self._failed:
            return
        try:
            device = self.backend.current_device()
            row = (step, now_us(), *self.backend.levels(device), self._tokens, self._longest)
            self.backend.reset_peaks(device)
        except (RuntimeError, AttributeError):
            self._failed = True
            return
        self._rows.append(row)
        self._tokens = self._longest = 0

    def rows(self) -> dict[str, Any]:
        """For a snapshot's extra key: the column names and one list a step; builtin containers only."""
        return {"columns": list(COLUMNS), "rows": [list(row) for row in self._rows]}

    def as_json_lines(self) -> bytes:
        """One JSON object a line."""
        return "".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in self._rows).encode()

    def close(self) -> None:
        """Stop following models."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __len__(self) -> int:
        return len(self._rows)
