"""Replay of a recording under its own settings: block sizes and layout at every event, checked against the recording.

A trace tells requested sizes, addresses and segment events, but not block sizes, and not what was live before it
began. The allocator's own algorithm, run over the trace with the recorded segment addresses, supplies both; where it
predicts anything else than what was recorded, the replay says so and falls back to rounded request sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrace.allocator.config import NEWEST, Version, from_snapshot
from memtrace.allocator.replay.evidence import TraceEvidence, gather
from memtrace.allocator.replay.initial import InitialBlocks
from memtrace.allocator.replay.rerun import Rerun, rerun
from memtrace.allocator.replay.segments import InitialSegments
from memtrace.snapshot.model import I4, I8, Action, Bool, Device, PoolId

# A snapshot does not tell the limit. With a GC threshold there was one, or it had no effect: the trace shows which.
_UNKNOWN_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Replay:
    """A recording with everything that PyTorch left out; arrays have one entry an event unless they say otherwise.

    ``block_bytes``: for ``alloc`` events the size of the block handed out, else 0. ``free_requested_event`` and
    ``free_completed_event``: for ``alloc`` events where the allocation was freed (-1: never), else -1. ``is_small``
    and ``pool`` (index into ``pools``, -1 unknown) hold for alloc, free and segment events, ``is_expandable`` for
    segment events. ``handle`` numbers allocations: ``initial_blocks`` rows by ``initial_handle``, then one an alloc.

    ``exact`` means that every address, segment event and the final layout came out as recorded; else the replay
    agreed before event ``diverged_at`` and ``why`` is one sentence. The limit on reserved bytes that was in force lies
    between ``limit_from_bytes`` (granted) and ``limit_below_bytes`` (refused; None if nothing ever was).
    ``padding_bytes`` is what the back end that wrote the file adds to every request (torch_npu: 32).
    """

    initial_blocks: InitialBlocks
    initial_segments: InitialSegments
    pools: tuple[PoolId, ...]
    block_bytes: I8
    free_requested_event: I8
    free_completed_event: I8
    is_small: Bool
    is_expandable: Bool
    pool: I4
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
    device, life, beginning = evidence.device, evidence.life, evidence.beginning
    count = len(device.trace)
    events = life.alloc_event[life.initial :]
    block = np.zeros(count, dtype=np.int64)
    block[events] = outcome.block_bytes[life.initial :]
    requested_event, completed_event = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    requested_event[events] = life.free_requested_event[life.initial :]
    completed_event[events] = life.free_completed_event[life.initial :]

    owned = life.handle >= 0
    is_small, pool = np.zeros(count, np.bool_), np.full(count, -1, np.int32)
    is_small[owned] = evidence.small[life.handle[owned]]
    pool[owned] = evidence.pool[life.handle[owned]]
    is_small[evidence.history.events] = evidence.history.is_small
    only_default = len(evidence.history.pools) == 1
    pool[evidence.history.events] = 0 if only_default else evidence.history.pool
    action = device.trace.action
    blocks, segments = beginning.blocks, evidence.history.initial
    notes: list[str] = []
    if beginning.assumed_tails:
        notes.append(
            f"{beginning.assumed_tails} blocks from before the trace may be up to 1 MiB larger than shown: "
            "nothing recorded tells whether they end in an unsplit tail"
        )
    return Replay(
        initial_blocks=blocks,
        initial_segments=segments,
        pools=evidence.history.pools,
        block_bytes=block,
        free_requested_event=requested_event,
        free_completed_event=completed_event,
        is_small=is_small,
        is_expandable=(action == Action.SEGMENT_MAP) | (action == Action.SEGMENT_UNMAP),
        pool=pool,
        exact=outcome.why is None,
        diverged_at=outcome.diverged_at,
        why=outcome.why,
        initial_reserved_bytes=int(segments.total_size.sum()),
        initial_allocated_bytes=int(blocks.block_bytes[~blocks.pending].sum()),
        initial_requested_bytes=int(blocks.requested_bytes.sum()),
        limit_from_bytes=outcome.limit_from,
        limit_below_bytes=outcome.limit_below,
        notes=tuple(notes),
        padding_bytes=evidence.config.padding_bytes,
    )
