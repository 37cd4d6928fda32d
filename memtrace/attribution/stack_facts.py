"""What whole stacks say: the union of their frames' tags, and the kind of code that was running.

Computed once a stack, never once an event: real traces have hundreds of stacks and hundreds of thousands of events.
"""

from __future__ import annotations

import dataclasses
import re
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import distinct
from memtrace.attribution.frame_tags import Tag, frame_tags
from memtrace.attribution.origin import LIBRARIES, is_cpp, is_own_code, package_of, with_origins
from memtrace.frozen import dataclass
from memtrace.snapshot.stacks import Frame, StackTable

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
FAR = np.int64(1) << 40  # deeper than any stack


class Kind(IntEnum):
    """The kind of code a stack belongs to. ``NONE``: no frames, which is what autograd's own threads leave; ``STRAY``:
    made beside what the program was doing (:mod:`memtrace.attribution.strays`)."""

    NONE = 0
    OPTIMIZER = 1
    RECOMPUTE = 2
    BACKWARD = 3
    LOAD = 4
    FORWARD = 5
    OTHER = 6
    STRAY = 7


AUTOGRAD = (Kind.NONE, Kind.BACKWARD, Kind.RECOMPUTE)
Mark = tuple[int, Kind | None]  # from that event on, this kind of code allocates; None: an error ended the pass


@dataclass(frozen=True, slots=True)
class StackFacts:
    """Per stack, plus one last entry for "no stack recorded", so that index -1 is valid.

    ``tags``: union of the tags of frames that speak. ``kind``: :class:`Kind`. ``is_loss``: computes a loss rather than
    running inside a module that a trainer's ``compute_loss`` called. ``is_bucket``: data-parallel training's own code
    allocates, not the model it calls. ``site``: a number for the part inside the outermost module call, whoever makes
    that call. ``depth``: number of nested module calls. ``python``: the same stacks without C++ frames, whose place
    among the Python ones is not reliable, and with paths as :mod:`memtrace.attribution.origin` has them.
    """

    tags: I8
    kind: U1
    is_loss: Bool
    is_bucket: Bool
    site: I8
    depth: I8
    python: StackTable

    def has(self, tag: Tag) -> Bool:
        """Stacks with any of the tags."""
        return (self.tags & int(tag)) != 0

    def ends(self) -> tuple[I8, I8]:
        """Per stack (and "none"), the numbers of its innermost and its outermost Python frame; -1: it has none."""
        table = self.python
        filled = np.append(np.diff(table.start) > 0, False)
        frame, last = np.append(table.frame, -1), len(table.frame)
        ends = np.append(table.start[:-1], last), np.append(table.start[1:] - 1, last)
        innermost, outermost = (np.where(filled, frame[end], -1).astype(np.int64) for end in ends)
        return innermost, outermost


def python_only(table: StackTable) -> StackTable:
    """The same stacks with Python frames only; stacks of C++ frames alone become empty."""
    return _kept(
        table, np.array([not is_cpp(f.filename, f.name) for f in table.frames] or [True], dtype=np.bool_)[table.frame]
    )


def _kept(table: StackTable, keep: Bool) -> StackTable:
    """The same stacks with those of the stored frames only."""
    if keep.all():
        return table
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    return StackTable(table.frames, table.frame[keep], kept_before[table.start], table.fx)


def _without_modes(table: StackTable, bits: I8) -> StackTable:
    """The same stacks without what sees each operator pass (a mode, or tensors of a class of their own) and runs inside
    it, but for installed code that says something: nobody called it."""
    sees = np.array(
        [f.name in ("__torch_function__", "__torch_dispatch__") for f in table.frames] or [False], dtype=np.bool_
    )
    position = _positions(table)
    last = _reduce(np.maximum, np.where(sees[table.frame], position, -1), table, len(table), -1)
    silent = np.array([is_own_code(f.filename) for f in table.frames] or [False], dtype=np.bool_) | (bits == 0)
    return _kept(table, (position > np.repeat(last, np.diff(table.start))) | ~silent[table.frame])


def first_positions(table: StackTable, bits: I8, tag: Tag) -> I8:
    """Per stack, position of the innermost frame with ``tag`` (0 is the allocating frame), ``FAR`` if none.

    ``bits`` has the tags of each stored frame.
    """
    position = _positions(table)
    position[(bits & int(tag)) == 0] = FAR
    return _reduce(np.minimum, position, table, len(table), int(FAR))


def _positions(table: StackTable) -> I8:
    """Place of every stored frame in its stack."""
    return np.arange(len(table.frame), dtype=np.int64) - np.repeat(table.start[:-1], np.diff(table.start))


def _reduce(function: np.ufunc, values: I8, table: StackTable, count: int, empty: int) -> I8:
    """``function`` over each stack's slice of ``values``; ``empty`` for stacks without frames."""
    result = np.full(count, empty, dtype=np.int64)
    filled = np.flatnonzero(np.diff(table.start) > 0)
    if len(filled):
        result[filled] = function.reduceat(values, table.start[:-1][filled])
    return result


def stack_facts(table: StackTable) -> StackFacts:
    """Facts of every stack in the table. Linear in the number of frames stored.

    Outer frames only say who called the program, so the *innermost* code that says something decides the kind: of a
    module's forward, the autograd engine, an optimizer and a loader, whichever is nearest to the allocation.
    """
    outermost = distinct(table.frame[table.start[1:][np.diff(table.start) > 0] - 1]).tolist()
    table = dataclasses.replace(table, frames=with_origins(table.frames, outermost))
    frame_bits = np.array([int(frame_tags(f.filename, f.name)) for f in table.frames] or [0], dtype=np.int64)
    all_tags = _reduce(np.bitwise_or, frame_bits[table.frame], table, len(table), 0)
    is_empty = np.diff(table.start) == 0
    table = _without_modes(python_only(table), frame_bits)  # all that follows is about the order of Python frames
    count = len(table)
    position = _positions(table)
    is_call = (frame_bits[table.frame] & int(Tag.CALL)) != 0
    last_call = _reduce(np.maximum, np.where(is_call, position, -1), table, count, -1)
    implementations = np.array([f.name == "_call_impl" for f in table.frames] or [False], dtype=np.bool_)
    calls = _reduce(np.add, (is_call & implementations[table.frame]).astype(np.int64), table, count, 0)
    own = np.array([is_own_code(f.filename) for f in table.frames] or [False], dtype=np.bool_)[table.frame]
    bits = _speaks(table, own, position, last_call, frame_bits[table.frame])

    def first(tag: Tag) -> I8:
        return first_positions(table, bits, tag)

    call, engine, recompute = first(Tag.CALL), first(Tag.ENGINE), first(Tag.RECOMPUTE)
    loss, load = first(Tag.LOSS), np.minimum(first(Tag.LOAD), first(Tag.ADAPTER_INIT))
    own_forward = first(Tag.FORWARD_FN)
    modules = np.minimum(call, np.where(own_forward < last_call, own_forward, FAR))
    modules = np.minimum(modules, first(Tag.CHECKPOINT))
    functions = np.minimum(np.minimum(loss, first(Tag.ATTENTION)), first(Tag.COMPILED))
    backward = np.minimum(np.minimum(engine, _applies_backward(table, frame_bits[table.frame])), recompute)
    optimizer = np.where(_calls_back(table, bits), FAR, first(Tag.OPTIMIZER))
    forward = np.minimum(modules, functions)
    nearest = np.minimum(np.minimum(forward, backward), np.minimum(optimizer, load))

    kind = np.full(count, Kind.OTHER, dtype=np.uint8)
    inside = nearest < FAR
    kind[(all_tags & int(Tag.QUANTIZE)) != 0] = Kind.LOAD
    kind[inside & (nearest == load)] = Kind.LOAD
    kind[inside & (nearest == optimizer)] = Kind.OPTIMIZER
    kind[inside & (nearest == forward)] = Kind.FORWARD
    in_engine = inside & (backward < FAR) & ((nearest == forward) | (nearest == backward))
    kind[in_engine | (((all_tags & int(Tag.ENGINE_CPP)) != 0) & (kind != Kind.OPTIMIZER))] = Kind.BACKWARD
    # Modules that run inside the backward pass are a checkpoint's recomputation, and so is what it calls of a program.
    packages = [package_of(f.filename) for f in table.frames]
    of_program = [
        package not in LIBRARIES and not _is_plain(f) for package, f in zip(packages, table.frames, strict=True)
    ]
    innermost = np.where(np.array(of_program or [False], dtype=np.bool_)[table.frame], position, FAR)
    programs = _reduce(np.minimum, innermost, table, count, int(FAR))
    kind[in_engine & ((modules < backward) | ((recompute == backward) & (programs < recompute)))] = Kind.RECOMPUTE
    # Autograd's threads leave no frames, or PyTorch's own where a dispatch mode is on.
    others = np.array([package != "torch" for package in packages] or [False], dtype=np.bool_)
    called = _reduce(np.maximum, others[table.frame].astype(np.int64), table, count, 0)
    kind[is_empty | ((kind == Kind.OTHER) & (called == 0))] = Kind.NONE
    # What a model's code does is said by frames inside it; further out the same words are somebody else's.
    in_model = np.repeat(np.where(last_call >= 0, last_call, FAR), np.diff(table.start)) >= position
    tags = _reduce(np.bitwise_or, np.where(in_model, bits, 0), table, count, 0)
    tags[last_call >= 0] &= ~int(Tag.ZERO_GRAD)
    tags |= all_tags & int(Tag.CHECKPOINT | Tag.CUBLAS | Tag.ENGINE_CPP | Tag.COMM | Tag.EVALUATE | Tag.GENERATE)
    sharding = frame_bits[table.frame] & int(Tag.GATHER | Tag.REDUCE | Tag.SHARDS | Tag.MASTERS)
    tags |= _reduce(np.bitwise_or, np.where(own, 0, sharding), table, count, 0)

    own_forward = _own_forward(table, bits, position, call)
    if not is_call.any():  # functions on plain tensors: the loss may call the model
        own_forward = programs
    is_loss = loss <= np.minimum(own_forward, first(Tag.COMPILED))

    def padded(column: NDArray[np.generic], last: int) -> NDArray[np.generic]:
        return np.append(column, np.array([last], dtype=column.dtype))

    return StackFacts(
        tags=padded(tags, 0),  # type: ignore[arg-type]
        kind=padded(kind, Kind.NONE),  # type: ignore[arg-type]
        is_loss=padded(is_loss, 0),  # type: ignore[arg-type]
        is_bucket=padded(first(Tag.BUCKET) < call, 0),  # type: ignore[arg-type]
        site=padded(_sites(table, last_call), -1),  # type: ignore[arg-type]
        depth=padded(calls, 0),  # type: ignore[arg-type]
        python=table,
    )


# Installed code that computes for whoever calls it, optimizers among them.
_COMPUTES = {"torch", "triton", "bitsandbytes", "apex", "numpy"}
_BESIDE_MODELS = Tag.LOAD | Tag.QUANTIZE | Tag.ADAPTER_INIT | Tag.OPTIMIZER | Tag.OPTIMIZER_STATE | Tag.ZERO_GRAD
_FRAMEWORKS = {"lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate", "trl", "deepspeed"}


def _speaks(table: StackTable, own: Bool, position: I8, last_call: I8, bits: I8) -> I8:
    """The tags (``bits``) of stored frames that say something: of installed code, and of the user's ``own`` functions
    the innermost, or any inside a model (which neither loads nor optimises), but for what stands between a module and
    its own ``forward``: hooks and decorators. Further out, or where a function runs the model, a name may be what they
    call their training loop; and what they call their program's file says nothing about what is in it."""
    last_call = np.repeat(last_call, np.diff(table.start))
    callers = [table.frames[frame] for frame in distinct(table.frame[own & (last_call >= 0) & (position > last_call)])]
    functions = {(f.filename, f.name) for f in callers}
    files = {f.filename for f in callers} | {f.filename for f in table.frames if f.name == "<module>"}
    runs_model = np.array([(f.filename, f.name) in functions for f in table.frames] or [False], dtype=np.bool_)
    of_program = {i: int(frame_tags("own/", f.name)) for i, f in enumerate(table.frames) if f.filename in files}
    by_name = np.full(len(table.frames) or 1, -1, dtype=np.int64)
    by_name[list(of_program)] = list(of_program.values())
    bits &= by_name[table.frame]
    first_own = _reduce(np.minimum, np.where(own, position, FAR), table, len(table), int(FAR))
    is_first = (position <= np.repeat(first_own, np.diff(table.start))) & ~runs_model[table.frame]
    inside = np.where(position <= last_call, bits & ~int(_BESIDE_MODELS), 0)
    heard = np.where(is_first, bits, inside)
    return np.where(own, np.where(_around_forward(table, bits), 0, heard), bits)


def _around_forward(table: StackTable, bits: I8) -> Bool:
    """Stored frames between a ``forward`` and the module call that it is for: further in stands that one's ``forward``,
    further out no other one before the call."""
    place = np.arange(len(bits))
    forward, call = ((bits & int(tag)) != 0 for tag in (Tag.FORWARD_FN, Tag.CALL))
    last_forward, last_call = (np.maximum.accumulate(np.where(is_one, place, -1)) for is_one in (forward, call))
    starts = np.repeat(table.start[:-1], np.diff(table.start))
    further_in = (last_forward >= starts) & (last_forward > last_call) & ~forward
    next_forward, next_call = (
        np.minimum.accumulate(np.where(is_one, place, len(bits))[::-1])[::-1] for is_one in (forward, call)
    )
    return further_in & (next_call < next_forward)


def _own_forward(table: StackTable, bits: I8, position: I8, call: I8) -> I8:
    """Position of the function that the innermost module call is about: its outermost ``forward``, within hooks. Where
    no module is called, or it has none, the last position before the call."""
    inside = position < np.repeat(call, np.diff(table.start))
    found = np.where(inside & ((bits & int(Tag.FORWARD_FN)) != 0), position, -1)
    found = _reduce(np.maximum, found, table, len(table), -1)
    return np.where((found >= 0) & (call < FAR), found, call - 1)


def _calls_back(table: StackTable, bits: I8) -> Bool:
    """Stacks in which an optimizer's ``step`` calls back into the training code: a closure.

    Inside an installed optimizer any other code is such a call. An optimizer of the user's own is called by PyTorch's
    ``wrapper`` around every ``step``, and has helpers of its own: there, frameworks and functions called closure tell.
    """
    result = np.zeros(len(table), dtype=np.bool_)
    optimizer = np.zeros(len(table.frames) + 1, dtype=np.bool_)
    optimizer[table.frame[(bits & int(Tag.OPTIMIZER)) != 0]] = True
    package = [package_of(f.filename) for f in table.frames]
    for stack in np.flatnonzero(first_positions(table, bits, Tag.OPTIMIZER) < FAR).tolist():
        frames = table.frame_ids(stack).tolist()
        at = next(i for i, frame in enumerate(frames) if optimizer[frame])
        own = {*_COMPUTES, package[frames[at]] or "torch"}  # its helpers
        inner = [f for f in frames[:at] if package[f] not in own and not _is_plain(table.frames[f])]
        if inner and table.frames[frames[at]].name in ("wrapper", "_use_grad", "profile_hook_step"):
            result[stack] = any(package[f] in _FRAMEWORKS or _CLOSURE.search(table.frames[f].name) for f in inner[:-1])
        else:
            result[stack] = bool(inner)
    return result


_CLOSURE = re.compile(r"closure|<lambda>")


def _is_plain(frame: Frame) -> bool:
    """A frame of Python's own library, which only passes calls on."""
    return frame.filename.startswith("python3/")


def _sites(table: StackTable, last_call: I8) -> I8:
    """See :class:`StackFacts`; a stack without module calls is one of its own."""
    numbers: dict[bytes, int] = {}
    ends = np.where(last_call >= 0, table.start[:-1] + last_call + 1, table.start[1:])
    parts = (table.frame[a:b].tobytes() for a, b in zip(table.start[:-1].tolist(), ends.tolist(), strict=True))
    return np.array([numbers.setdefault(part, len(numbers)) for part in parts], dtype=np.int64)


def _applies_backward(table: StackTable, bits: I8) -> I8:
    """Position of ``Function.apply`` where it calls a ``backward``, or where no Python code calls it, which is what
    autograd's threads do; the forward goes through an ``apply`` as well."""
    is_apply = (bits & int(Tag.APPLY)) != 0
    by_engine = np.zeros(len(bits), dtype=np.bool_)
    by_engine[1:] = (bits[:-1] & int(Tag.BACKWARD_FN)) != 0
    starts = table.start[:-1]
    by_engine[starts[starts < len(bits)]] = False  # the frame before belongs to another stack
    by_engine[table.start[1:][np.diff(table.start) > 0] - 1] = True
    position = _positions(table)
    position[~(is_apply & by_engine)] = FAR
    return _reduce(np.minimum, position, table, len(table), int(FAR))
