"""Run a program under any settings: would it have fit, and with how much to spare?"""

from __future__ import annotations

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.counters import Counters
from memtrace.allocator.replay.initial import fill
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.whatif.addresses import AddressSpace, Hints, Policy
from memtrace.allocator.whatif.flat import Request, request, run, run_complete
from memtrace.allocator.whatif.outcome import Refused, Simulation, Spared
from memtrace.allocator.whatif.program import Op, Program
from memtrace.allocator.whatif.world import World
from memtrace.snapshot.model import I8, Action

__all__ = ["Refused", "Simulation", "Spared", "simulate"]
_CHUNK = 1 << 15


class _OutOfMemory(Exception):
    """The simulated run ends: a request was refused that the recorded run was granted."""


def simulate(
    program: Program,
    config: AllocatorConfig,
    policy: Policy = Policy.RECORDED,
    *,
    counters: bool = False,
    until: int | None = None,
) -> Simulation:
    """Run ``program`` under ``config``. ``until`` stops after that event; ``counters`` keeps all statistics.

    Before the first event the allocator holds what the recording found there: in the recorded layout where the
    settings place blocks as the recorded ones do, else put in afresh in order of address.
    """
    return _Run(program, config, policy, counters).go(until)


def _hints(program: Program) -> Hints:
    """Addresses that recorded mallocs got from the driver, by their ``alloc`` event."""
    trace = program.evidence.device.trace
    rows = np.flatnonzero((trace.action == Action.SEGMENT_ALLOC) | (trace.action == Action.SEGMENT_MAP))
    mallocs = np.flatnonzero((trace.action == Action.ALLOC) | (trace.action == Action.OOM))
    place = np.searchsorted(mallocs, rows)
    segments: dict[int, list[tuple[int, int]]] = {}
    maps: dict[int, int] = {}
    for row, where in zip(rows.tolist(), place.tolist(), strict=True):
        if where < len(mallocs):
            event, address = int(mallocs[where]), int(trace.address[row])
            if trace.action[row] == Action.SEGMENT_ALLOC:
                segments.setdefault(event, []).append((address, int(trace.size[row])))
            else:
                maps.setdefault(event, address)
    return Hints(segments, maps)


class _Run:
    def __init__(self, program: Program, config: AllocatorConfig, policy: Policy, counters: bool) -> None:
        self.program, self.config, self.policy = program, config, policy
        self.counters = Counters() if counters else None
        evidence = program.evidence
        first = slice(0, program.initial)
        untouched = np.array_equal(program.requested_bytes[first], evidence.requested[first])
        sound = not evidence.history.contradictions and not evidence.beginning.contradictions
        self.keeps_layout = untouched and sound and config.places_like(evidence.config)
        last_use = np.full(len(evidence.history.pools), -1, dtype=np.int64)
        mallocs = program.op == Op.MALLOC
        np.maximum.at(last_use, program.pool[program.handle[mallocs]], program.event[mallocs])
        occupied = evidence.history.initial.address.tolist() if self.keeps_layout else []
        self.space = AddressSpace(policy, _hints(program), occupied)
        self.world = World(config, self.space, self._completed, last_use)
        self.allocator = Allocator(config, self.world, self.counters)
        self.state = self.allocator.state
        self.address_of = [-1] * len(program.requested_bytes)
        self.size_of = [0] * len(program.requested_bytes)
        self.refused: list[Refused] = []
        self.spared: list[Spared] = []
        self._make_requests()

    def _make_requests(self) -> None:
        """One request per distinct size, stream and pool; ``row_of`` gives every handle's row in ``table``."""
        program, state, evidence = self.program, self.state, self.program.evidence
        sizes, size_row = np.unique(program.requested_bytes, return_inverse=True)
        streams, stream_row = np.unique(program.stream, return_inverse=True)
        rounded = np.array([round_size(size, self.config) for size in sizes.tolist()], dtype=np.int64)
        small = rounded[size_row] <= SMALL_LIMIT_BYTES if len(sizes) else np.zeros(0, np.bool_)
        if self.keeps_layout:
            small[: program.initial] = evidence.small[: program.initial]
        pools = len(evidence.history.pools)
        code = ((size_row * len(streams) + stream_row) * pools + program.pool) * 2 + small
        _, first, row = np.unique(code, return_index=True, return_inverse=True)
        self.row_of: I8 = row.astype(np.int64)
        self.table: list[Request | None] = []
        for i in first.tolist():
            lid = state.list_of(int(program.pool[i]), bool(small[i]), int(program.stream[i]))
            self.table.append(request(state, lid, int(rounded[size_row[i]]), self.config))
        self.table.append(None)  # row -1: a rare step

    def _asked(self, handle: int) -> Request:
        asked = self.table[int(self.row_of[handle])]
        assert asked is not None
        return asked

    # The beginning ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make the state before the first event."""
        program, evidence = self.program, self.program.evidence
        beginning = evidence.beginning
        if self.keeps_layout:
            fill(self.state, evidence.history, beginning)
            segments = evidence.history.initial
            for address, size, expandable in zip(
                segments.address.tolist(), segments.total_size.tolist(), segments.is_expandable.tolist(), strict=True
            ):
                if not expandable:
                    self.space.occupy(address, size)
        rows = zip(
            beginning.handle.tolist(), beginning.blocks.address.tolist(), beginning.blocks.block_bytes.tolist(),
            beginning.blocks.pending.tolist(), strict=True,
        )  # fmt: skip
        for handle, address, size, pending in rows:
            asked = self._asked(handle)
            if self.keeps_layout:
                self.address_of[handle], self.size_of[handle] = address, size
                if program.absent[handle]:
                    self.state.release(asked[1], address, size)
                    continue
            elif program.absent[handle]:
                continue
            else:
                served = self.allocator.malloc(asked[1], asked[2])
                if served is None:
                    self._refuse(-1, asked[2], recorded=False)
                    raise _OutOfMemory
                self.address_of[handle], self.size_of[handle] = served
            if self.counters is not None:
                self.allocated(handle, asked[1])
            if pending:
                self._defer(handle)

    # Steps -----------------------------------------------------------------------------------------------

    def _refuse(self, event: int, size: int, recorded: bool) -> None:
        self.refused.append(Refused(event, size, self.state.total_bytes, recorded))

    def _miss(self, handle: int, number: int, size: int) -> None:
        self.world.event = int(self.program.evidence.life.alloc_event[handle])
        served = self.allocator.malloc(number, size, searched=True)
        if served is None:
            self._refuse(self.world.event, size, recorded=False)
            raise _OutOfMemory
        self.address_of[handle], self.size_of[handle] = served
        if self.counters is not None:
            self.allocated(handle, number)

    def _step(self, index: int) -> None:
        program = self.program
        code, handle = int(program.op[index]), int(program.handle[index])
        self.world.event = int(program.event[index])
        if code == Op.DEFER:
            self._defer(handle)
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

    def _defer(self, handle: int) -> None:
        self.world.pending[handle] = None
        if self.counters is not None:
            small = self.state.ids[self._asked(handle)[1]].small
            size = self.size_of[handle]
            self.counters.free_requested(small, size, self.state.is_oversize(size))

    def _completed(self, handle: int) -> None:
        number = self._asked(handle)[1]
        self.state.release(number, self.address_of[handle], self.size_of[handle])
        if self.counters is not None:
            requested = int(self.program.requested_bytes[handle])
            self.counters.free_completed(self.state.ids[number].small, self.size_of[handle], requested)

    # Statistics (flat.Book) ------------------------------------------------------------------------------

    def allocated(self, handle: int, number: int) -> None:
        assert self.counters is not None
        size, requested = self.size_of[handle], int(self.program.requested_bytes[handle])
        self.counters.allocated(self.state.ids[number].small, size, requested, self.state.is_oversize(size))

    def freed(self, handle: int, number: int) -> None:
        assert self.counters is not None
        small, size = self.state.ids[number].small, self.size_of[handle]
        self.counters.free_requested(small, size, self.state.is_oversize(size))
        self.counters.free_completed(small, size, int(self.program.requested_bytes[handle]))

    # The run ---------------------------------------------------------------------------------------------

    def go(self, until: int | None) -> Simulation:
        program = self.program
        last = len(program.op) if until is None else int(np.searchsorted(program.event, until, side="right"))
        stopped_at: int | None = None
        executed = last
        try:
            self._begin()
            for low in range(0, last, _CHUNK):
                self._loop(*self._operations(low, min(low + _CHUNK, last)))
        except _OutOfMemory:
            stopped_at = self.refused[-1].event
            executed = self._operation_of(stopped_at)
        return self._result(executed, stopped_at)

    def _operations(self, low: int, high: int) -> tuple[list[int], list[Request | None]]:
        """Operations ``low`` to ``high`` as :mod:`memtrace.allocator.whatif.flat` reads them, a chunk at a time."""
        code, handle = self.program.op[low:high], self.program.handle[low:high]
        numbers = np.where(code == Op.FREE, ~handle, handle)
        rare = code > Op.FREE
        numbers[rare] = low + np.flatnonzero(rare)
        rows = self.row_of[np.where(rare, 0, handle)] if len(self.row_of) else np.zeros(high - low, np.int64)
        rows[rare] = -1
        table = self.table
        return numbers.tolist(), [table[row] for row in rows.tolist()]

    def _loop(self, numbers: list[int], requests: list[Request | None]) -> None:
        common = (self.state, numbers, requests, self.address_of, self.size_of, self._miss, self._step)
        if self.counters is not None:
            run_complete(*common, self)
        elif self.config.gc_active:
            run_complete(*common)
        else:
            run(*common)

    def _operation_of(self, event: int) -> int:
        """Index of the malloc at an event (0 for the state before the first)."""
        found = np.flatnonzero((self.program.event == event) & (self.program.op == Op.MALLOC))
        return int(found[0]) if len(found) else 0

    def _result(self, executed: int, stopped_at: int | None) -> Simulation:
        program = self.program
        # Numbers of their own take thrice what an array takes: they go before the curve is made.
        sizes, addresses = np.array(self.size_of, dtype=np.int64), np.array(self.address_of, dtype=np.int64)
        self.size_of, self.address_of = [], []
        code, handle = program.op[:executed], program.handle[:executed]
        change = np.zeros(executed, dtype=np.int64)
        mallocs = code == Op.MALLOC
        change[mallocs] = sizes[handle[mallocs]]
        frees = (code == Op.FREE) | (code == Op.DEFER)
        change[frees] = -sizes[handle[frees]]
        beginning = program.evidence.beginning
        held = beginning.handle[~beginning.blocks.pending]
        start = int(sizes[held[~program.absent[held]]].sum())
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
            refused=tuple(self.refused),
            stopped_at=stopped_at,
            spared=tuple(self.spared),
            segment_events=self.world.segment_events(),
            address=addresses,
            block_bytes=sizes,
            allocated_bytes=curve,
            executed=executed,
            pending=tuple(self.world.pending),
            completed_by_flush=tuple(self.world.completed_by_flush),
            keeps_layout=self.keeps_layout,
            counters=self.counters,
            state=self.state,
        )
