"""Run a program under any settings: would it have fit, and with how much to spare?"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from memtrace.allocator import flat
from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.flat import tabulate
from memtrace.allocator.replay.initial import fill
from memtrace.allocator.replay.segments import owned
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size, round_sizes
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.state import AllocatorState
from memtrace.allocator.whatif.addresses import AddressSpace, CardDriver, Policy
from memtrace.allocator.whatif.program import Op, Program
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I8

_CHUNK = 1 << 15


@dataclass(frozen=True, slots=True)
class SimulatedRefusal:
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
    segment_allocs: int  # calls to the driver that get memory: cudaMalloc, or mapping pages
    segment_frees: int
    refused: tuple[SimulatedRefusal, ...]
    stopped_at: int | None
    spared: tuple[Spared, ...]
    segment_events: I8
    address: I8
    block_bytes: I8
    executed: int
    pending: tuple[int, ...]  # handles whose delayed free is not done
    completed_by_flush: tuple[tuple[int, int], ...]  # (event, handle) of delayed frees that a flush completed
    keeps_layout: bool  # the run began with the recorded layout, not with blocks put in afresh
    state: AllocatorState

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
        made[: self.program.initial] &= ~self.program.evidence.beginning.pending
        return np.flatnonzero(made)


class World(CardDriver):
    """The driver under a recorded program. ``pending`` holds delayed frees."""

    def __init__(
        self, config: AllocatorConfig, space: AddressSpace, complete: Callable[[int], None], last_use: I8
    ) -> None:
        super().__init__(config, space)
        self.event = -1
        self.pending: dict[int, None] = {}
        self.completed_by_flush: list[tuple[int, int]] = []  # (event, handle)
        self._complete = complete
        self._last_use = last_use

    def complete_pending(self, state: AllocatorState) -> None:
        waiting, self.pending = self.pending, {}
        for handle in waiting:
            self.completed_by_flush.append((self.event, handle))
            self._complete(handle)

    def may_release(self, state: AllocatorState, pool: int) -> bool:
        """A private pool is taken to be given up once nothing lives in it and nothing will ask for it again."""
        return bool(self._last_use[pool] < self.event) and state.is_idle(pool)


class _OutOfMemory(Exception):
    """The simulated run ends: a request was refused that the recorded run was granted."""


def simulate(
    program: Program,
    config: AllocatorConfig,
    policy: Policy = Policy.RECORDED,
    *,
    until: int | None = None,
    state: AllocatorState | None = None,
) -> Simulation:
    """Run ``program`` under ``config``. ``until`` stops after that event; ``state`` is an empty one to use.

    Before the first event the allocator holds what the recording found there: in the recorded layout where the
    settings place blocks as the recorded ones do, else put in afresh in order of address.
    """
    run = _Run(program, config, policy, state)
    try:
        return run.go(until)
    finally:
        vars(run).clear()  # it and its world refer to each other, and the collector would come late


class _Run:
    def __init__(self, program: Program, config: AllocatorConfig, policy: Policy, state: AllocatorState | None) -> None:
        self.program, self.config, self.policy = program, config, policy
        evidence = program.evidence
        first = slice(0, program.initial)
        untouched = np.array_equal(program.requested_bytes[first], evidence.requested[first])
        sound = not evidence.history.contradictions and not evidence.beginning.contradictions
        self.keeps_layout = untouched and sound and config.places_like(evidence.config)
        occupied = evidence.history.initial.address.tolist() if self.keeps_layout else []
        self.space = AddressSpace(policy, program.hints, occupied)
        self.world = World(config, self.space, self._completed, program.last_use)
        self.allocator = Allocator(config, self.world, state)
        self.state = self.allocator.state
        self.address_of = array("q", [-1]) * len(program.requested_bytes)
        self.size_of = array("q", [0]) * len(program.requested_bytes)
        self.refused: list[SimulatedRefusal] = []
        self.spared: list[Spared] = []
        sizes, _, which = program.sizes
        rounded = round_sizes(sizes, config)[which]
        small = rounded <= SMALL_LIMIT_BYTES
        if self.keeps_layout:
            small[first] = evidence.small[first]
        self.requests = tabulate(self.state, config, rounded, small, program.pool, program.stream)

    # The beginning ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make the state before the first event."""
        program, evidence = self.program, self.program.evidence
        beginning = evidence.beginning
        if self.keeps_layout:
            fill(self.state, evidence.history, beginning, evidence.life.address)
            for address, size, owner in owned(evidence.history.initial):
                if owner.segment is not None:
                    self.space.occupy(address, size)
        rows = zip(
            evidence.life.address[: program.initial].tolist(), beginning.block_bytes.tolist(),
            beginning.pending.tolist(), strict=True,
        )  # fmt: skip
        for handle, (address, size, pending) in enumerate(rows):
            number, rounded_bytes = self.requests.of(handle)
            if self.keeps_layout:
                self.address_of[handle], self.size_of[handle] = address, size
                if program.absent[handle]:
                    self.state.release(number, address, size)
                    continue
            elif program.absent[handle]:
                continue
            else:
                served = self.allocator.malloc(number, rounded_bytes)
                if served is None:
                    self._refuse(-1, rounded_bytes, recorded=False)
                    raise _OutOfMemory
                self.address_of[handle], self.size_of[handle] = served
            if pending:
                self.world.pending[handle] = None

    # Steps -----------------------------------------------------------------------------------------------

    def _refuse(self, event: int, size: int, recorded: bool) -> None:
        self.refused.append(SimulatedRefusal(event, size, self.state.total_bytes, recorded))

    def _miss(self, handle: int, number: int, size: int) -> None:
        self.world.event = int(self.program.evidence.life.alloc_event[handle])
        served = self.allocator.malloc(number, size, searched=True)
        if served is None:
            self._refuse(self.world.event, size, recorded=False)
            raise _OutOfMemory
        self.address_of[handle], self.size_of[handle] = served

    def _step(self, index: int) -> None:
        program = self.program
        code, handle = int(program.op[index]), int(program.handle[index])
        self.world.event = int(program.event[index])
        if code == Op.DEFER:
            self.world.pending[handle] = None
        elif code == Op.COMPLETE:
            if handle in self.world.pending:  # else a flush completed it already
                del self.world.pending[handle]
                self._completed(handle)
        elif code == Op.FLUSH:
            self.allocator.flush()
        else:
            self._ask_again(index, handle)

    def _ask_again(self, index: int, row: int) -> None:
        """A request that the recorded run was refused. If it is served here, it is freed at once: its lifetime is
        not recorded, and what the program did next was its reaction to the refusal."""
        refusal = self.program.refusals[row]
        size = round_size(max(refusal.size_bytes - self.config.padding_bytes, 0), self.config)
        number = self.state.list_of(refusal.pool, size <= SMALL_LIMIT_BYTES, refusal.stream)
        served = self.allocator.malloc(number, size)
        if served is None:
            self._refuse(refusal.event, size, recorded=True)
            return
        self.spared.append(Spared(refusal.event, index, *served))
        self.state.release(number, *served)

    def _completed(self, handle: int) -> None:
        self.state.release(self.requests.of(handle)[0], self.address_of[handle], self.size_of[handle])

    # The run ---------------------------------------------------------------------------------------------

    def go(self, until: int | None) -> Simulation:
        program = self.program
        last = len(program.op) if until is None else int(np.searchsorted(program.event, until, side="right"))
        stopped_at: int | None = None
        executed = last
        try:
            self._begin()
            for low in range(0, last, _CHUNK):
                ops = self._operations(low, min(low + _CHUNK, last))
                flat.run(self.state, ops, self.requests, self.address_of, self.size_of, self._miss, self._step)
        except _OutOfMemory:
            stopped_at = self.refused[-1].event
            executed = self._operation_of(stopped_at)
        return self._result(executed, stopped_at)

    def _operations(self, low: int, high: int) -> I8:
        """Operations ``low`` to ``high`` as :mod:`memtrace.allocator.flat` reads them, a chunk at a time."""
        code, handle = self.program.op[low:high], self.program.handle[low:high]
        ops = np.where(code == Op.FREE, ~handle, handle)
        rare = code > Op.FREE
        ops[rare] = len(self.requests.row_of) + low + np.flatnonzero(rare)
        return ops

    def _operation_of(self, event: int) -> int:
        """Index of the malloc at an event (0 for the state before the first)."""
        found = np.flatnonzero((self.program.event == event) & (self.program.op == Op.MALLOC))
        return int(found[0]) if len(found) else 0

    def _result(self, executed: int, stopped_at: int | None) -> Simulation:
        program = self.program
        sizes, addresses = np.frombuffer(self.size_of, dtype=np.int64), np.frombuffer(self.address_of, dtype=np.int64)
        code, handle = program.op[:executed], program.handle[:executed]
        change = np.zeros(executed, dtype=np.int64)
        mallocs = code == Op.MALLOC
        change[mallocs] = sizes[handle[mallocs]]
        frees = (code == Op.FREE) | (code == Op.DEFER)
        change[frees] = -sizes[handle[frees]]
        first = slice(0, program.initial)
        start = int(sizes[first][~program.evidence.beginning.pending & ~program.absent[first]].sum())
        curve = start + np.cumsum(change)
        peak = max(start, int(curve.max()) if executed else 0)
        for spared in self.spared:
            if spared.operation < executed:
                peak = max(peak, int(curve[spared.operation]) + spared.block_bytes)
        return Simulation(
            config=self.config,
            policy=self.policy,
            program=program,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=self.state.peak_bytes,
            end_reserved_bytes=self.state.total_bytes,
            end_allocated_bytes=int(curve[-1]) if executed else start,
            num_alloc_retries=self.allocator.num_alloc_retries,
            num_flushes=self.allocator.num_flushes,
            segment_allocs=self.world.segment_allocs,
            segment_frees=self.world.segment_frees,
            refused=tuple(self.refused),
            stopped_at=stopped_at,
            spared=tuple(self.spared),
            segment_events=np.array(self.world.log, dtype=np.int64).reshape(-1, 5),
            address=addresses,
            block_bytes=sizes,
            executed=executed,
            pending=tuple(self.world.pending),
            completed_by_flush=tuple(self.world.completed_by_flush),
            keeps_layout=self.keeps_layout,
            state=self.state,
        )
