"""What no allocator can have left behind: a final state that contradicts itself or its trace, as in an edited file."""

from __future__ import annotations

import numpy as np

from memtrace.allocator.replay.lifetimes import Lifetimes
from memtrace.snapshot.model import BlockState, Device


def contradiction(device: Device, life: Lifetimes) -> str | None:
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
