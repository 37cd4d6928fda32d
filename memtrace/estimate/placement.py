"""Run a predicted stream through the allocator model: blocks, segments, and the three curves."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.flat import Numbers, run, tabulate
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_sizes
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.state import AllocatorState
from memtrace.allocator.whatif.addresses import AddressSpace, Hints, Policy
from memtrace.estimate.stream import EMPTY_CACHE, Stream

I8 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SegmentEvent:
    """A segment came from the driver (or, ``freed``, went back) just before stream event ``event``."""

    event: int
    freed: bool
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lies: ``address`` and ``block_bytes`` by allocation, the curves by stream event (after it).

    ``refused_event``: the event whose request did not fit under the limit; the arrays end there. None if all fitted.
    """

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


class _Refused(Exception):
    """The limit was reached."""


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
        self._note(False, address, size)
        return address

    def reserve(self, state: AllocatorState, number: int, size: int) -> tuple[int, int]:
        page = state.page_bytes(number)
        length = -(-self.config.reservation_bytes // page) * page
        return self._space.reserve(length), length

    def map(self, number: int, address: int, size: int) -> bool:
        self._note(False, address, size)
        return True

    def segment_freed(self, number: int, address: int, size: int) -> None:
        self._note(True, address, size)
        self._space.give_back(address)

    def unmapped(self, number: int, address: int, size: int) -> None:
        self._note(True, address, size)

    def complete_pending(self, state: AllocatorState) -> None:
        pass

    def may_release(self, state: AllocatorState, pool: int) -> bool:
        return True

    def _note(self, freed: bool, address: int, size: int) -> None:
        if freed:
            self.segment_frees += 1
        else:
            self.segment_allocs += 1
        if self.log is not None:
            self.log.append(SegmentEvent(self.event, freed, address, size))


def place(stream: Stream, limit_bytes: int | None = None) -> Placement:
    """Blocks and segments of ``stream`` under PyTorch's default allocator settings."""
    config = AllocatorConfig(limit_bytes=limit_bytes)
    log: list[SegmentEvent] = []
    driver = DriverModel(config, log)
    allocator = Allocator(config, driver)
    state = allocator.state
    rounded = round_sizes(np.array(stream.sizes, dtype=np.int64), config)
    one = np.zeros(len(rounded), dtype=np.int32)  # pool and stream of all
    requests = tabulate(state, config, rounded, rounded <= SMALL_LIMIT_BYTES, one, one.astype(np.int64))
    address, blocks = array("q", bytes(8 * len(rounded))), array("q", bytes(8 * len(rounded)))
    ops = np.array(stream.events, dtype=np.int64)
    flushes = np.flatnonzero(ops == EMPTY_CACHE)
    ops[flushes] = len(rounded) + flushes
    position = [event for event, entry in enumerate(stream.events) if 0 <= entry < EMPTY_CACHE]

    def miss(handle: int, number: int, size: int) -> None:
        driver.event = position[handle]
        served = allocator.malloc(number, size, searched=True)
        if served is None:
            raise _Refused
        address[handle], blocks[handle] = served

    def step(event: int) -> None:
        driver.event = event
        allocator.flush()

    refused = None
    try:
        run(state, ops, requests, address, blocks, miss, step)
    except _Refused:
        refused = driver.event
    return _curves(stream, address, blocks, log, refused)


def _curves(
    stream: Stream, address: Numbers, blocks: Numbers, log: list[SegmentEvent], refused: int | None
) -> Placement:
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
    return Placement(address, blocks, log, requested, allocated, reserved, refused)
