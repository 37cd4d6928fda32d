"""What the allocator does when the free lists don't serve a request: collect garbage, grow, reclaim, give up.

The order of the steps is PyTorch's ``malloc``. The driver (see :class:`Driver`) decides what the world
outside the allocator does: addresses, refusals, and which delayed frees have completed.
"""

from __future__ import annotations

from bisect import bisect_left

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.driver import Driver
from memtrace.allocator.expandable import grow, shrink
from memtrace.allocator.rounding import segment_size
from memtrace.allocator.state import MASK, SHIFT, AllocatorState


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
            return grow(state, self.driver, number, size)
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
            shrink(state, self.driver, number, key)

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
