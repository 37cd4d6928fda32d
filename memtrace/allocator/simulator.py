"""What the allocator does when the free lists don't serve a request: collect garbage, grow, reclaim, give up.

The order of the steps is PyTorch's ``malloc``. The driver (see :class:`Driver`) decides what the world outside the
allocator does: addresses, refusals, and which delayed frees have completed. Expandable segments grow and shrink by
whole pages of a virtual reservation.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import segment_size
from memtrace.allocator.state import MASK, SHIFT, AllocatorState


class Driver(Protocol):
    """The world outside the allocator. Methods that report (``segment_freed`` …) come after the state changed."""

    def admits(self, total_bytes: int, segment_bytes: int) -> bool:
        """Whether the limit allows growth from ``total_bytes`` by a segment of that size."""

    def wants_garbage(self, total_bytes: int, victims: list[int]) -> bool:
        """Whether the GC threshold is passed at ``total_bytes``, so that the segments at ``victims`` go."""

    def place(self, number: int, size: int) -> int | None:
        """Address of a new segment of ``size`` bytes, None if the driver refuses."""

    def reserve(self, state: AllocatorState, number: int, size: int) -> tuple[int, int]:
        """(base, length) of a new reservation for a request of ``size`` bytes."""

    def map(self, number: int, address: int, size: int) -> bool:
        """Whether the driver maps that range."""

    def segment_freed(self, number: int, address: int, size: int) -> None:
        """An ordinary segment went back to the driver."""

    def unmapped(self, number: int, address: int, size: int) -> None:
        """Whole pages of an expandable segment went back to the driver."""

    def complete_pending(self, state: AllocatorState) -> None:
        """All streams were synchronised: release every delayed free."""

    def may_release(self, state: AllocatorState, pool: int) -> bool:
        """Whether a flush may release the cached segments of a private pool."""


class Allocator:
    """The algorithm over a :class:`AllocatorState` (an empty one unless given) and a :class:`Driver`."""

    def __init__(self, config: AllocatorConfig, driver: Driver, state: AllocatorState | None = None) -> None:
        self.config = config
        self.state = state or AllocatorState(config)
        self.driver = driver
        self.num_alloc_retries = 0
        self.num_flushes = 0
        self.num_ooms = 0
        self.num_oom_rejections = 0

    def malloc(self, number: int, size: int, *, searched: bool = False) -> tuple[int, int] | None:
        """Serve a rounded request from free list ``number``: (address, block bytes), or None when out of memory.

        ``searched`` says that the free list is known to miss.
        """
        state = self.state
        key = None if searched else state.search(number, size)
        if key is None:
            key = self._refill(number, size)
        if key is None:
            return None
        return state.take(number, key, size)

    def _refill(self, number: int, size: int) -> int | None:
        """The ladder after a miss; returns the key of a free block that serves the request."""
        if self.config.gc_active:
            self.collect_garbage()
        if self._is_preempted(size):
            self.num_oom_rejections += 1
            return None
        key = self._grow(number, size)
        if key is None and self._release_oversize(number, size):
            key = self._grow(number, size)
        if key is None:
            self.flush()
            self.num_alloc_retries += 1
            key = self._grow(number, size)
        if key is None:
            self.num_ooms += 1
        return key

    def _is_preempted(self, size: int) -> bool:
        """``throw_on_cudamalloc_oom``: refused without asking the driver, and without reclaiming anything."""
        most = self.config.preempt_bytes
        if most is None:
            return False
        total, need = self.state.total_bytes, segment_size(size, self.config)
        return total + need > most and self.driver.admits(total, need)

    def _grow(self, number: int, size: int) -> int | None:
        """One attempt to get memory from the driver (``alloc_block``)."""
        state = self.state
        need = segment_size(size, self.config)
        if not self.driver.admits(state.total_bytes, need):
            return None
        if state.expands[number]:
            return _grow_expandable(state, self.driver, number, size)
        address = self.driver.place(number, need)
        if address is None:
            return None
        state.add_segment(number, address, need)
        state.insert(number, address, need)
        return need << SHIFT | address

    def _release_oversize(self, number: int, size: int) -> bool:
        """``release_available_cached_blocks``: True if enough was released for another attempt."""
        limit = self.config.max_split_bytes
        if limit is None:
            return False
        state = self.state
        free = state.lists[number]
        wanted = max(size, limit)
        position = bisect_left(free, wanted << SHIFT)
        if position < len(free):
            self._release_segment(number, free[position])
            return True
        released = 0
        position = len(free) - 1
        while position >= 0 and released < wanted and free[position] >> SHIFT >= limit:
            key = free[position]
            if self._release_segment(number, key):
                released += key >> SHIFT
            position -= 1
        return released >= wanted

    def _release_segment(self, number: int, key: int) -> bool:
        """Release one free block if it is a whole ordinary segment."""
        if not self.state.is_whole(key):
            return False
        address, size = self.state.drop_segment(number, key)
        self.driver.segment_freed(number, address, size)
        return True

    def flush(self) -> None:
        """``release_cached_blocks``, also what ``empty_cache()`` does."""
        self.num_flushes += 1
        state = self.state
        self.driver.complete_pending(state)
        numbers = range(len(state.ids))
        pools = {state.ids[n].pool for n in numbers}
        for pool in sorted(pools):
            if pool and not self.driver.may_release(state, pool):
                continue
            # The default pool gives large blocks back first, private pools small ones.
            for small in (True, False) if pool else (False, True):
                mine = [n for n in numbers if state.ids[n].pool == pool and state.ids[n].small == small]
                self._release_pool(sorted(mine, key=lambda n: state.ids[n].stream))

    def _release_pool(self, numbers: list[int]) -> None:
        state = self.state
        expandable: list[tuple[int, int]] = []
        for number in numbers:
            for key in tuple(state.lists[number]):
                if not self._release_segment(number, key) and number in state.reservations:
                    expandable.append((number, key))
        for number, key in expandable:
            _shrink(state, self.driver, number, key)

    def collect_garbage(self) -> None:
        """Release old cached segments of the default large pool while the driver says that the threshold is passed."""
        state = self.state
        now = state.searches.get((0, False), 0)
        mine = [n for n, name in enumerate(state.ids) if name.pool == 0 and not name.small]
        mine.sort(key=lambda n: state.ids[n].stream)
        candidates = [
            (n, key, now - state.born.get(key & MASK, 0)) for n in mine for key in state.lists[n] if state.is_whole(key)
        ]
        total_age = sum(age for _, _, age in candidates)
        while candidates:
            average = total_age / len(candidates)
            victims = [entry for entry in candidates if entry[2] >= average]
            if not victims or not self.driver.wants_garbage(state.total_bytes, [key & MASK for _, key, _ in victims]):
                return
            for number, key, age in victims:
                total_age -= age
                self._release_segment(number, key)
            candidates = [entry for entry in candidates if entry[2] < average]


def _grow_expandable(state: AllocatorState, driver: Driver, number: int, size: int) -> int | None:
    """``try_allocate_expandable_block``: key of a free block of at least ``size`` bytes, None if the driver refuses.

    What was mapped before a refusal stays cached, as in PyTorch.
    """
    start = _candidate(state, number, size)
    if start is None:
        base, length = driver.reserve(state, number, size)
        if length < size:
            return None
        state.add_reservation(number, base, length)
        start = base
    if start not in state.free_at:  # the candidate itself is unmapped
        mapped = _map(state, driver, number, start, min(state.unmapped_at[start], size))
        if mapped is None:
            return None
        start = mapped
    while True:
        have = state.free_at[start]
        if have >= size:
            return have << SHIFT | start
        hole = start + have
        mapped = _map(state, driver, number, hole, min(size - have, state.unmapped_at[hole]))
        if mapped is None:
            return None
        start = mapped


def _candidate(state: AllocatorState, number: int, size: int) -> int | None:
    """Start of the first run of free and unmapped blocks that is large enough; None if a reservation is needed."""
    for hole in state.unmapped.get(number, ()):
        before = None if hole in state.bounds else state.free_end.get(hole)
        start = hole if before is None else before
        have, position = 0, start
        while have < size:
            if position != start and position in state.bounds:
                break
            length = state.free_at.get(position) or state.unmapped_at.get(position, 0)
            if not length:
                break
            have += length
            position += length
        if have >= size:
            return start
    return None


def _map(state: AllocatorState, driver: Driver, number: int, address: int, size: int) -> int | None:
    """Map pages from the start of an unmapped block; returns the start of the free block they ended up in."""
    page = state.page_bytes(number)
    length = state.unmapped_at[address]
    mapped = min(-(-size // page) * page, length)
    if not driver.map(number, address, mapped):
        return None
    state.cut_unmapped(number, address)
    if mapped < length:
        state.add_unmapped(number, address + mapped, length - mapped)
    state.grew(number, mapped)
    before = None if address in state.bounds else state.free_end.get(address)
    state.release(number, address, mapped)
    return address if before is None else before


def _shrink(state: AllocatorState, driver: Driver, number: int, key: int) -> None:
    """Unmap the whole pages inside a free expandable block; partial pages at its edges stay free blocks."""
    address, size = key & MASK, key >> SHIFT
    reservation = state.reservation_of(number, address)
    if reservation is None:
        return
    page, base = reservation.page_bytes, reservation.base
    low = base + -(-(address - base) // page) * page
    high = base + (address + size - base) // page * page
    if low >= high:
        return
    state.remove(number, key)
    if address < low:
        state.insert(number, address, low - address)
    if high < address + size:
        state.insert(number, high, address + size - high)
    start = state.add_unmapped(number, low, high - low)
    state.grew(number, low - high)
    driver.unmapped(number, low, high - low)
    if start == base and state.unmapped_at[start] == reservation.length:
        state.drop_reservation(number, reservation)
