"""The driver of a card that is not there: where it would put a segment, and what the limit lets it give.

Recorded addresses are used again where they can be; three models say what the driver does otherwise.

Placement by the allocator depends on addresses only through ties between free blocks of equal size, so these models
bracket what is unknown. Addresses and sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.state import AllocatorState
from memtrace.errors import UsageError
from memtrace.snapshot.model import Action

_GRAIN = 2 << 20
_CHUNK = 32 << 20  # what the Linux driver reserves for cudaMalloc at a time
_TOP = 1 << 46
_LOWEST = 1 << 30
_RESERVATIONS = 1 << 56
_END = 1 << 63


class Policy(StrEnum):
    """How addresses of new segments are made up. ``RECORDED`` reuses recorded ones where it can, else falls."""

    RECORDED = "recorded"
    FALLING = "falling"
    RISING = "rising"
    DRIVER = "driver"


class Hints(NamedTuple):
    """What the recorded run got at each malloc (by event): its segments (address, size), its first mapped page."""

    segments: Mapping[int, Sequence[tuple[int, int]]]
    maps: Mapping[int, int]


class AddressSpace:
    """Addresses for segments and reservations; ``occupied`` are segments that are there from the beginning."""

    def __init__(self, policy: Policy, hints: Hints, occupied: Sequence[int]) -> None:
        self.policy = policy
        reuse = policy is Policy.RECORDED
        self.hints = hints.segments if reuse else {}
        self._bases = hints.maps if reuse else {}
        known = [address for pairs in self.hints.values() for address, _ in pairs]
        known.extend(occupied)
        self._next_down = min([_TOP, *known])
        known.extend(self._bases.values())
        self._next_up = max([_TOP, *[address + (1 << 40) for address in known]])
        self._starts: list[int] = []  # of live segments, sorted
        self._sizes: dict[int, int] = {}
        # The driver model's reservations by address, and how large a gap in each is at most.
        self._chunk_start, self._chunk_end, self._chunk_gap = (np.empty(0, dtype=np.int64) for _ in range(3))
        self._next_reservation = max([_RESERVATIONS, *[address + (1 << 41) for address in known]])

    def occupy(self, address: int, size: int) -> None:
        """Book a range that is in use."""
        insort(self._starts, address)
        self._sizes[address] = size

    def give_back(self, address: int) -> None:
        """A segment went back to the driver."""
        place = bisect_left(self._starts, address)
        if place < len(self._starts) and self._starts[place] == address:
            del self._starts[place]
            del self._sizes[address]
        if len(self._chunk_start):
            self._drop_empty_chunk(address)

    def is_free(self, address: int, size: int) -> bool:
        """Whether nothing lives in a range."""
        place = bisect_right(self._starts, address)
        if place < len(self._starts) and self._starts[place] < address + size:
            return False
        before = self._starts[place - 1] if place else None
        return before is None or before + self._sizes[before] <= address

    def place(self, size: int, event: int) -> int:
        """Address for a new segment that the program's step at ``event`` needs."""
        address = self._hint(size, event)
        if address is None:
            if self.policy is Policy.RISING:
                address = self._rise(size)
            elif self.policy is Policy.DRIVER:
                address = self._from_chunk(size)
            else:
                address = self._fall(size)
        self.occupy(address, size)
        return address

    def recorded_base(self, event: int) -> int | None:
        """Where the recorded run mapped its first page at this event: the base of a reservation, or inside one."""
        return self._bases.get(event)

    def reserve(self, length: int) -> int:
        """Base of a new reservation for an expandable segment, apart from everything else."""
        base = self._next_reservation
        self._next_reservation += -(-length // (1 << 40)) * (1 << 40) + (1 << 40)
        return base

    def _hint(self, size: int, event: int) -> int | None:
        for address, length in self.hints.get(event, ()):
            if length == size and self.is_free(address, size):
                return address
        return None

    def _rise(self, size: int) -> int:
        address = self._next_up
        self._next_up += -(-size // _GRAIN) * _GRAIN
        return address

    def _fall(self, size: int) -> int:
        address = self._next_down - -(-size // _GRAIN) * _GRAIN
        if address < _LOWEST:
            return self._rise(size)
        self._next_down = address
        return address

    def _from_chunk(self, size: int) -> int:
        """First fit in what live reservations leave unused, else a new one in the highest gap that fits."""
        for chunk in np.flatnonzero(self._chunk_gap >= size).tolist():
            position = self._first_fit(chunk, size)
            if position is not None:
                return position
        length = -(-size // _CHUNK) * _CHUNK
        above = np.append(self._chunk_start, _TOP)  # where what lies over each gap begins
        wide = np.flatnonzero(above[1:] - self._chunk_end > length)
        place = int(wide[-1]) + 1 if len(wide) else 0
        start = int(above[place]) - length
        self._chunk_start = np.insert(self._chunk_start, place, start)
        self._chunk_end = np.insert(self._chunk_end, place, start + length)
        self._chunk_gap = np.insert(self._chunk_gap, place, length)
        return start

    def _first_fit(self, chunk: int, size: int) -> int | None:
        """The first gap in a reservation that takes ``size`` bytes; without one, its largest gap is known then."""
        position, end = int(self._chunk_start[chunk]), int(self._chunk_end[chunk])
        largest = 0
        for at in range(bisect_left(self._starts, position), bisect_left(self._starts, end)):
            start = self._starts[at]
            if start - position >= size:
                return position
            largest = max(largest, start - position)
            position = start + self._sizes[start]
        if end - position >= size:
            return position
        self._chunk_gap[chunk] = max(largest, end - position)
        return None

    def _drop_empty_chunk(self, address: int) -> None:
        chunk = int(np.searchsorted(self._chunk_start, address, "right")) - 1
        if chunk < 0:
            return
        start, end = int(self._chunk_start[chunk]), int(self._chunk_end[chunk])
        self._chunk_gap[chunk] = end - start
        first = bisect_left(self._starts, start)
        if first == len(self._starts) or self._starts[first] >= end:
            self._chunk_start = np.delete(self._chunk_start, chunk)
            self._chunk_end = np.delete(self._chunk_end, chunk)
            self._chunk_gap = np.delete(self._chunk_gap, chunk)


class SegmentEvent(NamedTuple):
    """Memory came from the driver or went back, at the driver's ``event``; ``number`` is the free list it serves."""

    event: int
    action: Action
    address: int
    size: int
    number: int

    @property
    def freed(self) -> bool:
        """Whether it went back."""
        return self.action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


class CardDriver:
    """Implements :class:`memtrace.allocator.simulator.Driver`: gives memory up to the limit on reserved bytes.

    ``event`` is the caller's step under way, ``log`` every segment event since the caller last emptied it.
    """

    def __init__(self, config: AllocatorConfig, space: AddressSpace | None = None) -> None:
        self.config = config
        self.space = space or AddressSpace(Policy.DRIVER, Hints({}, {}), ())
        self.event = 0
        self.log: list[SegmentEvent] = []
        self.segment_allocs = self.segment_frees = 0

    def admits(self, total_bytes: int, segment_bytes: int) -> bool:
        limit = self.config.limit_bytes
        return limit is None or total_bytes + segment_bytes <= limit

    def wants_garbage(self, total_bytes: int, victims: list[int]) -> bool:
        limit = self.config.limit_bytes
        return limit is not None and total_bytes > int(self.config.gc_threshold * limit)

    def place(self, number: int, size: int) -> int | None:
        address = self.space.place(size, self.event)
        if not 0 <= address < _END - size:  # beyond the bottom or the top of the address space
            raise UsageError("the run would need more than any device has: check the model's sizes and the options")
        self._note(Action.SEGMENT_ALLOC, address, size, number)
        return address

    def reserve(self, state: AllocatorState, number: int, size: int) -> tuple[int, int]:
        page = state.page_bytes(number)
        length = -(-self.config.reservation_bytes // page) * page
        recorded = self.space.recorded_base(self.event)
        if recorded is not None and (room := state.make_room(recorded, length)) >= size:
            return recorded, room
        return self.space.reserve(length), length

    def map(self, number: int, address: int, size: int) -> bool:
        self._note(Action.SEGMENT_MAP, address, size, number)
        return True

    def segment_freed(self, number: int, address: int, size: int) -> None:
        self.space.give_back(address)
        self._note(Action.SEGMENT_FREE, address, size, number)

    def unmapped(self, number: int, address: int, size: int) -> None:
        self._note(Action.SEGMENT_UNMAP, address, size, number)

    def complete_pending(self, state: AllocatorState) -> None:
        pass

    def may_release(self, state: AllocatorState, pool: int) -> bool:
        return True

    def _note(self, action: Action, address: int, size: int, number: int) -> None:
        change = SegmentEvent(self.event, action, address, size, number)
        self.segment_allocs += not change.freed
        self.segment_frees += change.freed
        self.log.append(change)
