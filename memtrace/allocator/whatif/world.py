"""The driver of a what-if simulation: a limit, made-up addresses, and delayed frees that a flush completes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.state import State
from memtrace.allocator.whatif.addresses import AddressSpace
from memtrace.snapshot.model import I8, Action


class World:
    """Implements :class:`memtrace.allocator.simulator.Driver`. ``event`` is the step under way.

    ``log`` collects every segment event as (event, action, address, size, free list). ``pending`` holds delayed frees.
    """

    def __init__(
        self,
        config: AllocatorConfig,
        space: AddressSpace,
        complete: Callable[[int], None],
        last_use: I8,
    ) -> None:
        self.config = config
        self.space = space
        self.event = -1
        self.log: list[tuple[int, int, int, int, int]] = []
        self.pending: dict[int, None] = {}
        self.completed_by_flush: list[tuple[int, int]] = []  # (event, handle)
        self._complete = complete
        self._last_use = last_use
        limit = config.limit_bytes
        self._threshold = int(config.gc_threshold * limit) if limit is not None else 0

    def admits(self, total_bytes: int, segment_bytes: int) -> bool:
        limit = self.config.limit_bytes
        return limit is None or total_bytes + segment_bytes <= limit

    def wants_garbage(self, total_bytes: int, victims: list[int]) -> bool:
        return total_bytes > self._threshold

    def place(self, number: int, size: int) -> int | None:
        address = self.space.place(size, self.event)
        self.log.append((self.event, int(Action.SEGMENT_ALLOC), address, size, number))
        return address

    def reserve(self, state: State, number: int, size: int) -> tuple[int, int]:
        length = self.config.reservation_bytes
        page = 2 << 20 if size <= 1 << 20 else self.config.large_segment_bytes
        length = -(-length // page) * page
        recorded = self.space.recorded_base(self.event)
        if recorded is not None:
            room = state.make_room(recorded, length)
            if room >= size:
                return recorded, room
        return self.space.reserve(length), length

    def map(self, number: int, address: int, size: int) -> bool:
        self.log.append((self.event, int(Action.SEGMENT_MAP), address, size, number))
        return True

    def segment_freed(self, number: int, address: int, size: int) -> None:
        self.space.give_back(address)
        self.log.append((self.event, int(Action.SEGMENT_FREE), address, size, number))

    def unmapped(self, number: int, address: int, size: int) -> None:
        self.log.append((self.event, int(Action.SEGMENT_UNMAP), address, size, number))

    def complete_pending(self, state: State) -> None:
        waiting, self.pending = self.pending, {}
        for handle in waiting:
            self.completed_by_flush.append((self.event, handle))
            self._complete(handle)

    def may_release(self, state: State, pool: int) -> bool:
        """A private pool is taken to be given up once nothing lives in it and nothing will ask for it again."""
        return bool(self._last_use[pool] < self.event) and state.is_idle(pool)

    def segment_events(self) -> I8:
        """The log as an array of rows (event, action, address, size, free list)."""
        return np.array(self.log, dtype=np.int64).reshape(-1, 5)
