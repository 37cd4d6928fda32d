"""The budget before the run: peaks of every phase, the six categories, terms, and whether it fits."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import round_size
from memtrace.budget.affine import Affine, affine_form
from memtrace.budget.options import RunOptions
from memtrace.budget.placement import Placement, place
from memtrace.budget.presets import DEFAULT_CAPACITY_BYTES, GpuPreset, gpu_preset
from memtrace.budget.shapes import ModelShape
from memtrace.budget.step import Stream, simulate_run
from memtrace.budget.tape import EMPTY_CACHE
from memtrace.budget.terms import TERMS, term_name

PHASES = ("load", "forward", "loss", "recompute", "backward", "optimizer")
CATEGORIES = ("base_weights", "lora", "activations", "temporary", "runtime", "fragmentation")
#: Worst error of the reserved peak over the measured configurations; stated with every estimate.
RESERVED_MARGIN_PERCENT = 3.0
_PHASE_OF_MARK = {"inputs": "forward", "zero_grad": "optimizer"}


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """Highest requested, allocated and reserved bytes in a phase (each at its own moment)."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the budget at the peak: live bytes, the formula they come from, and the category."""

    name: str
    bytes: int
    formula: str
    category: str
    count: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the run fits: what the device must hold (reserved, plus what is outside the allocator) against it.

    ``fits_when_flushed``: the allocator gives cached segments back under pressure, and the run then goes through
    although ``margin_bytes`` is negative.
    """

    capacity_bytes: int
    device_bytes: int
    margin_bytes: int
    fits: bool
    fits_when_flushed: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """A predicted run. ``phases`` holds PHASES of the last step (``load`` of loading) and ``first_step``.

    ``categories`` and ``subcategories`` describe the moment of the highest allocated bytes and sum to the reserved
    bytes of that moment; ``terms`` sum to its requested bytes. ``margin_over_next_bytes``: by how much the phase of
    the peak wins over the next highest. ``managed_bytes``: paged optimizer states outside the allocator.
    """

    shape: ModelShape
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
    phases: dict[str, PhasePeak]
    categories: dict[str, int]
    subcategories: dict[str, int]
    terms: tuple[Term, ...]
    affine: Affine
    outside_bytes: int
    managed_bytes: int
    fit: Fit
    warnings: tuple[str, ...]
    stream: Stream = field(repr=False)
    placement: Placement = field(repr=False)
    peak_event: int


def estimate(
    shape: ModelShape, options: RunOptions, gpu: GpuPreset | None = None, capacity_bytes: int | None = None
) -> Estimate:
    """Predict the run of ``shape`` under ``options`` on ``gpu`` (default: kernels of an H200, capacity 24 GiB)."""
    card = gpu or gpu_preset("h200")
    capacity = capacity_bytes or (gpu.total_bytes if gpu is not None else DEFAULT_CAPACITY_BYTES)
    stream = simulate_run(shape, options, card.device)
    placement = place(stream)
    event = int(np.argmax(placement.allocated))
    phases = phase_peaks(stream, placement)
    order = sorted(phases.keys() & set(PHASES), key=lambda name: -phases[name].allocated_bytes)
    runner_up = order[min(1, len(order) - 1)]
    live = live_at(stream, event)
    subcategories = subcategories_at(stream, placement, event, live)
    return Estimate(
        shape=shape,
        options=options,
        gpu=card,
        kernel=stream.kernel,
        peak_requested_bytes=int(placement.requested.max()),
        peak_allocated_bytes=int(placement.allocated.max()),
        peak_reserved_bytes=int(placement.reserved.max()),
        peak_phase=phase_at(stream, event),
        peak_site=site_at(stream, event),
        next_phase=runner_up,
        margin_over_next_bytes=phases[order[0]].allocated_bytes - phases[runner_up].allocated_bytes,
        phases=phases,
        categories=categories_of(subcategories),
        subcategories=subcategories,
        terms=_terms(stream, live, shape.layers - 1),
        affine=affine_form(shape, options, card.device, stream, live),
        outside_bytes=card.outside_bytes,
        managed_bytes=stream.managed_bytes,
        fit=fit_of(stream, placement, card, capacity),
        warnings=_warnings(shape, options, gpu, stream),
        stream=stream,
        placement=placement,
        peak_event=event,
    )


# ---- phases ----------------------------------------------------------------------------------------------------------
def phase_peaks(stream: Stream, placement: Placement) -> dict[str, PhasePeak]:
    """Peaks by phase: ``load``, the phases of the last step, and ``first_step`` as a whole."""
    peaks: dict[str, list[int]] = {}
    last_step = max(mark.step for mark in stream.marks)
    ends = [mark.event for mark in stream.marks[1:]] + [len(stream.events)]
    for mark, end in zip(stream.marks, ends, strict=True):
        name = _PHASE_OF_MARK.get(mark.name, mark.name)
        names = [name] if mark.step in (-1, last_step) and name in PHASES else []
        if mark.step == 0:
            names.append("first_step")
        low, high = max(mark.event - 1, 0), min(end, len(placement.requested))
        if high <= low:
            continue
        found = [int(curve[low:high].max()) for curve in (placement.requested, placement.allocated, placement.reserved)]
        for key in names:
            peaks[key] = [max(pair) for pair in zip(peaks.get(key, [0, 0, 0]), found, strict=True)]
    return {name: PhasePeak(*values) for name, values in peaks.items()}


def phase_at(stream: Stream, event: int) -> str:
    position = bisect_right([mark.event for mark in stream.marks], event) - 1
    name = stream.marks[max(position, 0)].name
    return _PHASE_OF_MARK.get(name, name)


def site_at(stream: Stream, event: int) -> str:
    """Module and operator of the allocation that makes the peak."""
    index = stream.events[event]
    index = index if index >= 0 else ~index
    where = stream.sites[index] or "model"
    layer = f"layers.{stream.layers[index]}." if stream.layers[index] >= 0 else ""
    return f"{layer}{where}: {stream.ops[index]}"


# ---- the moment of the peak ------------------------------------------------------------------------------------------
def live_at(stream: Stream, event: int) -> list[int]:
    """Allocations alive just after stream event ``event``, in order of birth."""
    live: dict[int, None] = {}
    for entry in stream.events[: event + 1]:
        if entry < 0:
            live.pop(~entry, None)
        elif entry != EMPTY_CACHE:
            live[entry] = None
    return list(live)


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
    cached = _cached_bytes(placement, event, live)
    free = int(placement.reserved[event] - placement.allocated[event])
    found["fragmentation/rounding"] = rounding
    found["fragmentation/unsplit_tail"] = tails
    found["fragmentation/holes"] = free - cached
    found["fragmentation/cached_segments"] = cached
    return found


def _cached_bytes(placement: Placement, event: int, live: list[int]) -> int:
    """Segments in which nothing lives."""
    segments: dict[int, int] = {}
    for entry in placement.segments:
        if entry.event > event:
            break
        if entry.freed:
            segments.pop(entry.address, None)
        else:
            segments[entry.address] = entry.size
    starts = sorted(segments)
    used = {starts[bisect_right(starts, placement.address[index]) - 1] for index in live}
    return sum(size for address, size in segments.items() if address not in used)


def categories_of(subcategories: dict[str, int]) -> dict[str, int]:
    sums = dict.fromkeys(CATEGORIES, 0)
    for name, size in subcategories.items():
        sums[name.partition("/")[0]] += size
    return sums


def _terms(stream: Stream, live: list[int], last_layer: int) -> tuple[Term, ...]:
    """Live bytes by term and category, largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for index in live:
        label = stream.labels[index]
        name = term_name(label, stream.ops[index], stream.sites[index], stream.layers[index], last_layer)
        if label == "activations/recompute":
            name = f"recomputed layer: {name}"
        entry = found.setdefault((name, label.partition("/")[0]), [0, 0])
        entry[0] += stream.sizes[index]
        entry[1] += 1
    terms = [
        Term(name, size, TERMS[name.removeprefix("recomputed layer: ")].text, category, count)
        for (name, category), (size, count) in found.items()
    ]
    return tuple(sorted(terms, key=lambda term: (-term.bytes, term.name)))


# ---- fits ------------------------------------------------------------------------------------------------------------
def fit_of(stream: Stream, placement: Placement, card: GpuPreset, capacity: int) -> Fit:
    outside = card.outside_bytes
    device_bytes = int(placement.reserved.max()) + outside
    margin = capacity - device_bytes
    flushed = margin >= 0
    if not flushed and int(placement.allocated.max()) + outside <= capacity:
        flushed = place(stream, capacity - outside).refused_event is None
    return Fit(capacity, device_bytes, margin, margin >= 0, flushed)


def _warnings(shape: ModelShape, options: RunOptions, gpu: GpuPreset | None, stream: Stream) -> tuple[str, ...]:
    """What in this estimate rests on source code only, or on an assumption."""
    notes = []
    if gpu is None:
        notes.append("no --gpu: kernels as on an H200, capacity 24 GiB")
    elif not gpu.outside_measured:
        notes.append(f"memory outside the allocator on {gpu.name} is assumed to be that of an H200")
    if stream.kernel == "flash":
        notes.append("buffers of flash attention are taken from its source, not measured")
    if options.quant in ("int8", "nf4"):
        notes.append(f"quantisation {options.quant} is taken from its source, not measured")
    if options.autocast:
        notes.append("autocast equals a dry run of the real code, not a measurement")
    if options.loss == "chunked":
        notes.append(f"chunked loss: {options.chunk_tokens} tokens a chunk, each chunk checkpointed")
    window = shape.sliding_window
    if window is not None and options.sequence >= window and options.attention != "flash":
        notes.append(f"sequence as long as the sliding window of {window} or longer: the mask's cost is not measured")
    if stream.managed_bytes:
        notes.append(f"{stream.managed_bytes:,} B of paged optimizer states lie outside the allocator and come and go")
    return tuple(notes)
