"""What whole stacks say: the union of their frames' tags, and the kind of code that was running.

Computed once a stack, never once an event: real traces have hundreds of stacks and hundreds of thousands of events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.frame_tags import Tag, frame_tags, is_cpp
from memtrace.snapshot.stacks import StackTable

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
FAR = np.int64(1) << 40  # deeper than any stack


class Kind(IntEnum):
    """The kind of code a stack belongs to. ``NONE``: no frames, which is what autograd's own threads leave."""

    NONE = 0
    OPTIMIZER = 1
    RECOMPUTE = 2
    BACKWARD = 3
    LOAD = 4
    FORWARD = 5
    OTHER = 6


@dataclass(frozen=True, slots=True)
class StackFacts:
    """Per stack, plus one last entry for "no stack recorded", so that index -1 is valid.

    ``tags``: union of frame tags. ``kind``: :class:`Kind`. ``is_loss``: computes a loss rather than running inside a
    module that a trainer's ``compute_loss`` called. ``is_bucket``: data-parallel training's own code allocates, not the
    model it calls. ``depth``: number of nested module calls. ``python``: the same stacks without C++ frames, whose
    place among the Python ones is not reliable.
    """

    tags: I8
    kind: U1
    is_loss: Bool
    is_bucket: Bool
    depth: I8
    python: StackTable

    def has(self, tag: Tag) -> Bool:
        """Stacks with any of the tags."""
        return (self.tags & int(tag)) != 0


def python_only(table: StackTable) -> StackTable:
    """The same stacks with Python frames only; stacks of C++ frames alone become empty."""
    keep = np.array([not is_cpp(f.filename, f.name) for f in table.frames] or [True], dtype=np.bool_)[table.frame]
    if keep.all():
        return table
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    return StackTable(table.frames, table.frame[keep], kept_before[table.start], table.fx)


def first_positions(table: StackTable, frame_bits: I8, tag: Tag) -> I8:
    """Per stack, position of the innermost frame with ``tag`` (0 is the allocating frame), ``FAR`` if none."""
    count = len(table)
    position = np.arange(len(table.frame), dtype=np.int64) - np.repeat(table.start[:-1], np.diff(table.start))
    position[(frame_bits[table.frame] & int(tag)) == 0] = FAR
    return _reduce(np.minimum, position, table, count, int(FAR))


def _reduce(function: np.ufunc, values: I8, table: StackTable, count: int, empty: int) -> I8:
    """``function`` over each stack's slice of ``values``; ``empty`` for stacks without frames."""
    result = np.full(count, empty, dtype=np.int64)
    filled = np.flatnonzero(np.diff(table.start) > 0)
    if len(filled):
        result[filled] = function.reduceat(values, table.start[:-1][filled])
    return result


def stack_facts(table: StackTable) -> StackFacts:
    """Facts of every stack in the table. Linear in the number of frames stored."""
    frame_bits = np.array([int(frame_tags(f.filename, f.name)) for f in table.frames] or [0], dtype=np.int64)
    count = len(table)
    tags = _reduce(np.bitwise_or, frame_bits[table.frame], table, count, 0)
    is_empty = np.diff(table.start) == 0
    table = python_only(table)  # all that follows is about the order of Python frames
    calls = _reduce(np.add, ((frame_bits[table.frame] & int(Tag.CALL)) != 0).astype(np.int64), table, count, 0)

    def first(tag: Tag) -> I8:
        return first_positions(table, frame_bits, tag)

    call, loss, engine, recompute = first(Tag.CALL), first(Tag.LOSS), first(Tag.ENGINE), first(Tag.RECOMPUTE)
    python_backward = _applies_backward(table, frame_bits)
    in_backward = np.minimum(engine, python_backward)
    kind = np.full(count, Kind.OTHER, dtype=np.uint8)
    forward = (tags & int(Tag.CALL | Tag.LOSS | Tag.ATTENTION | Tag.COMPILED | Tag.CHECKPOINT)) != 0
    load = (tags & int(Tag.LOAD | Tag.QUANTIZE | Tag.ADAPTER_INIT)) != 0
    kind[load] = Kind.LOAD
    # A module moved or quantised from inside a forward pass is not loading, and a model loaded inside a module's
    # method is: whichever is nearer to the allocation decides.
    kind[forward & ~(load & (np.minimum(first(Tag.LOAD), first(Tag.ADAPTER_INIT)) < call))] = Kind.FORWARD
    kind[(in_backward < FAR) | ((tags & int(Tag.ENGINE_CPP)) != 0)] = Kind.BACKWARD
    # A recomputation's forward code lies inside the checkpoint's backward; a nested engine inside that is backward.
    kind[(recompute < FAR) & (recompute < in_backward) & (call < recompute)] = Kind.RECOMPUTE
    recomputes_here = (recompute < FAR) & (recompute <= in_backward) & (call >= recompute)
    kind[recomputes_here] = Kind.BACKWARD
    kind[(tags & int(Tag.OPTIMIZER)) != 0] = Kind.OPTIMIZER
    kind[is_empty] = Kind.NONE

    def padded(column: NDArray[np.generic], last: int) -> NDArray[np.generic]:
        return np.append(column, np.array([last], dtype=column.dtype))

    return StackFacts(
        tags=padded(tags, 0),  # type: ignore[arg-type]
        kind=padded(kind, Kind.NONE),  # type: ignore[arg-type]
        is_loss=padded(loss < call, 0),  # type: ignore[arg-type]
        is_bucket=padded(first(Tag.BUCKET) < call, 0),  # type: ignore[arg-type]
        depth=padded((calls + 1) // 2, 0),  # type: ignore[arg-type]  # each call leaves two frames
        python=table,
    )


def _applies_backward(table: StackTable, frame_bits: I8) -> I8:
    """Position of ``Function.apply`` where it calls a ``backward``; the forward goes through an ``apply`` as well."""
    bits = frame_bits[table.frame]
    is_apply = (bits & int(Tag.APPLY)) != 0
    inner_backward = np.zeros(len(bits), dtype=np.bool_)
    inner_backward[1:] = (bits[:-1] & int(Tag.BACKWARD_FN)) != 0
    starts = table.start[:-1]
    inner_backward[starts[starts < len(bits)]] = False  # the frame before belongs to another stack
    position = np.arange(len(bits), dtype=np.int64) - np.repeat(starts, np.diff(table.start))
    position[~(is_apply & inner_backward)] = FAR
    return _reduce(np.minimum, position, table, len(table), int(FAR))
