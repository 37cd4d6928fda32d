"""A sweep as a picture: what each thing adds, and the peaks over tokens with the fitted line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memtrace.estimate.sweep import Outcome, fit, increments
from memtrace.export.picture import picture
from memtrace.units import GIB


def plot_sweep(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write ``path``. Raises as :func:`picture` does."""
    with picture(path, (11, 4.5), ncols=2) as (_, (left, right)):
        added = [(name, size / GIB) for name, size in increments(outcomes).items() if size is not None]
        added = [entry for entry in added if entry[0] != "smallest"]
        left.barh([name for name, _ in added], [size for _, size in added], color="#3b6fb6")
        left.invert_yaxis()
        left.set_xlabel("added to the allocated peak, GiB")
        found = fit(outcomes)
        if found is not None:
            tokens = [residual.tokens for residual in found.residuals]
            right.plot(
                tokens, [r.measured_bytes / GIB for r in found.residuals], "o", color="#3b6fb6", label="measured"
            )
            t = np.linspace(min(tokens), max(tokens), 200)
            line = found.constant_bytes + found.per_token_bytes * t + found.per_token_squared_bytes * t * t
            right.plot(t, line / GIB, "-", color="#c0504d", label="fitted, at batch 1")
            right.legend(frameon=False)
        right.set_xlabel("tokens a micro-batch")
        right.set_ylabel("requested peak, GiB")
