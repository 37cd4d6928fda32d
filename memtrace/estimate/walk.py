"""Cells through the allocator model, one after the other: nothing of a cell is kept but what outlives it."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.flat import Numbers, Requests, request_kind, run, run_complete
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size, segment_size
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.state import SHIFT
from memtrace.estimate.cells import Name, Sized
from memtrace.estimate.estimate import PHASE_OF_MARK
from memtrace.estimate.placement import DriverModel
from memtrace.snapshot.model import I8


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
    """The request that the limit refused, and what the allocator held then. ``tensor_bytes`` were asked for;
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


_PASSES = ("backward", "optimizer")  # marks at which another pass begins


class ForecastRefused(Exception):
    """A cell ends here."""

    def __init__(self, refusal: ForecastRefusal, peaks: Peaks) -> None:
        super().__init__("out of memory")
        self.refusal = refusal
        self.peaks = peaks


class _Missed(Exception):
    """No memory for allocation ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Walk:
    """An allocator under ``config``, and what cells left alive in it."""

    def __init__(self, config: AllocatorConfig) -> None:
        self.config = config
        self.driver = DriverModel(config)
        self.allocator = Allocator(config, self.driver)
        state = self.allocator.state
        self._small, self._large = state.list_of(0, True, 0), state.list_of(0, False, 0)
        self._kinds: dict[int, tuple[int, int, int, int]] = {}
        self._alive: dict[Name, tuple[int, int, int]] = {}  # address, block bytes, requested bytes
        self.live_bytes = self.allocated_bytes = 0
        self._run = run_complete if config.gc_active else run

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds."""
        return self.allocator.state.total_bytes

    def cell(self, sized: Sized) -> Peaks:
        """Run one cell. Raises ForecastRefused where the limit is reached."""
        cell, sizes = sized
        taken = [self._alive.pop(name) for name in cell.taken]
        bytes_of = (*sizes, *(entry[2] for entry in taken))
        requests = Requests(np.array([self._kind(size) for size in bytes_of], dtype=np.int64), cell.row_of)
        address = array("q", bytes(8 * len(cell.kinds)))
        blocks = array("q", address)
        address.extend(entry[0] for entry in taken)
        blocks.extend(entry[1] for entry in taken)
        state = self.allocator.state
        state.peak_bytes = state.total_bytes

        def miss(number: int, free_list: int, size: int) -> None:
            served = self.allocator.malloc(free_list, size, searched=True)
            if served is None:
                raise _Missed(number)
            address[number], blocks[number] = served

        kind_bytes = np.array([*bytes_of, 0], dtype=np.int64)
        try:
            self._run(state, cell.ops, requests, address, blocks, miss, lambda _: self.allocator.flush())
        except _Missed as missed:
            raise self._refused(sized, missed.number, kind_bytes, blocks) from None
        peaks = self._peaks(sized, kind_bytes, blocks, len(cell.events))
        for number, name in cell.left:
            self._alive[name] = address[number], blocks[number], sizes[cell.kinds[number]]
        return peaks

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

    def _refused(self, sized: Sized, number: int, kind_bytes: I8, blocks: Numbers) -> ForecastRefused:
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
        return ForecastRefused(
            ForecastRefusal(
                event=event,
                phase=PHASE_OF_MARK.get(names[place], names[place]),
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
            ),
            peaks,
        )
