"""An estimate as the JSON object that the command prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memtrace.estimate.advice import Change
from memtrace.estimate.against import Against, budget_distortion
from memtrace.estimate.estimate import Estimate
from memtrace.estimate.prediction import RESERVED_MARGIN_PERCENT, Prediction


def prediction_json(found: Prediction) -> dict[str, Any]:
    """What every prediction has."""
    return {
        "options": asdict(found.options),
        "gpu": {
            "name": found.gpu.name,
            "total_bytes": found.gpu.total_bytes,
            "capability": list(found.gpu.device.capability),
        },
        "attention_kernel": found.kernel,
        "peak_requested_bytes": found.peak_requested_bytes,
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "reserved_margin_percent": RESERVED_MARGIN_PERCENT,
        "peak_phase": found.peak_phase,
        "peak_site": found.peak_site,
        "phases": {name: asdict(peak) for name, peak in found.phases.items()},
        "categories": found.categories,
        "subcategories": found.subcategories,
        "device": {
            "reserved_bytes": found.peak_reserved_bytes,
            "outside_bytes": found.outside_bytes,
            "outside_measured": found.gpu.outside_measured,
            "managed_bytes": found.managed_bytes,
            "device_bytes": found.fit.device_bytes,
        },
        "fits": asdict(found.fit),
    }


def answer(estimate: Estimate, changes: tuple[Change, ...], against: Against | None) -> dict[str, Any]:
    """Keys as the contract has them, and more; sizes in bytes."""
    return {
        "model": asdict(estimate.shape) | {"parameters": estimate.shape.parameters},
        **prediction_json(estimate),
        "next_phase": estimate.next_phase,
        "margin_over_next_bytes": estimate.margin_over_next_bytes,
        "terms": [asdict(term) for term in estimate.terms],
        "affine": asdict(estimate.affine),
        "budget_distortion": _distortion(estimate),
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
