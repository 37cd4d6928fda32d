"""A figure on paper: what all plots share. Needs matplotlib, an optional package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memtrace.errors import MissingDependencyError, UsageError
from memtrace.writing import whole_file


@contextmanager
def picture(
    path: Path, size: tuple[float, float], *inputs: str, dpi: float = 100, **grid: Any
) -> Iterator[tuple[Any, Any]]:
    """Figure and axes (``grid``: as ``subplots`` takes it), written to ``path`` in the end, never over an input.

    Raises UsageError for endings other than .svg and .png, MissingDependencyError without matplotlib.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"{path}: a plot is written as .svg or .png")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError.of_extra("plots need matplotlib", "plot") from None
    figure = Figure(figsize=size, layout="constrained")
    yield figure, figure.subplots(**grid)
    with whole_file(path, *inputs) as out:
        figure.savefig(out, dpi=dpi, format=path.suffix.lstrip("."))
