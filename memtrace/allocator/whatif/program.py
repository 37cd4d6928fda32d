"""The program behind a trace: mallocs, frees and explicit flushes in order, without what the allocator did itself.

Forced releases, garbage collection and growth are left out, since they depend on the settings; they are what a
simulation predicts. Allocations are named by handle (see :mod:`memtrace.allocator.replay.lifetimes`), never by address.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memtrace.allocator.flat import distinct
from memtrace.allocator.replay.evidence import TraceEvidence
from memtrace.allocator.replay.flushes import causes, next_anchor
from memtrace.allocator.whatif.addresses import Hints
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8, U1, Action, Bool, DeviceTrace


class Op(IntEnum):
    """What the program does. ``REFUSE`` is a request that the recorded run was refused."""

    MALLOC = 0
    FREE = 1  # at once complete
    DEFER = 2  # given up by its owner while another stream still uses it
    COMPLETE = 3  # that other stream is done
    FLUSH = 4  # torch.cuda.empty_cache()
    REFUSE = 5


class RefusedRequest(NamedTuple):
    """A request that ended in an ``oom`` event. Sizes in bytes; ``size_bytes`` is already rounded."""

    event: int
    size_bytes: int
    stream: int
    pool: int


@dataclass(frozen=True)
class Program:
    """Operations in order (``op``, ``handle``, ``event``) and what they act on.

    ``handle`` is the allocation, or for ``REFUSE`` the row in ``refusals``; ``event`` the trace event the operation
    comes from. ``requested_bytes``, ``stream`` (raw handles) and ``pool`` are by handle, which is the row in
    ``Replay.allocations``. Those below ``initial`` were there before the first operation, except those ``absent``.
    ``hints`` are the recorded run's, and edits leave them.
    """

    evidence: TraceEvidence
    op: U1
    handle: I8
    event: I8
    refusals: tuple[RefusedRequest, ...]
    initial: int
    requested_bytes: I8
    stream: I8
    pool: I4
    absent: Bool
    hints: Hints

    @cached_property
    def last_use(self) -> I8:
        """The event of the last malloc from each pool, -1 for none."""
        last = np.full(len(self.evidence.history.pools), -1, dtype=np.int64)
        mallocs = self.op == Op.MALLOC
        np.maximum.at(last, self.pool[self.handle[mallocs]], self.event[mallocs])
        return last

    @cached_property
    def sizes(self) -> tuple[I8, I8, I4]:
        """``requested_bytes`` as :func:`distinct` has them: each setting rounds the few sizes that there are."""
        return distinct(self.requested_bytes)

    def to_run(self) -> Program:
        """The program with no more evidence than running it needs: what ended when is in the operations already."""
        life = self.evidence.life
        none, first = np.zeros(0, dtype=np.int32), life.address[: self.initial].copy()
        short = replace(
            life, handle=none, address=first, free_requested_event=none, free_completed_event=none,
            last_block=none, freed_by_reuse=np.zeros(0, np.bool_),
        )  # fmt: skip
        return replace(self, evidence=replace(self.evidence, life=short, explicit=np.zeros(0, np.bool_)))

    @property
    def ends_refused(self) -> bool:
        """Whether the last request of the recorded run was refused, so that nothing is known of what came after."""
        asks = np.flatnonzero((self.op == Op.MALLOC) | (self.op == Op.REFUSE))
        return bool(len(asks)) and int(self.op[asks[-1]]) == Op.REFUSE

    def without(self, dropped: Bool) -> Program:
        """The program as if the marked allocations (by handle) had never been made."""
        touches = self.op < Op.FLUSH
        keep = ~(touches & dropped[np.where(touches, self.handle, 0)])
        return replace(
            self, op=self.op[keep], handle=self.handle[keep], event=self.event[keep], absent=self.absent | dropped
        )

    def scaled(self, marked: Bool, factor: float) -> Program:
        """The program with the marked allocations (by handle) ``factor`` times as large, at least one byte each."""
        larger = np.maximum(np.rint(self.requested_bytes * factor), 1).astype(np.int64)
        return replace(
            self, requested_bytes=np.where(marked & (self.requested_bytes > 0), larger, self.requested_bytes)
        )

    def asking(self, event: int, size_bytes: int) -> Program:
        """The program with the request that was refused at ``event`` no larger than ``size_bytes``."""
        smaller = (
            one._replace(size_bytes=min(one.size_bytes, size_bytes)) if one.event == event else one
            for one in self.refusals
        )
        return replace(self, refusals=tuple(smaller))


def extract(evidence: TraceEvidence) -> Program:
    """The program of a recorded trace."""
    trace, life = evidence.device.trace, evidence.life
    action, handle, cause = trace.action, life.handle, causes(trace)
    count = len(trace)
    is_request = action == Action.FREE_REQUESTED
    completes = action == Action.FREE_COMPLETED
    if not completes.any():  # recorded without completions: every free is immediate
        immediate = is_request & (handle >= 0)
    else:
        immediate = np.zeros(count, dtype=np.bool_)
        immediate[:-1] = (
            is_request[:-1]
            & completes[1:]
            & (handle[:-1] >= 0)
            & (handle[:-1] == handle[1:])
            & (cause[:-1] == cause[1:])
        )
    follows = np.zeros(count, dtype=np.bool_)
    follows[1:] = immediate[:-1]

    at_once = np.flatnonzero(completes & ~follows & (handle >= 0))
    alone = life.free_requested_event[handle[at_once]] == at_once  # no request recorded: free in one go
    alone &= (handle[at_once] >= life.initial) | ~is_request.any()
    immediate[at_once[alone]] = True
    finished = at_once[~alone]
    flushes, late = _flushes(trace, evidence.explicit, finished)
    # Those that a forced flush waited for come after the malloc that flushed.
    place = np.where(late, next_anchor(action, finished) * 8 + 5, finished * 8 + 3)
    lost = np.flatnonzero(life.freed_by_reuse)  # frees that are not recorded: the address was used again
    reuse = life.free_completed_event[lost].astype(np.int64)  # to be multiplied
    asked = life.free_requested_event[lost] < reuse
    mallocs = np.flatnonzero(action == Action.ALLOC)
    frees = np.flatnonzero(immediate)
    defers = np.flatnonzero(is_request & ~immediate & (handle >= 0))
    refused = np.flatnonzero(action == Action.OOM)
    del is_request, completes, immediate, follows
    # Operation, its events, what it acts on, and its rank within an event, of eight.
    parts: tuple[tuple[Op, I8, I8 | I4, int], ...] = (
        (Op.COMPLETE, reuse[asked], lost[asked], 3),
        (Op.FREE, reuse[~asked], lost[~asked], 3),
        (Op.MALLOC, mallocs, handle[mallocs], 4),
        (Op.FREE, frees, handle[frees], 3),
        (Op.DEFER, defers, handle[defers], 3),
        (Op.COMPLETE, finished, handle[finished], -1),
        (Op.FLUSH, flushes, flushes, 2),
        (Op.REFUSE, refused, np.arange(len(refused)), 4),
    )
    order = np.argsort(
        np.concatenate([place if rank < 0 else rows * 8 + rank for _, rows, _, rank in parts]), kind="stable"
    )
    codes = np.repeat([np.uint8(part[0]) for part in parts], [len(part[1]) for part in parts])[order]
    events, names = [part[1] for part in parts], [part[2] for part in parts]
    del parts, mallocs, frees, defers, at_once, finished, place, lost, reuse, flushes, alone, late, asked
    event = np.concatenate(events)
    events.clear()  # three million operations make arrays that matter
    event = event[order]
    acts_on = np.concatenate(names, dtype=np.int64)
    names.clear()
    acts_on = acts_on[order]
    index = {pool: i for i, pool in enumerate(evidence.history.pools)}
    refusals = tuple(
        RefusedRequest(
            event,
            min(int(trace.size[event]), 1 << 60),
            trace.streams[int(trace.stream[event])],
            index[trace.pools[int(trace.pool[event])]] if trace.pool[event] >= 0 else 0,
        )
        for event in refused.tolist()
    )
    return Program(
        evidence=evidence,
        op=codes,
        handle=acts_on,
        event=event,
        refusals=refusals,
        initial=life.initial,
        requested_bytes=evidence.requested,
        stream=evidence.stream,
        pool=evidence.pool,
        absent=np.zeros(life.count, dtype=np.bool_),
        hints=_hints(trace),
    )


def _hints(trace: DeviceTrace) -> Hints:
    """Addresses that recorded mallocs got from the driver, by their ``alloc`` event."""
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


def _flushes(trace: DeviceTrace, explicit: Bool, finished: I8) -> tuple[I8, Bool]:
    """(first release of every explicit ``empty_cache``, which of ``finished`` follow a malloc's first growth or
    forced release)."""
    action, context = trace.action, causes(trace)
    release = (action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP)
    growth = (action == Action.SEGMENT_ALLOC) | (action == Action.SEGMENT_MAP)
    rows = np.flatnonzero(release)
    first = explicit[rows]
    if len(rows):
        anchor = next_anchor(action, rows)
        first[1:] &= (anchor[1:] != anchor[:-1]) | ~explicit[rows[:-1]] | (context[rows[1:]] != context[rows[:-1]])
    mine = np.flatnonzero((release & ~explicit) | growth)
    anchor, start = np.unique(next_anchor(action, mine), return_index=True)
    late = np.zeros(len(finished), dtype=np.bool_)
    if len(mine):
        wanted = next_anchor(action, finished)
        found = np.minimum(np.searchsorted(anchor, wanted), len(anchor) - 1)
        late = (anchor[found] == wanted) & (mine[start[found]] < finished)
    return rows[first], late
