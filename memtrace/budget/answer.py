"""An estimate as the JSON object that the command prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memtrace.budget.advice import Change
from memtrace.budget.compare import Against, budget_distortion
from memtrace.budget.estimate import RESERVED_MARGIN_PERCENT, Estimate


def answer(estimate: Estimate, changes: tuple[Change, ...], against: Against | None) -> dict[str, Any]:
    """Keys as the contract has them, and more; sizes in bytes."""
    fit = estimate.fit
    return {
        "model": asdict(estimate.shape) | {"parameters": estimate.shape.parameters},
        "options": asdict(estimate.options),
        "gpu": {
            "name": estimate.gpu.name,
            "total_bytes": estimate.gpu.total_bytes,
            "capability": list(estimate.gpu.device.capability),
        },
        "attention_kernel": estimate.kernel,
        "peak_requested_bytes": estimate.peak_requested_bytes,
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "peak_reserved_bytes": estimate.peak_reserved_bytes,
        "reserved_margin_percent": RESERVED_MARGIN_PERCENT,
        "peak_phase": estimate.peak_phase,
        "peak_site": estimate.peak_site,
        "next_phase": estimate.next_phase,
        "margin_over_next_bytes": estimate.margin_over_next_bytes,
        "phases": {name: asdict(peak) for name, peak in estimate.phases.items()},
        "categories": estimate.categories,
        "subcategories": estimate.subcategories,
        "terms": [asdict(term) for term in estimate.terms],
        "affine": asdict(estimate.affine),
        "device": {
            "reserved_bytes": estimate.peak_reserved_bytes,
            "outside_bytes": estimate.outside_bytes,
            "outside_measured": estimate.gpu.outside_measured,
            "managed_bytes": estimate.managed_bytes,
            "device_bytes": fit.device_bytes,
        },
        "budget_distortion": _distortion(estimate),
        "fits": asdict(fit),
        "changes": [
            {key: value for key, value in asdict(change).items() if key != "options"} for change in changes
        ],
        "against": against_json(against),
        "warnings": list(estimate.warnings),
    }  # fmt: skip


def _distortion(estimate: Estimate) -> dict[str, int]:
    found = budget_distortion(estimate.fit.capacity_bytes, estimate.outside_bytes, estimate.categories)
    return asdict(found) | {"distortion_bytes": found.distortion_bytes}


def against_json(against: Against | None) -> dict[str, Any] | None:
    """A comparison as JSON."""
    if against is None:
        return None
    found = asdict(against)
    found["budget_distortion"]["distortion_bytes"] = against.budget_distortion.distortion_bytes
    return found
