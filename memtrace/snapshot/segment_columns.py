"""The recorded final segments to :class:`Segments` and :class:`Blocks`, one pair a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from memtrace.errors import SnapshotError
from memtrace.snapshot.fields import addresses, as_dicts, integers, kind_of, sizes
from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.model import DEFAULT_POOL, Blocks, BlockState, PoolId, Segments
from memtrace.snapshot.trace_columns import pool_id

_STATES = {
    "inactive": BlockState.INACTIVE,
    "active_allocated": BlockState.ALLOCATED,
    "active_pending_free": BlockState.PENDING_FREE,
    "active_awaiting_free": BlockState.PENDING_FREE,  # the documentation's name; no release writes it
}


def read_segments(raw: list[dict[str, Any]], stacks: StackInterner, warn: Any) -> tuple[Segments, Blocks]:
    """Columns of one device's segments. Missing block addresses are running sums, as in PyTorch before 2.1."""
    total_size = sizes(raw, "total_size", "segments", None)
    address = addresses(raw, "address", "segments", None)
    order = np.argsort(address, kind="stable")
    raw = [raw[i] for i in order.tolist()]
    total_size, address = total_size[order], address[order]

    block_lists = [as_dicts(segment.get("blocks", []), "a segment's 'blocks'") for segment in raw]
    counts = np.fromiter(map(len, block_lists), dtype=np.int64, count=len(raw))
    first_block = np.zeros(len(raw) + 1, dtype=np.int64)
    np.cumsum(counts, out=first_block[1:])
    blocks = [block for blocks in block_lists for block in blocks]
    segment_of_block = np.repeat(np.arange(len(raw), dtype=np.int32), counts)

    size = sizes(blocks, "size", "blocks", None)
    running = np.cumsum(size) - size
    running += (
        (address - running[np.minimum(first_block[:-1], max(len(blocks) - 1, 0))])[segment_of_block] if blocks else 0
    )
    block_address = running
    if blocks and "address" in blocks[0]:
        block_address = addresses(blocks, "address", "blocks", -1)
        if not np.array_equal(block_address, running):
            warn("recorded block addresses don't follow from block sizes; the running sums are used")
            block_address = running
    sums = np.bincount(segment_of_block, weights=size, minlength=len(raw)) if blocks else np.zeros(len(raw))
    if not np.array_equal(sums.astype(np.int64), total_size):
        warn("blocks don't fill their segments exactly: the file was edited, or is damaged")

    state = np.fromiter((_state(block, warn) for block in blocks), dtype=np.uint8, count=len(blocks))
    requested = _requested(blocks, size, warn)
    requested[state == BlockState.INACTIVE] = 0  # stale: not cleared on free
    pools: dict[PoolId, int] = {DEFAULT_POOL: 0}
    segments = Segments(
        address=address,
        total_size=total_size,
        stream=integers(raw, "stream", "segments", 0),
        is_small=np.array([_is_small(segment) for segment in raw], dtype=np.bool_),
        is_expandable=np.array([segment.get("is_expandable") is True for segment in raw], dtype=np.bool_),
        pool=np.array(
            [pools.setdefault(pool_id(segment.get("segment_pool_id")), len(pools)) for segment in raw], dtype=np.int32
        ),
        pools=tuple(pools),
        stack=stacks.column([segment.get("frames") for segment in raw])[0],
        first_block=first_block,
    )
    return segments, Blocks(
        address=block_address,
        size=size,
        requested_size=requested,
        state=state,
        stack=stacks.column([_block_frames(block) for block in blocks])[0],
        segment=segment_of_block,
    )


def _state(block: dict[str, Any], warn: Any) -> int:
    name = block.get("state")
    state = _STATES.get(name) if isinstance(name, str) else None
    if state is None:
        warn(f"unknown block state {kind_of(name)}: read as allocated")
        return BlockState.ALLOCATED
    return state


def _is_small(segment: dict[str, Any]) -> bool:
    kind = segment.get("segment_type")
    if kind not in ("small", "large"):
        raise SnapshotError("a segment's 'segment_type' is neither 'small' nor 'large'")
    return kind == "small"


def _history(block: dict[str, Any]) -> dict[str, Any]:
    """The newest entry of PyTorch 1.13's and 2.0's ``history``."""
    history = block.get("history")
    if isinstance(history, list) and history and type(history[0]) is dict:
        return history[0]
    return {}


def _block_frames(block: dict[str, Any]) -> Any:
    frames = block.get("frames")
    return _history(block).get("frames") if frames is None else frames


def _requested(blocks: list[dict[str, Any]], size: Any, warn: Any) -> Any:
    if not blocks or "requested_size" in blocks[0]:
        return sizes(blocks, "requested_size", "blocks", 0)
    requested = size.copy()
    for i, block in enumerate(blocks):
        real_size = _history(block).get("real_size")
        if isinstance(real_size, int) and 0 < real_size <= size[i]:
            requested[i] = real_size
    warn("requested sizes are not recorded (PyTorch before 2.0): block sizes stand in where no history tells")
    return requested
