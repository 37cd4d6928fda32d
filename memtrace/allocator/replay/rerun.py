"""The simulation inside a replay: build the operations of a trace, run them, compare with what was recorded.

The driver hands out what the trace recorded, and checks what the model wants of it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memtrace.allocator import flat
from memtrace.allocator import state as state_module
from memtrace.allocator.flat import tabulate
from memtrace.allocator.replay.initial import RESERVATION_BYTES, fill
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size, round_sizes
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.state import MASK, SHIFT, AllocatorState
from memtrace.arrays import among, place_of
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8, U1, Action, BlockState, Device

if TYPE_CHECKING:
    from memtrace.allocator.replay.evidence import TraceEvidence
    from memtrace.allocator.replay.lifetimes import Lifetimes

_CHUNK = 1 << 15


@dataclass(frozen=True, slots=True)
class Rerun:
    """Block sizes by handle; where the model and the recording part (None: nowhere) and why; counters.

    ``why`` alone, without an event: there are no events, and the final state is not one that an allocator leaves.

    The limit on reserved bytes was at least ``limit_from`` and below ``limit_below`` (None: nothing was ever refused).
    """

    block_bytes: I8
    diverged_at: int | None
    why: str | None
    num_alloc_retries: int = 0
    limit_from: int = 0
    limit_below: int | None = None


def plan(action: U1, handle: I4, completes: int, handles: int) -> tuple[I4, list[tuple[int, int]]]:
    """Operations in order (handles, complements, or from the number of handles on the rare steps), and by rare step
    the events it begins and ends with."""
    count = len(action)
    is_alloc = action == Action.ALLOC
    is_oom = action == Action.OOM
    anchor = is_alloc | is_oom | (action == Action.FREE_REQUESTED)
    region = np.cumsum(anchor) - anchor
    anchors = np.flatnonzero(anchor)
    rare = np.zeros(len(anchors) + 1, dtype=np.bool_)
    rare[region[((action >= Action.SEGMENT_ALLOC) & (action <= Action.SEGMENT_UNMAP)) | is_oom]] = True
    in_rare = rare[region]
    is_free = (action == completes) & (handle >= 0)
    if completes != Action.FREE_REQUESTED:
        is_free &= ~in_rare
    position = np.flatnonzero((is_alloc & ~in_rare) | is_free)
    ops = np.where(is_alloc[position], handle[position], ~handle[position])
    rows = np.flatnonzero(rare)
    ends = np.append(anchors, count)[rows]
    starts = np.concatenate(([0], anchors + 1))[rows]
    where = np.searchsorted(position, ends, side="left")  # a free request may also complete: behind its step
    ops = np.insert(ops, where, handles + np.arange(len(ends))).astype(np.int32)
    return ops, list(zip(starts.tolist(), ends.tolist(), strict=True))


class Divergence(Exception):
    """The model and the recording part ways at ``event``; ``why`` is one sentence."""

    def __init__(self, event: int, why: str) -> None:
        super().__init__(why)
        self.event = event
        self.why = why


class _Run:
    """A trace under its recorded settings, and the driver that hands out what was recorded and checks what the model
    wants of it (see :class:`memtrace.allocator.simulator.Driver`).

    The recorded events of one step are ``queue`` (action, address, size, event); ``at`` is the next one not yet
    consumed, ``anchor`` the event of the step itself, and ``refused`` says that it is an ``oom``. Growth is admitted
    exactly where the trace shows growth, and garbage collected where exactly its victims were released;
    ``threshold_from`` ≤ GC threshold < ``threshold_below`` is what that says about the threshold in bytes,
    ``admitted_bytes`` ≤ limit < ``refused_bytes`` what growth says about the limit on reserved memory.
    """

    def __init__(self, evidence: TraceEvidence) -> None:
        self._begin([], 0, False)
        self.threshold_from, self.threshold_below = 0, 1 << 62
        self.admitted_bytes, self.refused_bytes = 0, 1 << 62
        self.evidence = evidence
        trace, life = evidence.device.trace, evidence.life
        self.trace, self.life = trace, life
        self.allocator = Allocator(evidence.config, self)
        self.state = self.allocator.state
        fill(self.state, evidence.history, evidence.beginning, life.address)
        rounded = round_sizes(evidence.requested, evidence.config)
        self.requests = tabulate(self.state, evidence.config, rounded, evidence.small, evidence.pool, evidence.stream)
        del rounded  # as large as what comes next
        self.address_of, self.size_of = array("q", [-1]) * life.count, array("q", [0]) * life.count
        self.address_of[: life.initial] = array("q", life.address[: life.initial].tobytes())
        self.size_of[: life.initial] = array("q", evidence.beginning.block_bytes.tobytes())
        done = int(Action.FREE_COMPLETED)
        self.completes = done if (trace.action == done).any() else int(Action.FREE_REQUESTED)
        make: Callable[..., tuple[I4, list[tuple[int, int]]]] = getattr(state_module._COMPILED, "plan", plan)
        self.ops, self.steps = make(np.ascontiguousarray(trace.action), life.handle, self.completes, life.count)

    def _begin(self, queue: list[tuple[int, int, int, int]], anchor: int, refused: bool) -> None:
        self.queue, self.at, self.anchor, self.refused = queue, 0, anchor, refused

    def _next_action(self) -> int:
        """Action of the next recorded event of this step, -1 if none is left."""
        return self.queue[self.at][0] if self.at < len(self.queue) else -1

    def _expect(self, action: Action, address: int, size: int) -> None:
        wanted = f"the model expects {action.name.lower()} of {size} bytes"
        if self.at == len(self.queue):
            raise Divergence(self.anchor, f"{wanted}, and none is recorded")
        kind, found, length, event = self.queue[self.at]
        if kind != action or found != address or length != size:
            is_segments = Action.SEGMENT_ALLOC <= kind <= Action.SEGMENT_UNMAP
            name = Action(kind).name.lower() if is_segments else "another event"
            raise Divergence(event, f"{wanted} at {address:#x}; recorded is {name} of {length} bytes at {found:#x}")
        self.at += 1

    def admits(self, total_bytes: int, segment_bytes: int) -> bool:
        if not self.queue and not self.refused:
            raise Divergence(self.anchor, "no free block of the model fits this request, and no growth is recorded")
        admitted = self._next_action() in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
        if admitted:
            self.admitted_bytes = max(self.admitted_bytes, total_bytes + segment_bytes)
        else:
            self.refused_bytes = min(self.refused_bytes, total_bytes + segment_bytes)
        return admitted

    def wants_garbage(self, total_bytes: int, victims: list[int]) -> bool:
        ahead = self.queue[self.at : self.at + len(victims)]
        wanted = [(int(Action.SEGMENT_FREE), address) for address in victims]
        passed = [(kind, address) for kind, address, _, _ in ahead] == wanted
        if passed:
            self.threshold_below = min(self.threshold_below, total_bytes)
        else:
            self.threshold_from = max(self.threshold_from, total_bytes)
        return passed

    def place(self, number: int, size: int) -> int | None:
        if self._next_action() != Action.SEGMENT_ALLOC:
            return None
        address = self.queue[self.at][1]
        self._expect(Action.SEGMENT_ALLOC, address, size)
        return address

    def reserve(self, state: AllocatorState, number: int, size: int) -> tuple[int, int]:
        if self._next_action() != Action.SEGMENT_MAP:
            return 0, 0
        return self.queue[self.at][1], RESERVATION_BYTES

    def map(self, number: int, address: int, size: int) -> bool:
        if self._next_action() != Action.SEGMENT_MAP:
            return False
        self._expect(Action.SEGMENT_MAP, address, size)
        return True

    def segment_freed(self, number: int, address: int, size: int) -> None:
        self._expect(Action.SEGMENT_FREE, address, size)

    def unmapped(self, number: int, address: int, size: int) -> None:
        self._expect(Action.SEGMENT_UNMAP, address, size)

    def complete_pending(self, state: AllocatorState) -> None:
        while self._next_action() == Action.FREE_COMPLETED:
            event = self.queue[self.at][3]
            self.at += 1
            self._release_completed(event)

    def may_release(self, state: AllocatorState, pool: int) -> bool:
        """A private pool was given up if this flush is recorded to release some of its memory."""
        released = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
        starts = sorted(address for kind, address, _, _ in self.queue[self.at :] if kind in released)
        for number, name in enumerate(state.ids):
            if name.pool == pool:
                for key in state.lists[number]:
                    low, size = key & MASK, key >> SHIFT
                    place = bisect_left(starts, low)
                    if place < len(starts) and starts[place] < low + size:
                        return True
        return False

    def _release_completed(self, event: int) -> None:
        handle = int(self.life.handle[event])
        if handle < 0:
            raise Divergence(event, "a block is freed that is not allocated")
        self.state.release(self.requests.of(handle)[0], self.address_of[handle], self.size_of[handle])

    def _miss(self, handle: int, number: int, size: int) -> None:
        """An allocation without recorded growth misses the free lists: the driver says what is wrong."""
        self._begin([], int(self.life.alloc_event[handle]), False)
        self.allocator.malloc(number, size, searched=True)

    def _step(self, row: int) -> None:
        """A rare step: the events between two anchors, and the second anchor."""
        start, anchor = self.steps[row]
        trace = self.trace
        queue = [
            (kind, a, n, e)
            for kind, a, n, e in zip(
                trace.action[start:anchor].tolist(), trace.address[start:anchor].tolist(),
                trace.size[start:anchor].tolist(), range(start, anchor), strict=True,
            )
            if kind == self.completes or Action.SEGMENT_ALLOC <= kind <= Action.SEGMENT_UNMAP
        ]  # fmt: skip
        action = int(trace.action[anchor]) if anchor < len(trace) else -1
        self._begin(queue, min(anchor, len(trace) - 1), action == Action.OOM)
        self.complete_pending(self.state)
        while self._next_action() >= 0 and self.evidence.explicit[queue[self.at][3]]:
            before = self.at
            self.allocator.flush()
            self.complete_pending(self.state)
            if self.at == before:
                break  # the model has nothing to release; what is recorded stays in the queue
        if action in (Action.ALLOC, Action.OOM):
            self._malloc(anchor, action)
        if self._next_action() >= 0:
            event = self.queue[self.at][3]
            raise Divergence(event, "the model expects no segment event here, but one is recorded")

    def _malloc(self, anchor: int, action: int) -> None:
        if action == Action.OOM:
            number, size = self._refused(anchor)
            handle = -1
        else:
            handle = int(self.life.handle[anchor])
            number, size = self.requests.of(handle)
        key = self.state.search(number, size)
        grows = self._next_action() >= 0 or action == Action.OOM
        if key is not None and grows:
            # A completion that was part of the flush comes too early here; only then may a free block be passed over.
            if not any(kind == self.completes for kind, _, _, _ in self.queue):
                raise Divergence(
                    anchor, "a free block of the model fits this request, but growth or refusal is recorded"
                )
            key = None
        if key is not None:
            self.address_of[handle], self.size_of[handle] = self.state.take(number, key, size)
            return
        served = self.allocator.malloc(number, size, searched=True)
        if served is None:
            if action != Action.OOM:
                raise Divergence(anchor, "no free block of the model fits this request, and no growth is recorded")
        elif action == Action.OOM:
            raise Divergence(anchor, "the model serves a request that was refused")
        else:
            self.address_of[handle], self.size_of[handle] = served

    def _refused(self, event: int) -> tuple[int, int]:
        """Free list and rounded size of an ``oom`` event."""
        size = round_size(min(int(self.trace.size[event]), 1 << 60), self.evidence.config)
        stream = self.trace.streams[int(self.trace.stream[event])]
        return self.state.list_of(0, size <= SMALL_LIMIT_BYTES, stream), size

    def go(self, on_progress: Callable[[float], None] | None) -> Rerun:
        evidence, life = self.evidence, self.life
        at: int | None = None
        why: str | None = None
        done = life.initial
        addresses = np.frombuffer(self.address_of, dtype=np.int64)
        for low in range(0, len(self.ops), _CHUNK):
            high = min(low + _CHUNK, len(self.ops))
            if on_progress is not None:
                on_progress(low / len(self.ops))
            ops = self.ops[low:high].astype(np.int64)
            try:
                flat.run(self.state, ops, self.requests, self.address_of, self.size_of, self._miss, self._step)
            except Divergence as parting:
                at, why = parting.event, parting.why
            except (KeyError, IndexError, OverflowError):
                at, why = self._event_of(int(ops[-1])), "the trace contradicts itself: blocks overlap"
            last_event = self._event_of(int(ops[-1])) if at is None else at
            upto = place_of(life.alloc_event, last_event, side="right")
            bad = np.flatnonzero(addresses[done:upto] != life.address[done:upto])
            if len(bad):
                handle = done + int(bad[0])
                event = int(life.alloc_event[handle])
                if at is None or event < at:
                    found = self.address_of[handle]
                    at = event
                    why = f"the model places this allocation at {found:#x}; recorded is {int(life.address[handle]):#x}"
            done = upto
            if at is not None:
                break
        sizes = np.frombuffer(self.size_of, dtype=np.int64)
        if at is None:
            at, why = self._compare_end(sizes)
        if at is not None:
            later = life.alloc_event >= at
            sizes = np.where(later, round_sizes(evidence.requested, evidence.config), sizes)
        return Rerun(sizes, at, why, self.allocator.num_alloc_retries, *self._limits())

    def _event_of(self, op: int) -> int:
        """The event that an operation stands for; of a rare step, the one that it ends with."""
        life = self.life
        if op >= life.count:
            return self.steps[op - life.count][1]
        return int(life.alloc_event[op] if op >= 0 else life.free_completed_event[~op])

    def _limits(self) -> tuple[int, int | None]:
        """Bounds on the limit from what was granted and refused, and from when garbage was collected."""
        share = self.evidence.config.gc_threshold
        low, high = self.admitted_bytes, self.refused_bytes
        if share > 0:
            low = max(low, math.ceil(self.threshold_from / share))
            if self.threshold_below < 1 << 62:
                high = min(high, math.ceil(self.threshold_below / share))
        return low, high if high < 1 << 62 else None

    def _compare_end(self, sizes: I8) -> tuple[int | None, str | None]:
        """Compare the final layout with the recorded one."""
        life, blocks = self.life, self.evidence.device.blocks
        alive = np.flatnonzero(life.free_completed_event < 0)
        live = np.stack([life.address[alive], sizes[alive], 1 + (life.free_requested_event[alive] >= 0)], axis=1)
        live[among(alive, np.flatnonzero(self.evidence.beginning.pending)), 2] = BlockState.PENDING_FREE
        free = np.array([(address, size, 0) for address, size in self.state.free_at.items()], dtype=np.int64)
        mine = np.concatenate([live.astype(np.int64), free.reshape(-1, 3)])
        mine = mine[np.argsort(mine[:, 0], kind="stable")]
        theirs = np.stack([blocks.address, blocks.size, blocks.state.astype(np.int64)], axis=1)
        theirs = theirs[np.argsort(theirs[:, 0], kind="stable")]
        if mine.shape == theirs.shape and bool((mine == theirs).all()):
            return None, None
        last = max(len(self.trace) - 1, 0)
        if not len(blocks) and len(mine):
            return last, "the snapshot has no final segments to compare the final layout with"
        rows = min(len(mine), len(theirs))
        differ = np.flatnonzero((mine[:rows] != theirs[:rows]).any(axis=1))
        row = int(differ[0]) if len(differ) else rows - 1
        return last, f"the final layout differs from the recorded one near address {int(theirs[row, 0]):#x}"


def rerun(evidence: TraceEvidence, on_progress: Callable[[float], None] | None = None) -> Rerun:
    """Simulate a trace under its recorded settings and compare. ``on_progress`` gets the share done."""
    impossible = _contradiction(evidence.device, evidence.life)
    is_empty = not len(evidence.device.trace)
    if is_empty or evidence.history.contradictions + evidence.beginning.contradictions:
        start = round_sizes(evidence.requested, evidence.config)
        start[: evidence.life.initial] = evidence.beginning.block_bytes
        if is_empty:
            return Rerun(start, None, impossible)
        why = "the trace does not fit the final segments, so what was there before it began is not known"
        return Rerun(start, 0, impossible or why)
    run = _Run(evidence)
    try:
        outcome = run.go(on_progress)
    finally:
        vars(run).clear()  # it and its allocator refer to each other, and the collector would come late
    if impossible is not None and outcome.diverged_at is None:
        return replace(outcome, diverged_at=len(evidence.device.trace) - 1, why=impossible)
    return outcome


def _contradiction(device: Device, life: Lifetimes) -> str | None:
    """The first thing in a device's final segments and blocks that cannot be, as one sentence; None if all can."""
    segments, blocks = device.segments, device.blocks
    end = segments.address + segments.total_size
    held = np.zeros(len(segments), dtype=np.int64)
    np.add.at(held, blocks.segment, blocks.size)
    live = blocks.state != BlockState.INACTIVE
    traced = np.flatnonzero((life.alloc_event >= 0) & (life.last_block >= 0))
    asked, block = device.trace.size[life.alloc_event[traced]], life.last_block[traced]
    stated = blocks.requested_size[block] != blocks.size[block]  # equal where a release recorded block sizes only
    for wrong, what in (
        (end[:-1] > segments.address[1:], "final segments overlap the next one"),
        (held != segments.total_size, "final segments are not the sum of their blocks"),
        (live & (blocks.requested_size > blocks.size), "final blocks are smaller than what was requested of them"),
        (stated & (asked != blocks.requested_size[block]), "final blocks have another request than their allocation"),
    ):
        if wrong.any():
            return f"the file contradicts itself: {int(np.count_nonzero(wrong))} {what}"
    return None
