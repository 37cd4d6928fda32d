"""A predicted run, whoever re-enacted it: what its stream of allocations makes of the allocator, phases and budget."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import round_size
from memtrace.attribution.categories import Category, Purpose
from memtrace.estimate.bounds import check_size
from memtrace.estimate.engine.step import SIMULATED_MICRO_BATCHES, Stream
from memtrace.estimate.engine.tape import EMPTY_CACHE
from memtrace.estimate.options import RunOptions
from memtrace.estimate.placement import Placement, place
from memtrace.estimate.presets import DEFAULT_CAPACITY_BYTES, GpuPreset, gpu_preset

PHASES = ("load", "forward", "loss", "recompute", "backward", "optimizer")
CATEGORIES = tuple(category for category in Category if category is not Category.UNATTRIBUTED)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """``phases`` holds PHASES of the last step (``load`` of loading) and ``first_step``.

    ``categories`` and ``subcategories`` describe the moment of the highest allocated bytes (event ``peak_event`` of the
    stream) and sum to the reserved bytes of that moment. ``managed_bytes``: paged optimizer states outside the
    allocator.
    """

    options: RunOptions
    gpu: GpuPreset
    kernel: str
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_phase: str
    peak_site: str
    phases: dict[str, PhasePeak]
    categories: dict[str, int]
    subcategories: dict[str, int]
    outside_bytes: int
    managed_bytes: int
    fit: Fit
    stream: Stream = field(repr=False)
    placement: Placement = field(repr=False)
    peak_event: int

    def parts(self) -> dict[str, Any]:
        """The fields by name, for what extends a prediction."""
        return {item.name: getattr(self, item.name) for item in fields(Prediction)}

    def live(self) -> list[int]:
        """Allocations alive at the peak."""
        return live_at(self.stream, self.peak_event)


def kernels_of(gpu: GpuPreset | None) -> GpuPreset:
    """The card whose kernels and buffers a run is predicted with: an H200's where none is named."""
    return gpu or gpu_preset("h200")


def predict(
    stream: Stream, options: RunOptions, gpu: GpuPreset | None = None, capacity_bytes: int | None = None
) -> Prediction:
    """Put a stream through the allocator. Without ``gpu`` the capacity is 24 GiB, unless it is given.

    Raises UsageError for a run of more than 32 TiB.
    """
    check_size(stream.events, stream.sizes)
    card = kernels_of(gpu)
    capacity = capacity_bytes or (gpu.total_bytes if gpu is not None else DEFAULT_CAPACITY_BYTES)
    placement = place(stream)
    event = int(np.argmax(placement.allocated))
    subcategories = subcategories_at(stream, placement, event, live_at(stream, event))
    return Prediction(
        options=options,
        gpu=card,
        kernel=stream.kernel,
        peak_requested_bytes=int(placement.requested.max()),
        peak_allocated_bytes=int(placement.allocated.max()),
        peak_reserved_bytes=int(placement.reserved.max()),
        peak_phase=phase_at(stream, event),
        peak_site=site_at(stream, event),
        phases=phase_peaks(stream, placement),
        categories=categories_of(subcategories),
        subcategories=subcategories,
        outside_bytes=card.outside_bytes,
        managed_bytes=stream.managed_bytes,
        fit=fit_of(stream, placement, card, capacity),
        stream=stream,
        placement=placement,
        peak_event=event,
    )


def general_warnings(options: RunOptions, gpu: GpuPreset | None, stream: Stream) -> tuple[list[str], list[str]]:
    """What any prediction rests on: first what is assumed of card and data, last what lies outside the allocator."""
    card, outside = [], []
    if gpu is None:
        card.append("no --gpu: kernels as on an H200, capacity 24 GiB")
    elif not gpu.outside_measured:
        card.append(f"memory outside the allocator on {gpu.name} is assumed to be that of an H200")
    if options.quant == "int8":
        card.append("8-bit products are taken to have no outlier columns; how many there are depends on the data")
    if options.accumulation > SIMULATED_MICRO_BATCHES:
        card.append(
            f"{SIMULATED_MICRO_BATCHES} of the {options.accumulation} micro-batches of a step are simulated: "
            "the others repeat the last of them and change no peak"
        )
    if stream.managed_bytes:
        outside.append(
            f"{stream.managed_bytes:,} B of paged optimizer states lie outside the allocator and come and go"
        )
    return card, outside


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
    found[Purpose.ROUNDING] = rounding
    found[Purpose.UNSPLIT_TAIL] = tails
    found[Purpose.HOLES] = free - cached
    found[Purpose.CACHED_SEGMENTS] = cached
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
    sums: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for name, size in subcategories.items():
        sums[name.partition("/")[0]] += size
    return sums


# ---- fits ------------------------------------------------------------------------------------------------------------
def fit_of(stream: Stream, placement: Placement, card: GpuPreset, capacity: int) -> Fit:
    outside = card.outside_bytes
    device_bytes = int(placement.reserved.max()) + outside
    margin = capacity - device_bytes
    flushed = margin >= 0
    if not flushed and int(placement.allocated.max()) + outside <= capacity:
        flushed = place(stream, capacity - outside).refused_event is None
    return Fit(capacity, device_bytes, margin, margin >= 0, flushed)
