"""The counters behind ``torch.cuda.memory_stats``: current, peak, allocated and freed, in all and by pool size."""

from __future__ import annotations

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

    def segment_changed(self, small: bool, size: int, oversize: bool) -> None:
        """cudaMalloc (positive size) or cudaFree (negative)."""
        self.segment.change(small, 1 if size > 0 else -1)
        if oversize:
            self.oversize_segments.change(1 if size > 0 else -1)
        self.pages_changed(small, size)

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
