"""From requested bytes to block bytes and segment bytes, one number at a time and for whole columns.

The rules are PyTorch's ``round_size`` and ``get_allocation_size``; see docs/simulator.md for where they differ
between releases.
"""

from __future__ import annotations

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.snapshot.model import I8

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_LIMIT_BYTES = MIB  # inclusive, tested on the rounded size
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_ROUNDING_BYTES = 2 * MIB
MIN_LARGE_ALLOC_BYTES = 10 * MIB
MAX_REQUEST_BYTES = 1 << 60  # PyTorch refuses more ("more than 1EB memory")
_INTERVALS = 16


def round_size(requested_bytes: int, config: AllocatorConfig) -> int:
    """Block bytes for a request. Without padding idempotent: a rounded size may be rounded again."""
    size = requested_bytes + config.padding_bytes
    if size < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    bypass = config.roundup_bypass_bytes
    if bypass is None or size <= bypass:
        divisions = config.roundup_divisions[min(max(size.bit_length() - 21, 0), _INTERVALS - 1)]
        smallest = 0 if config.one_division_disables_rounding else 1
        if divisions > smallest and size > MIN_BLOCK_BYTES * divisions:
            return _round_power2(size, divisions)
    return -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def _round_power2(size: int, divisions: int) -> int:
    if divisions <= 1 or size & (size - 1) == 0:
        return size
    floor = 1 << (size.bit_length() - 1)
    step = floor // divisions
    return -(-size // step) * step if step else 2 * floor


def round_sizes(requested_bytes: I8, config: AllocatorConfig) -> I8:
    """:func:`round_size` of every entry. Entries above 1 EB, which no allocator serves, count as 1 EB."""
    size = np.minimum(requested_bytes, MAX_REQUEST_BYTES)
    size += config.padding_bytes
    if len(size) and any(config.roundup_divisions):
        distinct, inverse = np.unique(size, return_inverse=True)
        values = np.array([round_size(n - config.padding_bytes, config) for n in distinct.tolist()], dtype=np.int64)
        return values[inverse]
    size += MIN_BLOCK_BYTES - 1
    size &= -MIN_BLOCK_BYTES  # a power of two
    return np.maximum(size, MIN_BLOCK_BYTES, out=size)


def segment_size(rounded_bytes: int, config: AllocatorConfig) -> int:
    """Bytes that the allocator asks the driver for when a rounded request finds no free block."""
    if rounded_bytes <= SMALL_LIMIT_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < MIN_LARGE_ALLOC_BYTES:
        return config.large_segment_bytes
    return -(-rounded_bytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES
