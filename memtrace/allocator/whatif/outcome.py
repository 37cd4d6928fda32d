"""What a simulated run came to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.counters import Counters
from memtrace.allocator.state import State
from memtrace.allocator.whatif.addresses import Policy
from memtrace.allocator.whatif.program import Op, Program
from memtrace.snapshot.model import I8, Action


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that the simulated allocator could not serve: its rounded size, and what was held at that moment."""

    event: int
    size_bytes: int
    reserved_bytes: int
    recorded: bool  # whether the recorded run was refused here too


@dataclass(frozen=True, slots=True)
class Spared:
    """A request that the recorded run was refused and this one granted, for a block that is freed at once."""

    event: int
    operation: int  # index in the program
    address: int
    block_bytes: int


@dataclass(frozen=True)
class Simulation:
    """Outcome of one program under one set of settings; sizes in bytes, events of the recorded trace.

    ``refused`` lists requests that failed; the run stops at the first that the recorded run was granted
    (``stopped_at``), since a program rarely survives that. ``segment_events`` has rows (event, action, address, size,
    free list). ``address`` and ``block_bytes`` are by handle, -1 and 0 where never made. ``spared`` lists requests
    that the recorded run was refused and this one was not. ``peak_allocated_bytes`` counts blocks, as
    ``max_memory_allocated`` does.
    """

    config: AllocatorConfig
    policy: Policy
    program: Program
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_reserved_bytes: int
    end_allocated_bytes: int
    num_alloc_retries: int
    num_flushes: int
    refused: tuple[Refused, ...]
    stopped_at: int | None
    spared: tuple[Spared, ...]
    segment_events: I8
    address: I8
    block_bytes: I8
    allocated_bytes: I8  # after each executed operation
    executed: int
    pending: tuple[int, ...]  # handles whose delayed free is not done
    completed_by_flush: tuple[tuple[int, int], ...]  # (event, handle) of delayed frees that a flush completed
    keeps_layout: bool  # the run began with the recorded layout, not with blocks put in afresh
    counters: Counters | None
    state: State

    @property
    def fits(self) -> bool:
        """Whether no request failed."""
        return not self.refused

    @property
    def first_oom_event(self) -> int | None:
        """Event of the first failed request."""
        return self.refused[0].event if self.refused else None

    def live(self) -> I8:
        """Handles held by the program at the end of the run (those whose free is pending not included)."""
        made = self.address >= 0
        code, handle = self.program.op[: self.executed], self.program.handle[: self.executed]
        made[handle[(code == Op.FREE) | (code == Op.DEFER)]] = False
        made[: self.program.initial] &= ~self.program.absent[: self.program.initial]
        made[list(self.pending)] = False
        beginning = self.program.evidence.beginning
        made[beginning.handle[beginning.blocks.pending]] = False
        return np.flatnonzero(made)

    @cached_property
    def segment_allocs(self) -> int:
        """Driver calls that get memory (cudaMalloc, or mapping pages)."""
        kinds = self.segment_events[:, 1]
        return int(((kinds == Action.SEGMENT_ALLOC) | (kinds == Action.SEGMENT_MAP)).sum())

    @cached_property
    def segment_frees(self) -> int:
        """Driver calls that give memory back."""
        return len(self.segment_events) - self.segment_allocs

    def reserved_curve(self) -> tuple[I8, I8]:
        """(events, reserved bytes from that event on), one entry a change."""
        rows = self.segment_events
        sign = np.where((rows[:, 1] == Action.SEGMENT_ALLOC) | (rows[:, 1] == Action.SEGMENT_MAP), 1, -1)
        start = self.end_reserved_bytes - int((sign * rows[:, 3]).sum())
        return rows[:, 0], start + np.cumsum(sign * rows[:, 3])

    def statistics(self) -> dict[str, int]:
        """PyTorch's ``memory_stats`` of the simulated run; empty unless simulated with counters."""
        if self.counters is None:
            return {}
        table = self.counters.table()
        table["num_alloc_retries"] = self.num_alloc_retries
        table["num_ooms"] = len(self.refused)
        table["num_sync_all_streams"] = self.num_flushes
        limit = self.config.max_split_bytes
        table["max_split_size"] = -1 if limit is None else limit
        return table
