"""Replay of a recording under its own settings: block sizes and layout at every event, checked against the recording.

A trace tells requested sizes, addresses and segment events, but not block sizes, and not what was live before it
began. The allocator's own algorithm, run over the trace with the recorded segment addresses, supplies both; where it
predicts anything else than what was recorded, the replay says so and falls back to rounded request sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memtrace.allocator.config import NEWEST, Version, from_snapshot
from memtrace.allocator.replay.evidence import TraceEvidence, gather
from memtrace.allocator.replay.rerun import Rerun, rerun
from memtrace.allocator.replay.segments import InitialSegments
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8, Action, Bool, Device, PoolId

# A snapshot does not tell the limit. With a GC threshold there was one, or it had no effect: the trace shows which.
_UNKNOWN_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Allocations:
    """One row an allocation: first what was live before the trace (``alloc_event`` -1) by address, then in order of
    events.

    Events are -1 where they never happened. Between ``free_requested_event`` and ``free_completed_event`` the memory
    is pending: no longer the program's, not yet the allocator's. ``stack`` is where it was allocated (-1 unknown).
    """

    alloc_event: I4
    free_requested_event: I4
    free_completed_event: I4
    address: I8
    requested_bytes: I8
    block_bytes: I8
    stream: I8  # raw handles
    is_small: Bool
    pool: I4  # indexes Replay.pools, -1 unknown
    stack: I4

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class Replay:
    """A recording with everything that PyTorch left out.

    ``initial_pending`` has an entry for each allocation from before the trace, the first rows of ``allocations``: its
    owner had freed it, but a stream still used it.

    ``segment_events`` are those of the driver, with whether they are of the small pool and their index in ``pools``.

    ``exact`` means that every address, segment event and the final layout came out as recorded; else the replay
    agreed before event ``diverged_at`` and ``why`` is one sentence. The limit on reserved bytes that was in force lies
    between ``limit_from_bytes`` (granted) and ``limit_below_bytes`` (refused; None if nothing ever was).
    ``padding_bytes`` is what the back end that wrote the file adds to every request (torch_npu: 32).
    """

    initial_pending: Bool
    initial_segments: InitialSegments
    pools: tuple[PoolId, ...]
    allocations: Allocations
    segment_events: I8
    segment_is_small: Bool
    segment_pool: I4
    maps_pages: bool  # whether any segment is expandable
    exact: bool
    diverged_at: int | None
    why: str | None
    initial_reserved_bytes: int
    initial_allocated_bytes: int
    initial_requested_bytes: int
    limit_from_bytes: int
    limit_below_bytes: int | None
    notes: tuple[str, ...]
    padding_bytes: int = 0


def replay_device(
    device: Device,
    settings: Mapping[str, Any],
    version: Version = NEWEST,
    on_progress: Callable[[float], None] | None = None,
    is_npu: bool = False,
) -> Replay:
    """Replay one device's trace under the recorded ``settings``. Never raises on strange traces.

    ``is_npu``: the file names torch_npu, which counts where no block size tells how requests are rounded.
    ``on_progress`` is called with the share done, 0 to 1, and may raise to give up.
    """
    evidence = evidence_of(device, settings, version, is_npu)
    return _assemble(evidence, rerun(evidence, on_progress))


def evidence_of(device: Device, settings: Mapping[str, Any], version: Version, is_npu: bool = False) -> TraceEvidence:
    """What the trace says under the recorded settings, with a limit where garbage may have been collected."""
    config = from_snapshot(settings, version)
    if config.gc_threshold > 0 and config.limit_bytes is None:
        config = config.with_limit(_UNKNOWN_LIMIT_BYTES)
    return gather(device, config, is_npu)


def _assemble(evidence: TraceEvidence, outcome: Rerun) -> Replay:
    trace, life, beginning, history = evidence.device.trace, evidence.life, evidence.beginning, evidence.history
    segments, first = history.initial, slice(0, life.initial)
    notes: list[str] = []
    if beginning.assumed_tails:
        notes.append(
            f"{beginning.assumed_tails} blocks from before the trace may be up to 1 MiB larger than shown: "
            "nothing recorded tells whether they end in an unsplit tail"
        )
    # The evidence ends here, so that its columns may change.
    free_requested, requested = life.free_requested_event, evidence.requested
    free_requested[first][beginning.pending] = -1
    # More than its block is a contradiction, told elsewhere.
    requested[first] = np.minimum(requested[first], beginning.block_bytes)
    kinds = trace.action[history.events]
    return Replay(
        initial_pending=beginning.pending,
        initial_segments=segments,
        pools=history.pools,
        allocations=Allocations(
            alloc_event=life.alloc_event,
            free_requested_event=free_requested,
            free_completed_event=life.free_completed_event,
            address=life.address,
            requested_bytes=requested,
            block_bytes=outcome.block_bytes,
            stream=evidence.stream,
            is_small=evidence.small,
            pool=evidence.pool,
            stack=np.concatenate([beginning.stack, trace.stack[life.alloc_event[life.initial :]]]),
        ),
        segment_events=history.events,
        segment_is_small=history.is_small,
        segment_pool=history.pool if len(history.pools) > 1 else np.zeros_like(history.pool),
        maps_pages=bool(((kinds == Action.SEGMENT_MAP) | (kinds == Action.SEGMENT_UNMAP)).any()),
        exact=outcome.why is None,
        diverged_at=outcome.diverged_at,
        why=outcome.why,
        initial_reserved_bytes=int(segments.total_size.sum()),
        initial_allocated_bytes=int(beginning.block_bytes[~beginning.pending].sum()),
        initial_requested_bytes=int(requested[first].sum()),
        limit_from_bytes=outcome.limit_from,
        limit_below_bytes=outcome.limit_below,
        notes=tuple(notes),
        padding_bytes=evidence.config.padding_bytes,
    )
