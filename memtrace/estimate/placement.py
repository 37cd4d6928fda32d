"""Predicted allocations through the allocator model: a stream as a whole, or the cells of a run one after the other."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.flat import Numbers, Requests, request_kind, run
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size, segment_size
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.state import SHIFT, AllocatorState
from memtrace.allocator.whatif.addresses import CardDriver, SegmentEvent
from memtrace.estimate.cells import Cell, Name, Sized
from memtrace.estimate.stream import Stream
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I8

DEFAULT_SETTINGS = AllocatorConfig()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lies: ``address`` and ``block_bytes`` by allocation, the curves by stream event (after it).

    ``refused_event``: the event whose request did not fit under the limit; the arrays end there. None if all fitted.
    ``state`` is that of the allocator at the end.
    """

    config: AllocatorConfig
    address: Numbers
    block_bytes: Numbers
    segments: list[SegmentEvent]
    requested: I8
    allocated: I8
    reserved: I8
    refused_event: int | None
    state: AllocatorState

    def segments_at(self, event: int) -> dict[int, int]:
        """Size by address of the segments that exist just after stream event ``event``."""
        found: dict[int, int] = {}
        for entry in self.segments:
            if entry.event > event:
                break
            if entry.freed:
                found.pop(entry.address, None)
            else:
                found[entry.address] = entry.size
        return found


@dataclass(frozen=True, slots=True)
class Peaks:
    """Highest bytes of a cell or a step, each at its own moment."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    def __or__(self, other: Peaks) -> Peaks:
        return Peaks(
            max(self.requested_bytes, other.requested_bytes),
            max(self.allocated_bytes, other.allocated_bytes),
            max(self.reserved_bytes, other.reserved_bytes),
        )


@dataclass(frozen=True, slots=True)
class ForecastRefusal:
    """The request that the limit refused, and what the allocator held then. Steps and micro-batches count from 0, -1 is
    loading; ``event`` counts within the cell. ``tensor_bytes`` were asked for;
    ``requested_bytes`` is what the allocator asked the driver for, which is what PyTorch's error says.
    ``usable_bytes`` is the largest free block that the request's pool could have used, ``still_needed_bytes`` what the
    pass would have held beyond now, this request included.
    """

    event: int
    phase: str
    tensor_bytes: int
    requested_bytes: int
    live_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    largest_free_block_bytes: int
    usable_bytes: int
    free_bytes: int
    pieces: int
    still_needed_bytes: int
    step: int = -1
    micro_batch: int = -1


_PASSES = ("backward", "optimizer")  # marks at which another pass begins


class _Missed(Exception):
    """No memory for a request."""


class Walk:
    """An allocator under ``config``, and what cells left alive in it."""

    def __init__(self, config: AllocatorConfig) -> None:
        self.config = config
        self.driver = CardDriver(config)
        self.allocator = Allocator(config, self.driver)
        state = self.allocator.state
        self._small, self._large = state.list_of(0, True, 0), state.list_of(0, False, 0)
        self._kinds: dict[int, tuple[int, int, int, int]] = {}
        self._alive: dict[Name, tuple[int, int, int]] = {}  # address, block bytes, requested bytes
        self.live_bytes = self.allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds."""
        return self.allocator.state.total_bytes

    def serve(self, cell: Cell, sizes: Iterable[int], address: Numbers, blocks: Numbers) -> int | None:
        """Run the events of a cell; the event of the request that the limit refuses, None if it refuses none. ``sizes``
        are those of its kinds and of what it takes. Addresses and blocks are by number."""

        def miss(number: int, free_list: int, size: int) -> None:
            self.driver.event = int(cell.births[number])
            served = self.allocator.malloc(free_list, size, searched=True)
            if served is None:
                raise _Missed
            address[number], blocks[number] = served

        def flush(event: int) -> None:
            self.driver.event = event
            self.allocator.flush()

        kinds = np.array([self._kind(size) for size in sizes], dtype=np.int64).reshape(-1, 4)
        try:
            run(self.allocator.state, cell.ops, Requests(kinds, cell.row_of), address, blocks, miss, flush)
        except _Missed:
            return self.driver.event
        return None

    def cell(self, sized: Sized) -> tuple[Peaks, ForecastRefusal | None]:
        """Run one cell, up to the request that the limit refuses, if one."""
        cell, sizes = sized
        taken = [self._alive.pop(name) for name in cell.taken]
        bytes_of = (*sizes, *(entry[2] for entry in taken))
        address = array("q", bytes(8 * len(cell.kinds)))
        blocks = array("q", address)
        address.extend(entry[0] for entry in taken)
        blocks.extend(entry[1] for entry in taken)
        state = self.allocator.state
        state.peak_bytes = state.total_bytes
        self.driver.log.clear()
        refused = self.serve(cell, bytes_of, address, blocks)
        live, allocated = cell.curves(bytes_of, blocks, refused, self.live_bytes, self.allocated_bytes)
        peaks = Peaks(int(live.max()), int(allocated.max()), state.peak_bytes)
        self.live_bytes, self.allocated_bytes = int(live[-1]), int(allocated[-1])
        if refused is not None:
            return peaks, self._refused(sized, refused, bytes_of)
        for number, name in cell.left:
            self._alive[name] = address[number], blocks[number], sizes[cell.kinds[number]]
        return peaks, None

    def _kind(self, size: int) -> tuple[int, int, int, int]:
        known = self._kinds.get(size)
        if known is None:
            rounded = round_size(size, self.config)
            free_list = self._small if rounded <= SMALL_LIMIT_BYTES else self._large
            known = self._kinds[size] = request_kind(self.allocator.state, free_list, rounded, self.config)
        return known

    def _refused(self, sized: Sized, event: int, bytes_of: tuple[int, ...]) -> ForecastRefusal:
        """The refusal of the request at an event of the cell, of which what came before has been run."""
        cell, sizes = sized
        at = [mark.event for mark in cell.marks]
        place = bisect_right(at, event) - 1
        names = [mark.name for mark in cell.marks]
        passes = [name for name in names[place + 1 :] if name in _PASSES]
        end = at[names.index(passes[0], place + 1)] - event if passes else None
        tensor_bytes = sizes[cell.kinds[cell.events[event]]]
        rounded = round_size(tensor_bytes, self.config)
        lists = self.allocator.state.lists
        largest = [group[-1] >> SHIFT if group else 0 for group in lists]
        to_come = np.cumsum(cell.changes(bytes_of)[event:][:end])
        return ForecastRefusal(
            event=event,
            phase=cell.marks[place].phase,
            tensor_bytes=tensor_bytes,
            requested_bytes=segment_size(rounded, self.config),
            live_bytes=self.live_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            largest_free_block_bytes=max(largest),
            usable_bytes=largest[self._small if rounded <= SMALL_LIMIT_BYTES else self._large],
            free_bytes=sum(key >> SHIFT for group in lists for key in group),
            pieces=sum(map(len, lists)),
            still_needed_bytes=int(to_come.max(initial=tensor_bytes)),
        )


def place(stream: Stream, config: AllocatorConfig = DEFAULT_SETTINGS) -> Placement:
    """Blocks and segments of ``stream``, up to the request that the limit refuses."""
    walk = Walk(config)
    sizes, kinds = np.unique(np.array(stream.sizes, dtype=np.int64), return_inverse=True)
    cell = Cell(stream.events, kinds.tolist(), (), (), tuple(stream.marks), 0, stream, len(sizes))
    address, blocks = array("q", bytes(8 * len(kinds))), array("q", bytes(8 * len(kinds)))
    refused = walk.serve(cell, sizes.tolist(), address, blocks)
    requested, allocated = (curve[1:] for curve in cell.curves(tuple(sizes.tolist()), blocks, refused))
    change = np.zeros(len(requested) + 1, dtype=np.int64)
    for entry in walk.driver.log:
        change[min(entry.event, len(requested))] += -entry.size if entry.freed else entry.size
    reserved = np.cumsum(change)[: len(requested)]
    segments, state = walk.driver.log, walk.allocator.state
    return Placement(config, address, blocks, segments, requested, allocated, reserved, refused, state)
