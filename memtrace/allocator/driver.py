"""What the allocator needs of the world around it; a recording, a what-if and a prediction each have their own."""

from __future__ import annotations

from typing import Protocol

from memtrace.allocator.state import AllocatorState


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
