"""A run's stream cut into cells (loading, one micro-batch, one optimizer step, one evaluation batch), for any length.

A cell's sequence of allocations and frees depends on the length of its sequences only where a kernel is chosen by size
(a product that dequantises above some rows, a mask that is needed from some length on). Between such switches only the
sizes change, and each is a polynomial of the length, in places with the length rounded up to a tile. So a few streams
tell all: the full model gives the sequence of every stretch between two switches, a shallow one the sizes. Switches
are looked for among the lengths that are asked for, and every fitted size is checked at lengths that it was not fitted
to; where the check fails, the stretch is cut and looked at again, down to single lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.flat import Numbers
from memtrace.estimate.engine.kernels import KernelDevice, fused_4bit_product
from memtrace.estimate.options import RunOptions
from memtrace.estimate.schedule import MicroBatch
from memtrace.estimate.source import StreamSource
from memtrace.estimate.stream import EMPTY_CACHE, Stream, StreamMark
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8

Name = tuple[str, int]
"""What one cell makes and another frees: its label, and the how-manieth of that label the cell leaves alive."""

TILES = (8, 16, 32, 64, 128, 256)  # lengths that kernels round up to
SAMPLES = 7  # streams that the sizes of a stretch are fitted to and checked at


class Role(StrEnum):
    """What a cell is. The run's first step differs from later ones: workspaces and optimizer states come to be."""

    LOAD = "load"
    FIRST = "first micro-batch of the first step"
    FIRST_NEXT = "later micro-batch of the first step"
    FIRST_OPTIMIZER = "optimizer, first step"
    MICRO = "first micro-batch of a later step"
    NEXT = "later micro-batch of a later step"
    OPTIMIZER = "optimizer, later steps"
    EVALUATION = "evaluation batch"


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One cell of a stretch of lengths. Its allocations are numbered from 0; what it frees of others follows them.

    ``events``: a number, its complement for the free, or ``EMPTY_CACHE``. ``kinds`` is by allocation the row of its
    size, of which there are ``kind_count``. ``taken`` names what is freed of earlier cells; ``left`` what outlives
    this one, with its number. ``marks`` are relative to the cell; allocation i is number ``start`` + i of ``stream``,
    which tells all the rest about it.
    """

    events: list[int]
    kinds: list[int]
    taken: tuple[Name, ...]
    left: tuple[tuple[int, Name], ...]
    marks: tuple[StreamMark, ...]
    start: int
    stream: Stream
    kind_count: int
    number: I8 = field(init=False)  # by event: which allocation (0 for ``EMPTY_CACHE``)
    sign: I8 = field(init=False)  # by event: 1, -1, or 0 for ``EMPTY_CACHE``
    rows: I8 = field(init=False)  # by event: its kind; what is taken follows the kinds, then ``EMPTY_CACHE``
    row_of: I4 = field(init=False)  # by number: its kind
    ops: I8 = field(init=False)  # the events as the allocator's loop takes them
    births: I8 = field(init=False)  # by number: the event that makes it

    def __post_init__(self) -> None:
        entries = np.array(self.events, dtype=np.int64)
        empty = entries >= EMPTY_CACHE
        number = np.where(empty, 0, np.where(entries >= 0, entries, ~entries))
        row_of = np.array([*self.kinds, *range(self.kind_count, self.kind_count + len(self.taken))], dtype=np.int32)
        computed = {
            "number": number,
            "sign": np.where(empty, 0, np.where(entries >= 0, 1, -1)),
            "rows": np.where(empty, self.kind_count + len(self.taken), row_of[number]).astype(np.int64),
            "row_of": row_of,
            "ops": np.where(empty, len(row_of) + np.arange(len(entries)), entries),
            "births": np.flatnonzero((entries >= 0) & ~empty),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    def changes(self, bytes_of: Sequence[int]) -> I8:
        """By event: the change of requested bytes, where ``bytes_of`` are those of the kinds and of what is taken."""
        return np.array([*bytes_of, 0], dtype=np.int64)[self.rows] * self.sign

    def curves(
        self, bytes_of: Sequence[int], blocks: Numbers, end: int | None = None, live: int = 0, allocated: int = 0
    ) -> tuple[I8, I8]:
        """Requested and allocated bytes before the first event and after each up to ``end``; ``blocks`` are the sizes
        of blocks by number, ``live`` and ``allocated`` what was in use before."""
        held = np.array(blocks or [0], dtype=np.int64)[self.number] * self.sign
        steps = (np.concatenate([[0], change[:end]]) for change in (self.changes(bytes_of), held))
        requested_curve, allocated_curve = map(np.cumsum, steps)
        return requested_curve + live, allocated_curve + allocated


Sized = tuple[Cell, tuple[int, ...]]
"""A cell, and at one length the bytes of each kind of its allocations."""


class Cells:
    """The cells of a run of ``source`` under ``options``, once :meth:`prepare` has seen their lengths."""

    def __init__(self, source: StreamSource, options: RunOptions, device: KernelDevice) -> None:
        self.source = source
        self.options = replace(options, accumulation=min(options.accumulation, 2))
        self.device = device
        self.managed_bytes = 0
        self._sized: dict[MicroBatch, tuple[dict[Role, Cell], tuple[int, ...]]] = {}

    def at(self, role: Role, batch: MicroBatch) -> Sized:
        """The cell for a micro-batch."""
        cells, sizes = self._sized[batch]
        return cells[role], sizes

    def prepare(self, like: MicroBatch, lengths: Iterable[int]) -> None:
        """Work out the cells of micro-batches ``like`` this one, of these lengths. Raises what the source raises."""
        stretches: dict[tuple[bool, ...], list[int]] = defaultdict(list)
        products: set[tuple[int, int]] = set()
        for length in sorted({length for length in lengths if replace(like, length=length) not in self._sized}):
            if not products:
                self._shallow(like, length)  # a dry run knows its products once it ran
                products = self.source.products(self.options)
            choices = (fused_4bit_product(self.device, like.rows * length, n, k) for n, k in sorted(products))
            stretches[tuple(choices)].append(length)
        for stretch in stretches.values():
            self._solve(like, stretch)

    # ---- streams -------------------------------------------------------------------------------------------------
    def _stream(self, like: MicroBatch, length: int, layers: int | None) -> Stream:
        return self.source.stream(
            replace(self.options, batch=like.rows, padded=like.padded, sequence=length), self.device, layers=layers
        )

    def _shallow(self, like: MicroBatch, length: int) -> Stream:
        return self._stream(like, length, self.source.shallow_layers)

    # ---- one stretch ---------------------------------------------------------------------------------------------
    def _solve(self, like: MicroBatch, lengths: list[int]) -> None:
        """Cells for ``lengths`` (sorted), between whose ends no known kernel switches."""
        samples = _spread(lengths, SAMPLES)
        streams = [self._shallow(like, length) for length in samples]
        for earlier, later, before, after in zip(streams, streams[1:], samples, samples[1:], strict=False):
            if not _alike(earlier, later):
                switch = self._switch(like, lengths, before, after, earlier)
                self._solve(like, lengths[:switch])
                self._solve(like, lengths[switch:])
                return
        full = self._stream(like, samples[-1], None)
        vectors = _vectors(streams)
        if vectors is None or any(full.key(index) not in vectors for index in range(len(full.sizes))):
            whole = [self._stream(like, length, None) for length in samples]
            rows_of = list(zip(*(stream.sizes for stream in whole), strict=True))
        else:
            rows_of = [vectors[full.key(index)] for index in range(len(full.sizes))]
        kinds = {vector: kind for kind, vector in enumerate(dict.fromkeys(rows_of))}
        table = _sizes_at(lengths, samples, list(kinds))
        if table is None:
            middle = len(lengths) // 2
            self._solve(like, lengths[:middle])
            self._solve(like, lengths[middle:])
            return
        self.managed_bytes = full.managed_bytes
        cells = cut(full, [kinds[vector] for vector in rows_of])
        for column, length in enumerate(lengths):
            self._sized[replace(like, length=length)] = cells, tuple(table[:, column].tolist())

    def _switch(self, like: MicroBatch, lengths: list[int], low: int, high: int, at_low: Stream) -> int:
        """Where among ``lengths`` the sequence becomes another one than ``at_low``, by bisection."""
        left, right = bisect_left(lengths, low), bisect_left(lengths, high)
        while left + 1 < right:
            middle = (left + right) // 2
            if _alike(at_low, self._shallow(like, lengths[middle])):
                left = middle
            else:
                right = middle
        return right


def _spread(lengths: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the lengths, both ends among them, evenly spread."""
    if len(lengths) <= count:
        return list(lengths)
    return [lengths[round(i * (len(lengths) - 1) / (count - 1))] for i in range(count)]


def _alike(one: Stream, other: Stream) -> bool:
    """Whether both do the same, sizes apart."""
    return one.events == other.events and one.ops == other.ops


def _vectors(streams: Sequence[Stream]) -> dict[tuple[str, str, str, int], tuple[int, ...]] | None:
    """Sizes at every sample by what allocations of one kind have in common. None where that tells no kind apart."""
    last, found = streams[-1], dict[tuple[str, str, str, int], tuple[int, ...]]()
    for index, vector in enumerate(zip(*(stream.sizes for stream in streams), strict=True)):
        if found.setdefault(last.key(index), vector) != vector:
            return None
    return found


def _sizes_at(lengths: list[int], samples: list[int], vectors: list[tuple[int, ...]]) -> I8 | None:
    """Sizes by kind and length. None where some kind's sizes follow no formula that holds at every sample."""
    values = np.array(vectors, dtype=np.int64)
    if lengths == samples:
        return values
    table = np.zeros((len(vectors), len(lengths)), dtype=np.int64)
    at_samples, at_lengths = np.array(samples, dtype=np.float64), np.array(lengths, dtype=np.float64)
    left = np.arange(len(vectors))
    for tile in (1, *TILES):
        features = _features(at_samples, tile)
        if features.shape[1] >= len(samples) or not len(left):
            break
        solution = np.linalg.lstsq(features, values[left].T.astype(np.float64), rcond=None)[0]
        holds = (values[left] == np.round(features @ solution).T).all(axis=1)
        table[left[holds]] = np.round(_features(at_lengths, tile) @ solution[:, holds]).T
        left = left[~holds]
    return None if len(left) else table


def _features(lengths: NDArray[np.float64], tile: int) -> NDArray[np.float64]:
    """1, s, s², and with a tile also ⌈s⌉ and s·⌈s⌉, all of about the same size."""
    s, rounded = lengths / 1024, np.ceil(lengths / tile) * tile / 1024
    columns = [np.ones_like(s), s, s * s] + ([rounded, s * rounded] if tile > 1 else [])
    return np.stack(columns, axis=1)


# ---- cutting ---------------------------------------------------------------------------------------------------------
def cut(stream: Stream, kinds: Sequence[int]) -> dict[Role, Cell]:
    """The cells of a stream of loading and two steps; ``kinds`` is by allocation the row of its size."""
    spans = list(_spans(stream))
    birth = [0] * len(stream.sizes)
    number = 0
    starts = []
    for cell, (_, begin, end, _) in enumerate(spans):
        starts.append(number)
        for entry in stream.events[begin:end]:
            if 0 <= entry < EMPTY_CACHE:
                birth[entry] = cell
                number += 1
    names: dict[int, Name] = {}
    found: dict[Role, Cell] = {}
    for cell, (role, begin, end, marks) in enumerate(spans):
        events, start = stream.events[begin:end], starts[cell]
        count = sum(0 <= entry < EMPTY_CACHE for entry in events)
        freed = {~entry: None for entry in events if entry < 0}
        taken = [index for index in freed if birth[index] != cell]
        local = {index: count + place for place, index in enumerate(taken)}
        seen: Counter[str] = Counter()
        left = []
        for index in range(start, start + count):
            if index not in freed:
                label = stream.labels[index]
                names[index] = label, seen[label]
                seen[label] += 1
                left.append((index - start, names[index]))
        found[role] = Cell(
            [
                entry if entry >= EMPTY_CACHE else entry - start if entry >= 0 else ~local.get(~entry, ~entry - start)
                for entry in events
            ],
            list(kinds[start : start + count]),
            tuple(names[index] for index in taken),
            tuple(left),
            tuple(StreamMark(mark.event - begin, mark.name, mark.step) for mark in marks),
            start,
            stream,
            max(kinds) + 1,
        )
    return found


def _spans(stream: Stream) -> Iterable[tuple[Role, int, int, list[StreamMark]]]:
    """Role, begin, end and marks of every cell: one begins where a batch comes in and where the optimizer steps."""
    role, begin, step, micro, evaluates = Role.LOAD, 0, -1, 0, False
    inside: list[StreamMark] = []
    for mark in [*stream.marks, StreamMark(len(stream.events), "end", 0)]:
        if mark.name in ("inputs", "optimizer", "end") and mark.event > begin:
            yield role, begin, mark.event, inside
            begin, inside = mark.event, []
        if mark.name == "end":
            return
        if mark.step != step:
            step, micro = mark.step, 0
        evaluates = evaluates or mark.name == "eval"
        first = step == 0
        if mark.name == "inputs" and evaluates:
            role = Role.EVALUATION
        elif mark.name == "inputs":
            role = (Role.FIRST_NEXT if first else Role.NEXT) if micro else (Role.FIRST if first else Role.MICRO)
            micro += 1
        elif mark.name == "optimizer":
            role = Role.FIRST_OPTIMIZER if first else Role.OPTIMIZER
        inside.append(mark)
