"""A sweep as a picture: what each thing adds, and the peaks over tokens with the fitted line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memtrace.errors import MissingDependencyError, UsageError
from memtrace.estimate.sweep import Outcome, fit, increments
from memtrace.units import GIB
from memtrace.writing import whole_file


def plot_sweep(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write ``path`` (.svg or .png). Raises MissingDependencyError without matplotlib, UsageError for other endings."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"a plot ends in .svg or .png, not {path.suffix!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError.of_extra("plots need matplotlib", "plot") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    added = [(name, size / GIB) for name, size in increments(outcomes).items() if size is not None]
    added = [entry for entry in added if entry[0] != "smallest"]
    left.barh([name for name, _ in added], [size for _, size in added], color="#3b6fb6")
    left.invert_yaxis()
    left.set_xlabel("added to the allocated peak, GiB")
    found = fit(outcomes)
    if found is not None:
        tokens = [residual.tokens for residual in found.residuals]
        right.plot(tokens, [r.measured_bytes / GIB for r in found.residuals], "o", color="#3b6fb6", label="measured")
        t = np.linspace(min(tokens), max(tokens), 200)
        line = found.constant_bytes + found.per_token_bytes * t + found.per_token_squared_bytes * t * t
        right.plot(t, line / GIB, "-", color="#c0504d", label="fitted, at batch 1")
        right.legend(frameon=False)
    right.set_xlabel("tokens a micro-batch")
    right.set_ylabel("requested peak, GiB")
    with whole_file(path) as out:
        figure.savefig(out, format=path.suffix.lstrip(".") or "svg")
