"""What is kept of one rank's recording: a few hundred numbers, so that any number of ranks fits in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from memtrace.analysis import Analysis, analyse, is_predicted, is_truncated
from memtrace.answers.curves import category_curves
from memtrace.answers.report import Moment, report
from memtrace.attribution.categories import Category, Purpose
from memtrace.cache.index import open_recording
from memtrace.errors import MemtraceError, SnapshotError
from memtrace.explain.snapshot_facts import verdict_at
from memtrace.history.timeline import At, choose_event
from memtrace.ranks.sources import local_copy
from memtrace.snapshot.devices import choose_device
from memtrace.snapshot.model import Snapshot

_RANK = re.compile(r"rank[_\-.=]?(\d+)", re.IGNORECASE)
_SMALLEST_WEIGHT_BYTES = 1 << 16  # norms and biases are the same everywhere


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The highest allocated level within one step, and the budget there (``categories`` sum to ``reserved_bytes``)."""

    step: int
    event: int
    allocated_bytes: int
    reserved_bytes: int
    categories: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank. ``categories`` are at ``at`` (the OOM, else the peak); ``rank`` is None where nothing tells it.

    ``outside_bytes``: in use on the device but not by this allocator (CUDA context, NCCL, other processes); None if
    the file does not tell. ``lora``: as in the report. ``weights``: how many live weights of each size in bytes there
    are at ``at``, sharded or not, and ``makes_loss`` whether any part of a loss was ever made. ``steps_recorded``: step
    numbers are the program's own, not counted in the trace.
    """

    file: str
    rank: int | None
    device: int
    world_size: int | None
    at: At
    moment: Moment
    peaks: Mapping[str, int]
    reserved_bytes: int
    allocated_bytes: int
    categories: Mapping[str, int]
    subcategories: Mapping[str, int]
    outside_bytes: int | None
    oom: bool
    asked_bytes: int | None
    verdict: str
    steps: tuple[StepPeak, ...]
    steps_recorded: bool
    truncated: bool
    exact: bool
    lora: Mapping[str, str]
    weights: Mapping[int, int]
    makes_loss: bool
    predicted: bool = False


_AS_REPORTED = (
    "moment", "peaks", "reserved_bytes", "allocated_bytes", "categories", "subcategories", "exact", "lora",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that gave no answer, and why in one line. ``exit_code`` is what a command on this file alone ends with."""

    file: str
    error: str
    exit_code: int = SnapshotError.exit_code


def summarise(source: str, device: int | None = None, use_index: bool = True) -> Rank | Failure:
    """Read one recording. Never raises for what the file or its transport may do; this is what workers run."""
    try:
        with local_copy(source) as path:
            return _summarise(path, source, device, use_index and path == source)  # a fetched copy is gone soon
    except MemtraceError as error:
        return Failure(source, str(error).removeprefix(f"{source}: "), error.exit_code)
    except MemoryError:
        return Failure(source, "not enough memory to read it")
    except Exception as error:  # one bad file must not end a run over hundreds
        return Failure(source, f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _summarise(path: str, source: str, wanted: int | None, use_index: bool) -> Rank:
    recording = open_recording(path, use_index=use_index)
    snapshot = recording.snapshot
    device, _ = choose_device(snapshot, wanted)
    timeline = recording.timeline(device)
    analysis = analyse(timeline)
    at = choose_event(timeline, None)
    budget = report(analysis, at)
    outside = (budget.outside_allocator or {}).get("not_this_allocator_bytes")
    return Rank(
        file=source,
        rank=rank_of(snapshot, source),
        device=device.device,
        world_size=_integer(snapshot.memtrace.get("world_size"), None),
        at=at,
        **{name: getattr(budget, name) for name in _AS_REPORTED},
        outside_bytes=outside,
        oom=bool(timeline.oom_events),
        asked_bytes=budget.fragmentation.asked_bytes,
        verdict=verdict_at(analysis, at.event)[0].verdict,
        steps=step_peaks(analysis),
        steps_recorded=analysis.attribution.facts.phases.basis == "recorded",
        truncated=is_truncated(timeline) is True,
        weights=_weights(analysis, at.event),
        makes_loss=bool(analysis.attribution.rows_of(Purpose.LOSS).any()),
        predicted=is_predicted(snapshot),
    )


def rank_of(snapshot: Snapshot, source: str) -> int | None:
    """The rank that memtrace's recorder stored, else the one in the file's name; None without either."""
    return _integer(snapshot.memtrace.get("rank"), rank_named(source))


def rank_named(source: str) -> int | None:
    """The number in ``…rank3….pickle``, the file's name or, failing that, its folder's."""
    path = PurePath(source)
    found = _RANK.search(path.name) or _RANK.search(path.parent.name)
    return int(found[1]) if found else None


def _integer(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def step_peaks(analysis: Analysis) -> tuple[StepPeak, ...]:
    """The peak of allocated memory within each step, by the phases of the trace; empty where no step was recognised."""
    phases = analysis.attribution.facts.phases
    timeline = analysis.timeline
    if not len(phases) or not (phases.step >= 0).any():
        return ()
    curves = category_curves(analysis)
    # A step is one run of spans with its number; loading (-1) is not a step.
    first = np.flatnonzero(np.diff(phases.step, prepend=phases.step[0] - 1))
    edges = np.append(phases.start[first], len(timeline))
    found = []
    for span, low, high in zip(first.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        step = int(phases.step[span])
        if step < 0 or high <= low:
            continue
        event = low + int(np.argmax(curves.allocated_bytes[low:high]))
        categories = {str(c): int(curves.categories[i, event]) for i, c in enumerate(Category)}
        levels = int(curves.allocated_bytes[event]), int(curves.reserved_bytes[event])
        found.append(StepPeak(step, event, *levels, categories))
    return tuple(found)


def _weights(analysis: Analysis, event: int) -> dict[int, int]:
    kept = (Purpose.QUANTIZED, Purpose.UNQUANTIZED, Purpose.PARAMS)
    rows = analysis.timeline.live_rows(event)
    rows = rows[analysis.attribution.rows_of(*kept, rows=rows)]
    sizes, counts = np.unique(analysis.timeline.allocations.requested_bytes[rows], return_counts=True)
    return {size: n for size, n in zip(sizes.tolist(), counts.tolist(), strict=True) if size >= _SMALLEST_WEIGHT_BYTES}
