"""A forecast as a picture: reserved and allocated memory over the steps, the limit, the step of death."""

from __future__ import annotations

from pathlib import Path

from memtrace.estimate.forecast import Forecast
from memtrace.export.picture import picture
from memtrace.units import GIB


def plot_forecast(found: Forecast, path: Path) -> None:
    """Write ``path``. Raises as :func:`picture` does."""
    with picture(path, (10, 4.5)) as (_, axes):
        at = [step.step for step in found.steps]
        axes.step(
            at, [s.peak_reserved_bytes / GIB for s in found.steps], where="mid", color="#3b6fb6", label="reserved"
        )
        axes.step(
            at, [s.peak_allocated_bytes / GIB for s in found.steps], where="mid", color="#7aa6c2", label="allocated"
        )
        if found.config.limit_bytes is not None:
            axes.axhline(found.config.limit_bytes / GIB, color="#c0504d", linestyle="--", label="limit")
        if found.oom is not None and found.oom.step >= 0:
            needed = found.oom.reserved_bytes + found.oom.requested_bytes
            axes.plot([found.oom.step], [needed / GIB], "x", color="#c0504d", markersize=10, label="out of memory")
        axes.set_xlabel("step")
        axes.set_ylabel("highest bytes of the step, GiB")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
