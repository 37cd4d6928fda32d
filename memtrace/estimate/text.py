"""An estimate as text of at most 80 columns, and as the JSON object that the command prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from memtrace.estimate.advice import Change
from memtrace.estimate.against import Against, budget_distortion
from memtrace.estimate.estimate import CATEGORIES, PHASES, RESERVED_MARGIN_PERCENT, Estimate, Fit
from memtrace.units import format_bytes, format_delta

WIDTH = 80
_BAR = 24


def render(estimate: Estimate, changes: tuple[Change, ...], against: Against | None) -> list[str]:
    """All lines."""
    lines = [*_head(estimate), "", *_verdict(estimate), "", *_phases(estimate), "", *_categories(estimate)]
    lines += ["", *_terms(estimate), "", *_levels(estimate)]
    if changes:
        lines += ["", *_changes(changes)]
    if against is not None:
        lines += ["", *render_against(against)]
    for warning in estimate.warnings:
        lines += _wrap(f"note: {warning}", "      ")
    return [line[:WIDTH] for line in lines]


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent) or [""]


def _head(estimate: Estimate) -> Iterator[str]:
    options = estimate.options
    size = f"{estimate.model['name']}, {estimate.model['parameters'] / 1e9:.2f} billion parameters"
    dry = ", dry run of the real code" if estimate.source.basis == "dry run" else ""
    yield from _wrap(f"{size}, {options.quant} base weights{dry}", "")
    setup = [
        f"{options.sequence} tokens × {options.batch}",
        f"LoRA r={options.rank} {options.adapter_dtype} on {','.join(options.targets)}",
        f"dropout {options.dropout:g}",
        options.optimizer,
        f"{options.attention} attention ({estimate.kernel})",
        "checkpointing" + (" (reentrant)" if options.reentrant else "")
        if options.checkpointing
        else "no checkpointing",
        "fp32 hidden states" if options.prepare_kbit else "16-bit hidden states",
        f"{options.loss} loss",
    ]
    if options.autocast:
        setup.append("autocast")
    yield from _wrap(", ".join(setup), "")


def _said(fit: Fit, needs: str) -> str:
    """The verdict in words, with its caution; ``needs`` goes before what is spare or missing."""
    if fit.fits:
        text = f"FITS{needs}, {format_bytes(fit.margin_bytes)} to spare"
        caution = f". Too close to be sure: reserved memory is predicted within {RESERVED_MARGIN_PERCENT:g} %"
        return text + caution if fit.too_close else text
    if fit.fits_when_flushed:
        room = f"{format_bytes(fit.device_bytes)} of {format_bytes(fit.capacity_bytes)}"
        return (
            f"FITS, BARELY: left alone it would reserve {room}; under pressure the allocator gives cached segments "
            "back, and the run goes through, slower"
        )
    return f"DOES NOT FIT{needs}, {format_bytes(-fit.margin_bytes)} too much"


def _verdict(estimate: Estimate) -> list[str]:
    fit = estimate.fit
    text = _said(fit, f": needs {format_bytes(fit.device_bytes)} of {format_bytes(fit.capacity_bytes)}") + "."
    peak = (
        f"The peak is in the {estimate.peak_phase} ({estimate.peak_site}): "
        f"{format_bytes(estimate.peak_allocated_bytes)} allocated, {format_bytes(estimate.margin_over_next_bytes)} "
        f"above the next phase ({estimate.next_phase})."
    )
    return [*_wrap(text, ""), *_wrap(peak, "")]


def _phases(found: Estimate) -> Iterator[str]:
    """The peaks of every phase."""
    yield f"{'phase':<12}{'requested':>14}{'allocated':>14}{'reserved':>14}"
    for name in [*PHASES[:1], "first_step", *PHASES[1:]]:
        peak = found.phases.get(name)
        if peak is not None:
            values = (peak.requested_bytes, peak.allocated_bytes, peak.reserved_bytes)
            mark = "  ← peak" if name == found.peak_phase else ""
            yield f"{name.replace('_', ' '):<12}" + "".join(f"{format_bytes(v):>14}" for v in values) + mark


def _categories(found: Estimate) -> Iterator[str]:
    """The six categories at the peak."""
    total = sum(found.categories.values())
    yield f"at the peak ({format_bytes(total)} reserved)"
    for name in CATEGORIES:
        size = found.categories[name]
        bar = "█" * round(_BAR * size / total) if total else ""
        yield f"  {name:<16}{format_bytes(size):>12}{size / max(total, 1):>8.1%}  {bar}".rstrip()


def _terms(estimate: Estimate) -> Iterator[str]:
    yield "largest terms (docs/estimate.md explains the symbols)"
    for term in estimate.terms[:12]:
        head = f"  {format_bytes(term.bytes):>10}  {_cut(term.name, 30):<30}  "
        yield from textwrap.wrap(head + term.formula, WIDTH, subsequent_indent=" " * len(head), drop_whitespace=True)
    form = estimate.affine
    squared = f" + {form.per_token_squared_bytes:,.3f} B · t²" if form.per_token_squared_bytes else ""
    text = f"{format_bytes(form.constant_bytes)} + {form.per_token_bytes:,.0f} B · t{squared}"
    yield f"affine: {text}, t = {estimate.options.tokens} tokens"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _levels(estimate: Estimate) -> Iterator[str]:
    yield "from tensors to the device"
    rows = [
        ("requested", estimate.peak_requested_bytes, "sum of live tensors"),
        ("allocated", estimate.peak_allocated_bytes, "after rounding and unsplit tails"),
        ("reserved", estimate.peak_reserved_bytes, f"segments, ± {RESERVED_MARGIN_PERCENT:g} %"),
        ("device", estimate.fit.device_bytes, f"+ {format_bytes(estimate.outside_bytes)} outside the allocator"),
    ]
    for name, size, remark in rows:
        yield f"  {name:<10}{format_bytes(size):>12}  {remark}"


def _changes(changes: tuple[Change, ...]) -> Iterator[str]:
    yield "what to change, cheapest sufficient first (re-estimated, sizes on the device)"
    for change in changes:
        size = format_bytes(abs(change.saves_bytes))  # with less live, the allocator may still hold more
        saves = f"saves {size}" if change.saves_bytes >= 0 else f"takes {size} more"
        yield f"  {change.change}"
        yield from _wrap(f"    {change.flag} · {change.cost}", "      ")
        yield from _wrap(f"    {saves}: {_said(change.fit, '')}", "      ")


def render_against(against: Against) -> Iterator[str]:
    """Predicted beside measured."""
    yield f"against {against.file}"[:WIDTH]
    yield f"  {'':<16}{'predicted':>12}{'measured':>12}{'difference':>14}"
    for name, gap in [*against.levels.items(), *against.by_category.items()]:
        values = f"{format_bytes(gap.predicted_bytes):>12}{format_bytes(gap.measured_bytes):>12}"
        yield f"  {name:<16}{values}{format_delta(gap.signed_error_bytes):>14}"
    yield (
        f"  estimate distortion: {format_delta(against.signed_error_bytes)} "
        f"({against.signed_error_percent:+.3f} %) of the allocated peak"
    )
    budget = against.budget_distortion
    lost, nominal = format_bytes(budget.distortion_bytes), format_bytes(budget.nominal_bytes)
    yield f"  budget distortion: {lost} of {nominal} nominal"
    yield (
        f"    outside {format_bytes(budget.outside_bytes)}, fragmentation {format_bytes(budget.fragmentation_bytes)}, "
        f"runtime {format_bytes(budget.runtime_bytes)}"
    )
    for line in against.because:
        yield from _wrap(f"  {line}", "    ")


# ---- for programs ----------------------------------------------------------------------------------------------------
def as_json(found: Estimate, changes: tuple[Change, ...], against: Against | None) -> dict[str, Any]:
    """Keys as the contract has them, and more; sizes in bytes."""
    lost = budget_distortion(found.fit.capacity_bytes, found.outside_bytes, found.categories)
    return {
        "model": found.model,
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
        "next_phase": found.next_phase,
        "margin_over_next_bytes": found.margin_over_next_bytes,
        "terms": [asdict(term) for term in found.terms],
        "affine": asdict(found.affine),
        "budget_distortion": asdict(lost),
        "changes": [{key: value for key, value in asdict(change).items() if key != "options"} for change in changes],
        "against": asdict(against) if against else None,
        "warnings": list(found.warnings),
    }
