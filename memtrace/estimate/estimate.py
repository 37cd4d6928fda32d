"""The budget before the run: what a predicted stream of allocations makes of the allocator, phases, categories, terms.

Who re-enacted the run, the shape engine or a dry run of the real code, is all the same here: a :class:`StreamSource`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import field, replace
from typing import Any

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import round_size
from memtrace.attribution.categories import Category, Purpose
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.options import RunOptions
from memtrace.estimate.placement import Peaks, Placement, place
from memtrace.estimate.presets import DEFAULT_CAPACITY_BYTES, GpuPreset, gpu_preset
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.source import ShapeSource, StreamSource
from memtrace.estimate.stream import MICRO_BATCHES, Stream, live_at
from memtrace.frozen import dataclass

PHASES = ("load", "forward", "loss", "recompute", "backward", "optimizer")
CATEGORIES = tuple(category for category in Category if category is not Category.UNATTRIBUTED)
#: Worst error of the reserved peak over the measured configurations; stated with every estimate.
RESERVED_MARGIN_PERCENT = 3.0


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the budget at the peak: live bytes, the formula they come from, and the category."""

    name: str
    bytes: int
    formula: str
    category: str
    count: int


@dataclass(frozen=True, slots=True)
class Affine:
    """requested peak = ``constant_bytes`` + ``per_token_bytes``·t + ``per_token_squared_bytes``·t².

    t counts the tokens of a micro-batch at the estimate's batch size. It holds while the same point of the step stays
    the peak. The parts are exact at the estimate's own t.
    """

    constant_bytes: int
    per_token_bytes: float
    per_token_squared_bytes: float

    def at(self, tokens: int) -> float:
        """Requested bytes at ``tokens`` tokens."""
        return self.constant_bytes + self.per_token_bytes * tokens + self.per_token_squared_bytes * tokens * tokens


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the run fits: what the device must hold (reserved, plus what is outside the allocator) against it.

    ``fits_when_flushed``: the allocator gives cached segments back under pressure, and the run then goes through
    although ``margin_bytes`` is negative. ``too_close``: it fits, by less than the error of the prediction.
    """

    capacity_bytes: int
    device_bytes: int
    margin_bytes: int
    fits: bool
    fits_when_flushed: bool
    too_close: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted run. ``phases`` holds PHASES of the last step (``load`` of loading) and ``first_step``.

    ``categories`` and ``subcategories`` describe the moment of the highest allocated bytes (event ``peak_event`` of the
    stream) and sum to the reserved bytes of that moment, ``terms`` to its requested bytes. ``managed_bytes``: paged
    optimizer states outside the allocator. ``margin_over_next_bytes``: by how much the phase of the peak wins over the
    next highest.
    """

    source: StreamSource
    model: dict[str, Any]
    options: RunOptions
    gpu: GpuPreset
    kernel: str
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_phase: str
    peak_site: str
    next_phase: str
    margin_over_next_bytes: int
    phases: dict[str, Peaks]
    categories: dict[str, int]
    subcategories: dict[str, int]
    outside_bytes: int
    managed_bytes: int
    fit: Fit
    terms: tuple[Term, ...]
    affine: Affine
    warnings: tuple[str, ...]
    stream: Stream = field(repr=False)
    placement: Placement = field(repr=False)
    peak_event: int


def kernels_of(gpu: GpuPreset | None) -> GpuPreset:
    """The card whose kernels and buffers a run is predicted with: an H200's where none is named."""
    return gpu or gpu_preset("h200")


def estimate(
    source: StreamSource | ModelShape,
    options: RunOptions,
    gpu: GpuPreset | None = None,
    capacity_bytes: int | None = None,
) -> Estimate:
    """Predict a run on ``gpu`` (default: kernels of an H200, capacity 24 GiB unless it is given).

    Raises what the source raises.
    """
    source = ShapeSource(source) if isinstance(source, ModelShape) else source
    card = kernels_of(gpu)
    capacity = capacity_bytes or (gpu.total_bytes if gpu is not None else DEFAULT_CAPACITY_BYTES)
    stream, placement, fit = verdict(source, options, card, capacity)
    event = int(np.argmax(placement.allocated))
    live = live_at(stream, event)
    phases = phase_peaks(stream, placement)
    order = sorted(phases.keys() & set(PHASES), key=lambda name: -phases[name].allocated_bytes)
    runner_up = order[min(1, len(order) - 1)]
    subcategories = subcategories_at(stream, placement, event, live)
    return Estimate(
        source=source,
        model=source.model,
        options=options,
        gpu=card,
        kernel=stream.kernel,
        peak_requested_bytes=int(placement.requested.max()),
        peak_allocated_bytes=int(placement.allocated.max()),
        peak_reserved_bytes=int(placement.reserved.max()),
        peak_phase=stream.marks[max(bisect_right([mark.event for mark in stream.marks], event) - 1, 0)].phase,
        peak_site=stream.where(index if (index := stream.events[event]) >= 0 else ~index),
        next_phase=runner_up,
        margin_over_next_bytes=phases[order[0]].allocated_bytes - phases[runner_up].allocated_bytes,
        phases=phases,
        categories=categories_of(subcategories),
        subcategories=subcategories,
        outside_bytes=card.outside_bytes,
        managed_bytes=stream.managed_bytes,
        fit=fit,
        terms=_terms(source, stream, live),
        affine=_affine(source, options, card.device, stream, live),
        warnings=_warnings(source, options, gpu, stream),
        stream=stream,
        placement=placement,
        peak_event=event,
    )


# ---- phases ----------------------------------------------------------------------------------------------------------
def phase_peaks(stream: Stream, placement: Placement) -> dict[str, Peaks]:
    """Peaks by phase: ``load``, the phases of the last step, and ``first_step`` as a whole."""
    peaks: dict[str, Peaks] = {}
    last_step = max(mark.step for mark in stream.marks)
    ends = [mark.event for mark in stream.marks[1:]] + [len(stream.events)]
    for mark, end in zip(stream.marks, ends, strict=True):
        names = [mark.phase] if mark.step in (-1, last_step) and mark.phase in PHASES else []
        if mark.step == 0:
            names.append("first_step")
        low, high = max(mark.event - 1, 0), min(end, len(placement.requested))
        if high <= low:
            continue
        curves = placement.requested, placement.allocated, placement.reserved
        for key in names:
            peaks[key] = peaks.get(key, Peaks(0, 0, 0)) | Peaks(*(int(curve[low:high].max()) for curve in curves))
    return peaks


# ---- the moment of the peak ------------------------------------------------------------------------------------------
def subcategories_at(stream: Stream, placement: Placement, event: int, live: list[int]) -> dict[str, int]:
    """Requested bytes by label, and what is reserved beyond them by kind of fragmentation."""
    config = AllocatorConfig()
    found: dict[str, int] = {}
    rounding = tails = 0
    for index in live:
        size, block = stream.sizes[index], placement.block_bytes[index]
        rounded = round_size(size, config)
        found[stream.labels[index]] = found.get(stream.labels[index], 0) + size
        rounding += rounded - size
        tails += block - rounded
    segments = placement.segments_at(event)
    starts = sorted(segments)
    used = {starts[bisect_right(starts, placement.address[index]) - 1] for index in live}
    cached = sum(size for address, size in segments.items() if address not in used)
    free = int(placement.reserved[event] - placement.allocated[event])
    found[Purpose.ROUNDING] = rounding
    found[Purpose.UNSPLIT_TAIL] = tails
    found[Purpose.HOLES] = free - cached
    found[Purpose.CACHED_SEGMENTS] = cached
    return found


def categories_of(subcategories: dict[str, int]) -> dict[str, int]:
    """The six categories, each the sum of its subcategories."""
    sums: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for name, size in subcategories.items():
        sums[name.partition("/")[0]] += size
    return sums


def _terms(source: StreamSource, stream: Stream, live: list[int]) -> tuple[Term, ...]:
    """Live bytes by term and category, largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    formulas: dict[str, str | None] = {}
    for index in live:
        name, formula = source.term(stream, index)
        label = stream.labels[index]
        if label == Purpose.RECOMPUTE:
            name = f"recomputed layer: {name}"
        formulas[name] = formula
        found.setdefault((name, label.partition("/")[0]), []).append(stream.sizes[index])
    terms = [
        Term(name, sum(sizes), formulas[name] or _sizes_text(sizes), category, len(sizes))
        for (name, category), sizes in found.items()
    ]
    return tuple(sorted(terms, key=lambda term: (-term.bytes, term.name)))


def _sizes_text(sizes: list[int]) -> str:
    if len(set(sizes)) == 1:
        return f"{len(sizes)} × {sizes[0]:,} B"
    return f"{len(sizes)} tensors of {min(sizes):,} to {max(sizes):,} B"


# ---- the affine form -------------------------------------------------------------------------------------------------
def _affine(source: StreamSource, options: RunOptions, device: KernelDevice, stream: Stream, live: list[int]) -> Affine:
    """The affine form of ``live``: a constant, bytes per token and per token squared, batch size fixed.

    The live set of the peak is the same at neighbouring lengths, so each live tensor's size is a polynomial in the
    length. The polynomials come from runs at one, two and three times the length with two layers, whose tensors are
    those of any other layer.
    """
    fixed = replace(device, product_rows=options.tokens)
    runs = [source.stream(replace(options, sequence=n * options.sequence), fixed, layers=2) for n in (1, 2, 3)]
    known: dict[tuple[str, str, str, int], tuple[float, float]] = {}
    if len({len(run.sizes) for run in runs}) == 1:
        for index, (one, two, three) in enumerate(zip(*(run.sizes for run in runs), strict=True)):
            square = (three - 2 * two + one) / 2
            known[runs[0].key(index)] = (two - one - 3 * square, square)
    constant, linear, square = 0.0, 0.0, 0.0
    for index in live:
        first, second = known.get(stream.key(index), (0.0, 0.0))
        constant += stream.sizes[index] - first - second
        linear += first
        square += second
    return Affine(round(constant), linear / options.tokens, square / options.tokens**2)


# ---- fits, and what all of it rests on -------------------------------------------------------------------------------
def verdict(
    source: StreamSource, options: RunOptions, card: GpuPreset, capacity_bytes: int
) -> tuple[Stream, Placement, Fit]:
    """The predicted run, where it lies, and whether it fits: what the estimate says, and what advice is proven by."""
    stream = source.stream(options, card.device)
    placement = place(stream)
    reserved, outside = int(placement.reserved.max()), card.outside_bytes
    margin = capacity_bytes - reserved - outside
    flushed = margin >= 0
    if not flushed and int(placement.allocated.max()) + outside <= capacity_bytes:
        flushed = place(stream, AllocatorConfig(limit_bytes=capacity_bytes - outside)).refused_event is None
    too_close = 0 <= margin < round(reserved * RESERVED_MARGIN_PERCENT / 100)
    return stream, placement, Fit(capacity_bytes, reserved + outside, margin, margin >= 0, flushed, too_close)


def _warnings(source: StreamSource, options: RunOptions, gpu: GpuPreset | None, stream: Stream) -> tuple[str, ...]:
    """What rests on source code only, or on an assumption: of the card, the data, the source, and outside of it."""
    card, outside = card_notes(gpu), list[str]()
    if options.quant == "int8":
        card.append("8-bit products are taken to have no outlier columns; how many there are depends on the data")
    if options.accumulation > MICRO_BATCHES:
        card.append(
            f"{MICRO_BATCHES} of the {options.accumulation} micro-batches of a step are simulated: "
            "the others repeat the last of them and change no peak"
        )
    if stream.managed_bytes:
        outside.append(
            f"{stream.managed_bytes:,} B of paged optimizer states lie outside the allocator and come and go"
        )
    notes = source.notes(options, stream)
    return (*notes, *card, *outside) if source.basis == "dry run" else (*card, *notes, *outside)


def card_notes(gpu: GpuPreset | None) -> list[str]:
    """What is assumed of the card."""
    if gpu is None:
        return ["no --gpu: kernels as on an H200, capacity 24 GiB"]
    return (
        [] if gpu.outside_measured else [f"memory outside the allocator on {gpu.name} is assumed to be that of an H200"]
    )
