"""A caching allocator to drive by hand in tests: requests in MiB or bytes, every driver call logged."""

from __future__ import annotations

import numpy as np
from allocator_counters import CountingState

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.whatif.addresses import AddressSpace, Hints, Policy
from memtrace.allocator.whatif.whatif import World
from memtrace.snapshot.model import Action

MIB = 1 << 20
NAMES = {
    Action.SEGMENT_ALLOC: "alloc",
    Action.SEGMENT_FREE: "free",
    Action.SEGMENT_MAP: "map",
    Action.SEGMENT_UNMAP: "unmap",
}


class Machine:
    """Blocks are named by the number ``alloc`` returns; None means out of memory."""

    def __init__(self, config: AllocatorConfig | None = None, policy: Policy = Policy.RISING, pools: int = 1) -> None:
        self.config = config or AllocatorConfig()
        self.state = CountingState(self.config)
        self.counters = self.state.counters
        self.last_use = np.full(pools, 1 << 60)
        space = AddressSpace(policy, Hints({}, {}), [])
        self.world = World(self.config, space, self._completed, self.last_use)
        self.allocator = Allocator(self.config, self.world, self.state)
        self.live: dict[int, tuple[int, int, int, int]] = {}  # name -> list, address, block, requested
        self.pending: dict[int, tuple[int, int, int, int]] = {}
        self._next = 0
        self._seen = 0

    def alloc(self, size: float, stream: int = 0, pool: int = 0, unit: int = MIB) -> int | None:
        requested = round(size * unit)
        rounded = round_size(requested, self.config)
        number = self.state.list_of(pool, rounded <= SMALL_LIMIT_BYTES, stream)
        served = self.allocator.malloc(number, rounded)
        if served is None:
            return None
        name = self._next
        self._next += 1
        self.live[name] = (number, *served, requested)
        self.counters.allocated(self.state.ids[number].small, served[1], requested, self.state.is_oversize(served[1]))
        return name

    def free(self, name: int) -> None:
        self.defer(name)
        del self.world.pending[name]
        self._completed(name)

    def defer(self, name: int) -> None:
        number, _, size, _ = self.pending[name] = self.live.pop(name)
        self.world.pending[name] = None
        self.counters.free_requested(self.state.ids[number].small, size, self.state.is_oversize(size))

    def complete(self, name: int) -> None:
        if name in self.world.pending:
            del self.world.pending[name]
            self._completed(name)

    def _completed(self, name: int) -> None:
        number, address, size, requested = self.pending.pop(name)
        self.state.release(number, address, size)
        self.counters.free_completed(self.state.ids[number].small, size, requested)

    def empty_cache(self) -> None:
        self.allocator.flush()

    # Questions -------------------------------------------------------------------------------------------

    def events(self) -> list[tuple[str, float]]:
        """Driver calls since the last question: (kind, MiB)."""
        new = self.world.log[self._seen :]
        self._seen = len(self.world.log)
        return [(NAMES[Action(kind)], size / MIB) for _, kind, _, size, _ in new]

    @property
    def reserved(self) -> float:
        return self.state.total_bytes / MIB

    @property
    def allocated(self) -> int:
        return sum(size for _, _, size, _ in self.live.values())

    @property
    def retries(self) -> int:
        return self.allocator.num_alloc_retries

    def address(self, name: int) -> int:
        return self.live[name][1]

    def block(self, name: int) -> int:
        return self.live[name][2]

    def free_blocks(self) -> list[tuple[int, int]]:
        """(address, size) of every free block, by address."""
        return sorted(self.state.free_at.items())
