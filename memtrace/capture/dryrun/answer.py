"""A dry run's answer: peaks by phase, categories, terms, fits or not; as data, JSON, text and snapshot."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from memtrace.budget.affine import Affine, affine_of
from memtrace.budget.answer import against_json
from memtrace.budget.compare import Against
from memtrace.budget.estimate import (
    CATEGORIES,
    PHASES,
    RESERVED_MARGIN_PERCENT,
    Fit,
    PhasePeak,
    Term,
    categories_of,
    fit_of,
    live_at,
    phase_at,
    phase_peaks,
    site_at,
    subcategories_at,
)
from memtrace.budget.options import RunOptions
from memtrace.budget.placement import Placement, place
from memtrace.budget.predicted import SnapshotWriter, document, plain
from memtrace.budget.presets import DEFAULT_CAPACITY_BYTES, GpuPreset, gpu_preset
from memtrace.budget.step import Stream
from memtrace.capture.dryrun.build import with_layers
from memtrace.capture.dryrun.run import Recorded, dry_run
from memtrace.capture.dryrun.stacks import Frames
from memtrace.units import format_bytes

_SHALLOW_LAYERS = 2
_WIDTH = 80


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a dry run found. The fields mean what they mean in :class:`memtrace.budget.estimate.Estimate`."""

    model: str
    architecture: dict[str, Any]
    options: RunOptions
    gpu: GpuPreset
    parameters: int
    trainable: int
    kernel: str
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_phase: str
    peak_site: str
    phases: dict[str, PhasePeak]
    categories: dict[str, int]
    subcategories: dict[str, int]
    terms: tuple[Term, ...]
    affine: Affine
    outside_bytes: int
    managed_bytes: int
    fit: Fit
    warnings: tuple[str, ...]
    recorded: Recorded = field(repr=False)
    placement: Placement = field(repr=False)


def examine(
    model: str,
    architecture: dict[str, Any],
    options: RunOptions,
    gpu: GpuPreset | None = None,
    capacity_bytes: int | None = None,
) -> DryRun:
    """Dry-run ``architecture`` and read the result. Raises UsageError, NoAnswerError as :func:`dry_run` does."""
    card = gpu or gpu_preset("h200")
    recorded = dry_run(architecture, options, card.device)
    stream = recorded.stream
    placement = place(stream)
    event = int(np.argmax(placement.allocated))
    live = live_at(stream, event)
    subcategories = subcategories_at(stream, placement, event, live)
    capacity = capacity_bytes or (gpu.total_bytes if gpu is not None else DEFAULT_CAPACITY_BYTES)
    return DryRun(
        model=model,
        architecture=architecture,
        options=options,
        gpu=card,
        parameters=recorded.parameters,
        trainable=recorded.trainable,
        kernel=stream.kernel,
        peak_requested_bytes=int(placement.requested.max()),
        peak_allocated_bytes=int(placement.allocated.max()),
        peak_reserved_bytes=int(placement.reserved.max()),
        peak_phase=phase_at(stream, event),
        peak_site=site_at(stream, event),
        phases=phase_peaks(stream, placement),
        categories=categories_of(subcategories),
        subcategories=subcategories,
        terms=_terms(stream, live),
        affine=_affine(architecture, options, card, stream, live),
        outside_bytes=card.outside_bytes,
        managed_bytes=stream.managed_bytes,
        fit=fit_of(stream, placement, card, capacity),
        warnings=_warnings(options, gpu, stream),
        recorded=recorded,
        placement=placement,
    )


def _terms(stream: Stream, live: list[int]) -> tuple[Term, ...]:
    """Live bytes by module, operator and category; the formula is the number and size of the tensors."""
    found: dict[tuple[str, str], list[int]] = {}
    for index in live:
        name = f"{stream.sites[index] or 'model'}: {stream.ops[index]}"
        if stream.labels[index] == "activations/recompute":
            name = f"recomputed layer: {name}"
        found.setdefault((name, stream.labels[index].partition("/")[0]), []).append(stream.sizes[index])
    terms = [
        Term(name, sum(sizes), _sizes_text(sizes), category, len(sizes)) for (name, category), sizes in found.items()
    ]
    return tuple(sorted(terms, key=lambda term: (-term.bytes, term.name)))


def _sizes_text(sizes: list[int]) -> str:
    if len(set(sizes)) == 1:
        return f"{len(sizes)} × {sizes[0]:,} B"
    return f"{len(sizes)} tensors of {min(sizes):,} to {max(sizes):,} B"


def _affine(
    architecture: dict[str, Any], options: RunOptions, card: GpuPreset, stream: Stream, live: list[int]
) -> Affine:
    small = with_layers(architecture, _SHALLOW_LAYERS)
    fixed = replace(card.device, product_rows=options.tokens)
    runs = [
        dry_run(small, replace(options, sequence=times * options.sequence), fixed).stream for times in (1, 2, 3)
    ]  # fmt: skip
    return affine_of(stream, live, runs, options.tokens)


def _warnings(options: RunOptions, gpu: GpuPreset | None, stream: Stream) -> tuple[str, ...]:
    notes = ["a dry run: the real model code on tensors without data; CUDA's own buffers are imitated"]
    if gpu is None:
        notes.append("no --gpu: kernels as on an H200, capacity 24 GiB")
    elif not gpu.outside_measured:
        notes.append(f"memory outside the allocator on {gpu.name} is assumed to be that of an H200")
    if options.quant == "int8":
        notes.append("8-bit products are taken to have no outlier columns; how many there are depends on the data")
    if stream.managed_bytes:
        notes.append(f"{stream.managed_bytes:,} B of paged optimizer states lie outside the allocator and come and go")
    return tuple(notes)


def as_json(found: DryRun, against: Against | None) -> dict[str, Any]:
    """The keys of ``memtrace estimate --json``."""
    return {
        "model": {"name": found.model, "model_type": found.architecture.get("model_type")}
        | {"parameters": found.parameters, "trainable_parameters": found.trainable},
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
        "terms": [asdict(term) for term in found.terms],
        "affine": asdict(found.affine),
        "device": {
            "reserved_bytes": found.peak_reserved_bytes,
            "outside_bytes": found.outside_bytes,
            "outside_measured": found.gpu.outside_measured,
            "managed_bytes": found.managed_bytes,
            "device_bytes": found.fit.device_bytes,
        },
        "fits": asdict(found.fit),
        "against": against_json(against),
        "warnings": list(found.warnings),
    }  # fmt: skip


def render(found: DryRun) -> Iterator[str]:
    """Lines of at most 80 columns."""
    fit = found.fit
    yield f"{found.model}, {found.parameters / 1e9:.2f} billion parameters, dry run of the real code"
    room = f"{format_bytes(fit.device_bytes)} of {format_bytes(fit.capacity_bytes)}"
    if fit.fits:
        yield f"FITS: needs {room}, {format_bytes(fit.margin_bytes)} to spare."
    elif fit.fits_when_flushed:
        yield f"FITS, BARELY: left alone it would reserve {room}; cached segments are given back."
    else:
        yield f"DOES NOT FIT: needs {room}, {format_bytes(-fit.margin_bytes)} too much."
    yield from textwrap.wrap(f"The peak is in the {found.peak_phase} ({found.peak_site}).", _WIDTH)
    yield ""
    yield f"{'phase':<12}{'requested':>14}{'allocated':>14}{'reserved':>14}"
    for name in [*PHASES[:1], "first_step", *PHASES[1:]]:
        peak = found.phases.get(name)
        if peak is not None:
            values = (peak.requested_bytes, peak.allocated_bytes, peak.reserved_bytes)
            mark = "  ← peak" if name == found.peak_phase else ""
            yield f"{name.replace('_', ' '):<12}" + "".join(f"{format_bytes(v):>14}" for v in values) + mark
    yield ""
    total = max(sum(found.categories.values()), 1)
    yield f"at the peak ({format_bytes(total)} reserved)"
    for name in CATEGORIES:
        size = found.categories[name]
        yield f"  {name:<16}{format_bytes(size):>12}{size / total:>8.1%}"
    yield ""
    yield "largest terms"
    for term in found.terms[:12]:
        yield f"  {format_bytes(term.bytes):>10}  {term.name[:38]:<38}  {term.formula}"[:_WIDTH]
    for note in found.warnings:
        yield from textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="      ")


class _Writer(SnapshotWriter):
    """A snapshot with the stacks that were seen."""

    def __init__(self, found: DryRun) -> None:
        super().__init__(found.recorded.stream, found.placement, str(found.architecture.get("model_type", "")))
        self._found = found.recorded
        self._loader: dict[int, Frames] = {}

    def stack(self, index: int, phase: str) -> Frames:
        """The real stack; loading has the loader's function below it."""
        number = self._found.stack_of[index]
        if phase != "load":
            return self._found.stacks[number]
        known = self._loader.get(number)
        if known is None:
            root = {"filename": "transformers/modeling_utils.py", "line": 0, "name": "from_pretrained"}
            known = self._loader[number] = [*self._found.stacks[number], root]
        return known


def snapshot(found: DryRun) -> dict[str, Any]:
    """The dry run as PyTorch's ``_snapshot()`` would return it, marked as predicted."""
    config = {"model": plain(found.architecture), "options": plain(asdict(found.options)), "dry_run": True}
    return document(_Writer(found), found, found.gpu, config)
