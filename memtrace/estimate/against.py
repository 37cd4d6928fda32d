"""Estimate against measurement: by category, the two distortions, and what explains the gap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memtrace.attribution.categories import Category
from memtrace.estimate.estimate import CATEGORIES, Estimate
from memtrace.frozen import dataclass
from memtrace.units import format_delta

if TYPE_CHECKING:
    from memtrace.answers.report import Report


@dataclass(frozen=True, slots=True)
class CategoryGap:
    """One category at the peak; ``signed_error_bytes`` is predicted minus measured."""

    predicted_bytes: int
    measured_bytes: int
    signed_error_bytes: int


@dataclass(frozen=True, slots=True)
class Distortion:
    """Budget distortion: what of the nominal memory no tensor can use, and its parts. ``usable_bytes`` is the rest."""

    nominal_bytes: int
    outside_bytes: int
    fragmentation_bytes: int
    runtime_bytes: int
    usable_bytes: int
    distortion_bytes: int


@dataclass(frozen=True, slots=True)
class Against:
    """Estimate distortion: predicted minus measured, of the allocated peak and of each level and category."""

    file: str
    signed_error_bytes: int
    signed_error_percent: float
    levels: Mapping[str, CategoryGap]
    by_category: Mapping[str, CategoryGap]
    budget_distortion: Distortion
    because: tuple[str, ...]


def budget_distortion(nominal_bytes: int, outside_bytes: int, categories: Mapping[str, int]) -> Distortion:
    """What stays for weights, adapters, activations and temporaries of ``nominal_bytes`` of device memory."""
    fragmentation, runtime = categories.get(Category.FRAGMENTATION, 0), categories.get(Category.RUNTIME, 0)
    lost = outside_bytes + fragmentation + runtime
    return Distortion(nominal_bytes, outside_bytes, fragmentation, runtime, nominal_bytes - lost, lost)


def compare(estimate: Estimate, measured: Report) -> Against:
    """The estimate beside a recording's report at its peak."""
    names = [*CATEGORIES, *(name for name, size in measured.categories.items() if size and name not in CATEGORIES)]
    gaps = {name: _gap(estimate.categories.get(name, 0), measured.categories.get(name, 0)) for name in names}
    peaks, known = measured.peaks, measured.outside_allocator or {}
    error = estimate.peak_allocated_bytes - peaks["allocated_bytes"]
    percent = 100 * error / peaks["allocated_bytes"] if peaks["allocated_bytes"] else 0.0
    outside = known.get("this_process_bytes")
    outside = estimate.outside_bytes if outside is None else outside
    nominal = known.get("device_total_bytes") or estimate.fit.capacity_bytes
    return Against(
        file=measured.file,
        signed_error_bytes=error,
        signed_error_percent=round(percent, 4),
        levels={
            "requested": _gap(estimate.peak_requested_bytes, peaks["requested_bytes"]),
            "allocated": _gap(estimate.peak_allocated_bytes, peaks["allocated_bytes"]),
            "reserved": _gap(estimate.peak_reserved_bytes, peaks["reserved_bytes"]),
        },
        by_category=gaps,
        budget_distortion=budget_distortion(nominal, outside, measured.categories),
        because=tuple(_because(estimate, peaks["allocated_bytes"] // 1000, gaps)),
    )


def _gap(predicted: int, measured: int) -> CategoryGap:
    return CategoryGap(predicted, measured, predicted - measured)


_CAUSES: dict[str, str] = {  # by category
    Category.BASE_WEIGHTS: (
        "other quantisation, other precision of embedding and head, or another model was loaded beside it"
    ),
    Category.LORA: (
        "other rank, target layers, adapter type or optimizer; or the peak lies in another phase of the step"
    ),
    Category.ACTIVATIONS: "other tokens a micro-batch, checkpointing, dropout or attention",
    Category.TEMPORARY: "another loss, held logits, or the peak lies at another point of the step",
    Category.RUNTIME: "the recording began or ended before both threads had multiplied, or another library version",
    Category.FRAGMENTATION: (
        "another order of allocations, sequence lengths that vary, or earlier work in the same process"
    ),
}


def _because(estimate: Estimate, threshold: int, gaps: Mapping[str, CategoryGap]) -> list[str]:
    """Categories that differ by more than ``threshold`` (0.1 % of the measured peak), with what usually makes them."""
    lines = []
    for name, gap in sorted(gaps.items(), key=lambda item: -abs(item[1].signed_error_bytes)):
        if abs(gap.signed_error_bytes) > max(threshold, 1 << 20) and name in _CAUSES:
            lines.append(f"{name} {format_delta(gap.signed_error_bytes)}: {_CAUSES[name]}")
    if not lines:
        lines.append("no category differs by more than 0.1 % of the measured peak")
    if estimate.warnings:
        lines.append(f"the estimate itself says: {estimate.warnings[0]}")
    return lines
