"""The counters behind ``torch.cuda.memory_stats``: current, peak, allocated and freed, in all and by pool size.

They are how the model is held against real processes; nothing in memtrace asks for them.
"""

from __future__ import annotations

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_sizes
from memtrace.allocator.state import AllocatorState
from memtrace.allocator.whatif.program import Op
from memtrace.allocator.whatif.whatif import Simulation

_ALL, _SMALL, _LARGE = "all", "small_pool", "large_pool"


class Stat:
    """One counter of one column."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """Increase or decrease as PyTorch does: an increase counts as allocated, a decrease as freed."""
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount


class Family:
    """One counter in its three columns."""

    __slots__ = ("large", "name", "small", "total")

    def __init__(self, name: str) -> None:
        self.name = name
        self.total, self.small, self.large = Stat(), Stat(), Stat()

    def change(self, small: bool, amount: int) -> None:
        """Change the ``all`` column and the one of the pool."""
        if amount:
            self.total.change(amount)
            (self.small if small else self.large).change(amount)


class Counters:
    """All families. Sizes in bytes; see PyTorch's documentation of ``memory_stats`` for their meaning."""

    def __init__(self) -> None:
        self.allocation, self.segment = Family("allocation"), Family("segment")
        self.active, self.inactive_split = Family("active"), Family("inactive_split")
        self.allocated_bytes, self.reserved_bytes = Family("allocated_bytes"), Family("reserved_bytes")
        self.active_bytes, self.requested_bytes = Family("active_bytes"), Family("requested_bytes")
        self.inactive_split_bytes = Family("inactive_split_bytes")
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.num_device_alloc = self.num_device_free = 0
        self._split_count = self._split_bytes = 0  # of the move under way, applied as one change

    def split_block(self, size: int) -> None:
        """A free block with neighbours appeared (positive size) or vanished (negative)."""
        self._split_count += 1 if size > 0 else -1
        self._split_bytes += size

    def settle(self, small: bool) -> None:
        """End of a move: its net effect on split free blocks counts as one increase or decrease."""
        self.inactive_split.change(small, self._split_count)
        self.inactive_split_bytes.change(small, self._split_bytes)
        self._split_count = self._split_bytes = 0

    def allocated(self, small: bool, block: int, requested: int, oversize: bool) -> None:
        """A block was handed out."""
        self.allocation.change(small, 1)
        self.allocated_bytes.change(small, block)
        self.active.change(small, 1)
        self.active_bytes.change(small, block)
        self.requested_bytes.change(small, requested)
        if oversize:
            self.oversize_allocations.change(1)

    def free_requested(self, small: bool, block: int, oversize: bool) -> None:
        """The owner gave a block up."""
        self.allocation.change(small, -1)
        self.allocated_bytes.change(small, -block)
        if oversize:
            self.oversize_allocations.change(-1)

    def free_completed(self, small: bool, block: int, requested: int) -> None:
        """The allocator took a block back."""
        self.active.change(small, -1)
        self.active_bytes.change(small, -block)
        self.requested_bytes.change(small, -requested)

    def segment_changed(self, small: bool, count: int, oversize: bool) -> None:
        """A segment came (1) or went (-1)."""
        self.segment.change(small, count)
        if oversize:
            self.oversize_segments.change(count)

    def pages_changed(self, small: bool, size: int) -> None:
        """Reserved memory grew or shrank by one driver call."""
        self.reserved_bytes.change(small, size)
        if size > 0:
            self.num_device_alloc += 1
        else:
            self.num_device_free += 1

    def table(self) -> dict[str, int]:
        """Flat, with the names of ``torch.cuda.memory_stats``."""
        result: dict[str, int] = {}
        for family in (
            self.allocation, self.segment, self.active, self.inactive_split, self.allocated_bytes, self.reserved_bytes,
            self.active_bytes, self.requested_bytes, self.inactive_split_bytes,
        ):  # fmt: skip
            for column, stat in ((_ALL, family.total), (_SMALL, family.small), (_LARGE, family.large)):
                for what in ("current", "peak", "allocated", "freed"):
                    result[f"{family.name}.{column}.{what}"] = getattr(stat, what)
        for name, stat in (
            ("oversize_allocations", self.oversize_allocations),
            ("oversize_segments", self.oversize_segments),
        ):
            for what in ("current", "peak", "allocated", "freed"):
                result[f"{name}.{what}"] = getattr(stat, what)
        result["num_device_alloc"] = self.num_device_alloc
        result["num_device_free"] = self.num_device_free
        return result


class CountingState(AllocatorState):
    """A state that counts what PyTorch counts of segments and free blocks; allocations are counted from outside."""

    def __init__(self, config: AllocatorConfig) -> None:
        super().__init__(config)
        self.counters = Counters()

    def is_oversize(self, size: int) -> bool:
        limit = self.config.max_split_bytes
        return limit is not None and size >= limit

    def _is_split(self, number: int, address: int, size: int) -> bool:
        """Whether a free block counts as an inactive split: ordinary, and not alone in its segment."""
        return self.whole.get(address) != size and self.reservation_of(number, address) is None

    def insert(self, number: int, address: int, size: int) -> None:
        super().insert(number, address, size)
        if self._is_split(number, address, size):
            self.counters.split_block(size)

    def remove(self, number: int, key: int) -> tuple[int, int]:
        address, size = super().remove(number, key)
        if self._is_split(number, address, size):
            self.counters.split_block(-size)
        return address, size

    def release(self, number: int, address: int, size: int) -> None:
        super().release(number, address, size)
        self.counters.settle(self.ids[number].small)

    def take(self, number: int, key: int, size: int) -> tuple[int, int]:
        taken = super().take(number, key, size)
        self.counters.settle(self.ids[number].small)
        return taken

    def grew(self, number: int, size: int) -> None:
        super().grew(number, size)
        self.counters.pages_changed(self.ids[number].small, size)

    def add_segment(self, number: int, address: int, size: int) -> None:
        super().add_segment(number, address, size)
        self.counters.segment_changed(self.ids[number].small, 1, self.is_oversize(size))

    def drop_segment(self, number: int, key: int) -> tuple[int, int]:
        address, size = super().drop_segment(number, key)
        self.counters.segment_changed(self.ids[number].small, -1, self.is_oversize(size))
        return address, size


def statistics_of(run: Simulation) -> dict[str, int]:
    """PyTorch's ``memory_stats`` of a run that was simulated in a :class:`CountingState`."""
    state, program = run.state, run.program
    assert isinstance(state, CountingState)
    counters, beginning = state.counters, program.evidence.beginning
    small = [name.small for name in state.ids]
    list_of = {handle: state.list_of(int(program.pool[handle]), bool(is_small), int(program.stream[handle]))
               for handle, is_small in enumerate(_small(run))}  # fmt: skip
    flushed: dict[int, list[int]] = {}
    for event, handle in run.completed_by_flush:
        flushed.setdefault(event, []).append(handle)
    done_by_flush = {handle for _, handle in run.completed_by_flush}

    def allocated(handle: int) -> None:
        block, asked = int(run.block_bytes[handle]), int(program.requested_bytes[handle])
        counters.allocated(small[list_of[handle]], block, asked, state.is_oversize(block))

    def requested(handle: int) -> None:
        block = int(run.block_bytes[handle])
        counters.free_requested(small[list_of[handle]], block, state.is_oversize(block))

    def completed(handle: int) -> None:
        block, asked = int(run.block_bytes[handle]), int(program.requested_bytes[handle])
        counters.free_completed(small[list_of[handle]], block, asked)

    for handle, pending in enumerate(beginning.pending.tolist()):
        if not program.absent[handle]:
            allocated(handle)
            if pending:
                requested(handle)
    last = run.executed
    for op, handle, event in zip(
        program.op[:last].tolist(), program.handle[:last].tolist(), program.event[:last].tolist(), strict=True
    ):
        if op in (Op.MALLOC, Op.FLUSH, Op.REFUSE):
            for waiting in flushed.pop(event, ()):
                completed(waiting)
        if op == Op.MALLOC:
            allocated(handle)
        elif op in (Op.FREE, Op.DEFER):
            requested(handle)
        if op == Op.FREE or (op == Op.COMPLETE and handle not in done_by_flush):
            completed(handle)
    table = counters.table()
    limit = run.config.max_split_bytes
    return table | {
        "num_alloc_retries": run.num_alloc_retries,
        "num_ooms": len(run.refused),
        "num_sync_all_streams": run.num_flushes,
        "max_split_size": -1 if limit is None else limit,
    }


def _small(run: Simulation) -> list[bool]:
    """Which allocations are of the small pool."""
    small = round_sizes(run.program.requested_bytes, run.config) <= SMALL_LIMIT_BYTES
    if run.keeps_layout:
        small[: run.program.initial] = run.program.evidence.small[: run.program.initial]
    return list(small.tolist())
