"""Predicted allocations through the allocator model: a stream as a whole, or the cells of a run one after the other."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.flat import Numbers, Requests, request_kind, run
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size, segment_size
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.state import SHIFT, AllocatorState
from memtrace.allocator.whatif.addresses import AddressSpace, Hints, Policy
from memtrace.errors import UsageError
from memtrace.estimate.cells import Name, Sized
from memtrace.estimate.stream import EMPTY_CACHE, Stream
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8

DEFAULT_SETTINGS = AllocatorConfig()


@dataclass(frozen=True, slots=True)
class SegmentEvent:
    """A segment came from the driver (or, ``freed``, went back) just before stream event ``event``.

    ``number``: the allocator's free list that it serves.
    """

    event: int
    freed: bool
    address: int
    size: int
    number: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lies: ``address`` and ``block_bytes`` by allocation, the curves by stream event (after it).

    ``refused_event``: the event whose request did not fit under the limit; the arrays end there. None if all fitted.
    """

    config: AllocatorConfig
    address: Numbers
    block_bytes: Numbers
    segments: list[SegmentEvent]
    requested: I8
    allocated: I8
    reserved: I8
    refused_event: int | None

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


class DriverModel:
    """Hands out addresses as the CUDA driver does, up to the limit on reserved bytes, and counts segments.

    Addresses matter: among equal free blocks the allocator takes the lowest. With ``log`` every segment is written
    down, with the stream event that was set.
    """

    def __init__(self, config: AllocatorConfig, log: list[SegmentEvent] | None = None) -> None:
        self.config = config
        self._space = AddressSpace(Policy.DRIVER, Hints({}, {}), ())
        self.log = log
        self.event = 0
        self.segment_allocs = self.segment_frees = 0

    def admits(self, total_bytes: int, segment_bytes: int) -> bool:
        limit = self.config.limit_bytes
        return limit is None or total_bytes + segment_bytes <= limit

    def wants_garbage(self, total_bytes: int, victims: list[int]) -> bool:
        limit = self.config.limit_bytes
        return limit is not None and total_bytes > int(self.config.gc_threshold * limit)

    def place(self, number: int, size: int) -> int | None:
        address = self._space.place(size, self.event)
        if address < 0:  # below the bottom of the address space
            raise UsageError("the run would need more than any device has: check the model's sizes and the options")
        self._note(False, address, size, number)
        return address

    def reserve(self, state: AllocatorState, number: int, size: int) -> tuple[int, int]:
        page = state.page_bytes(number)
        length = -(-self.config.reservation_bytes // page) * page
        return self._space.reserve(length), length

    def map(self, number: int, address: int, size: int) -> bool:
        self._note(False, address, size, number)
        return True

    def segment_freed(self, number: int, address: int, size: int) -> None:
        self._note(True, address, size, number)
        self._space.give_back(address)

    def unmapped(self, number: int, address: int, size: int) -> None:
        self._note(True, address, size, number)

    def complete_pending(self, state: AllocatorState) -> None:
        pass

    def may_release(self, state: AllocatorState, pool: int) -> bool:
        return True

    def _note(self, freed: bool, address: int, size: int, number: int) -> None:
        if freed:
            self.segment_frees += 1
        else:
            self.segment_allocs += 1
        if self.log is not None:
            self.log.append(SegmentEvent(self.event, freed, address, size, number))


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


@dataclass
class _Missed(Exception):
    """No memory for allocation ``number``."""

    number: int


class Walk:
    """An allocator under ``config``, and what cells left alive in it."""

    def __init__(self, config: AllocatorConfig, log: list[SegmentEvent] | None = None) -> None:
        self.config = config
        self.driver = DriverModel(config, log)
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

    def serve(
        self, ops: I8, sizes: Iterable[int], row_of: I4, address: Numbers, blocks: Numbers, events: Sequence[int] = ()
    ) -> None:
        """Run operations as :func:`flat.run` takes them; ``row_of`` is a handle's place in ``sizes``. ``events``: the
        event of each handle, for the log. Raises _Missed at the request that the limit refuses."""

        def miss(number: int, free_list: int, size: int) -> None:
            if events:
                self.driver.event = events[number]
            served = self.allocator.malloc(free_list, size, searched=True)
            if served is None:
                raise _Missed(number)
            address[number], blocks[number] = served

        def flush(event: int) -> None:
            self.driver.event = event
            self.allocator.flush()

        requests = Requests(np.array([self._kind(size) for size in sizes], dtype=np.int64).reshape(-1, 4), row_of)
        run(self.allocator.state, ops, requests, address, blocks, miss, flush)

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
        kind_bytes = np.array([*bytes_of, 0], dtype=np.int64)
        try:
            self.serve(cell.ops, bytes_of, cell.row_of, address, blocks)
        except _Missed as missed:
            return self._refused(sized, missed.number, kind_bytes, blocks)
        peaks = self._peaks(sized, kind_bytes, blocks, len(cell.events))
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

    def _peaks(self, sized: Sized, kind_bytes: I8, blocks: Numbers, end: int) -> Peaks:
        """Peaks up to event ``end``; what lives then is kept."""
        cell, _ = sized
        sign = cell.sign[:end]
        live = np.cumsum(kind_bytes[cell.rows[:end]] * sign) + self.live_bytes
        allocated = np.cumsum(np.array(blocks, dtype=np.int64)[cell.number[:end]] * sign) + self.allocated_bytes
        before = self.live_bytes, self.allocated_bytes
        if end:
            self.live_bytes, self.allocated_bytes = int(live[-1]), int(allocated[-1])
        reserved = self.allocator.state.peak_bytes
        return Peaks(int(live.max(initial=before[0])), int(allocated.max(initial=before[1])), reserved)

    def _refused(self, sized: Sized, number: int, kind_bytes: I8, blocks: Numbers) -> tuple[Peaks, ForecastRefusal]:
        """Peaks up to the refusal of allocation ``number``, and the refusal."""
        cell, sizes = sized
        event = cell.events.index(number)
        changes = kind_bytes[cell.rows[event:]] * cell.sign[event:]
        peaks = self._peaks(sized, kind_bytes, blocks, event)
        at = [mark.event for mark in cell.marks]
        place = bisect_right(at, event) - 1
        names = [mark.name for mark in cell.marks]
        passes = [name for name in names[place + 1 :] if name in _PASSES]
        end = at[names.index(passes[0], place + 1)] - event if passes else len(changes)
        tensor_bytes = sizes[cell.kinds[number]]
        rounded = round_size(tensor_bytes, self.config)
        lists = self.allocator.state.lists
        largest = [group[-1] >> SHIFT if group else 0 for group in lists]
        return peaks, ForecastRefusal(
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
            still_needed_bytes=int(np.cumsum(changes[:end]).max(initial=tensor_bytes)),
        )


def place(stream: Stream, config: AllocatorConfig = DEFAULT_SETTINGS) -> Placement:
    """Blocks and segments of ``stream``, up to the request that the limit refuses."""
    log: list[SegmentEvent] = []
    walk = Walk(config, log)
    sizes, row_of = np.unique(np.array(stream.sizes, dtype=np.int64), return_inverse=True)
    address, blocks = array("q", bytes(8 * len(row_of))), array("q", bytes(8 * len(row_of)))
    ops = np.array(stream.events, dtype=np.int64)
    flushes = np.flatnonzero(ops == EMPTY_CACHE)
    ops[flushes] = len(row_of) + flushes
    births = [event for event, entry in enumerate(stream.events) if 0 <= entry < EMPTY_CACHE]
    refused = None
    try:
        walk.serve(ops, sizes.tolist(), row_of.astype(np.int32), address, blocks, births)
    except _Missed as missed:
        refused = births[missed.number]
    events = np.array(stream.events[:refused], dtype=np.int64)
    index = np.where(events >= 0, events, ~events)
    sign = np.where(events >= 0, 1, -1)
    no_operation = events == EMPTY_CACHE
    index[no_operation] = 0
    sign[no_operation] = 0
    requested = np.cumsum(np.array(stream.sizes, dtype=np.int64)[index] * sign)
    allocated = np.cumsum(np.array(blocks, dtype=np.int64)[index] * sign)
    change = np.zeros(len(events) + 1, dtype=np.int64)
    for entry in log:
        change[min(entry.event, len(events))] += -entry.size if entry.freed else entry.size
    reserved = np.cumsum(change)[: len(events)]
    return Placement(config, address, blocks, log, requested, allocated, reserved, refused)
