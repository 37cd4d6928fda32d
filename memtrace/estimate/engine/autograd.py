"""An autograd engine on byte counts: reference-counted storages, a graph of nodes, backward, checkpointing.

It re-enacts what PyTorch's engine does to *memory*, in the same order (PyTorch 2.11, ``torch/csrc/autograd``):

* a storage is freed when its last reference goes. Python's own reference counts are used for that, so lifetimes
  follow from the structure of code that mirrors the real modules (CPython only);
* backward runs ready nodes in decreasing order of creation, gradient accumulators first; a node's incoming
  gradient dies after the node has run, then its saved tensors;
* gradients that meet are summed in place in the one that came first, if nobody else holds it;
* saved tensors may pass a pack hook: non-reentrant checkpointing keeps nothing, recomputes a layer on the first
  use of one of its saved tensors and stops at the last one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from memtrace.attribution.categories import Purpose
from memtrace.estimate.stream import Tape

_ACCUMULATOR_SEQUENCE = 1 << 60  # torch: UINT64_MAX, gradient accumulators run before everything else


@dataclass(slots=True, eq=False)
class Storage:
    """Memory of one tensor; its death is the free event."""

    index: int
    on_free: Callable[[int], None]

    def __del__(self) -> None:
        self.on_free(~self.index)


@dataclass(slots=True, eq=False)
class Tensor:
    """Shape reduced to a count: ``elements`` of ``width`` bytes. ``head_major`` tells [b, heads, s, d] memory."""

    storage: Storage
    elements: int
    width: int
    requires_grad: bool = False
    node: GradNode | None = None
    grad: Tensor | None = None
    accumulator: weakref.ref[GradNode] | None = None
    head_major: bool = False


Grads = Sequence[Tensor | None]
BackwardFunction = Callable[[Tensor, list[Storage]], Grads]
PackHook = Callable[[Storage], "Storage | Holder"]


def _released(_grad: Tensor, _saved: list[Storage]) -> Grads:
    raise RuntimeError("this part of the graph was already used by a backward")


@dataclass(slots=True, weakref_slot=True, eq=False)
class GradNode:
    """One backward function, its saved storages and the nodes its gradients go to."""

    sequence: int
    edges: Sequence[GradNode | None]
    site: str
    layer: int
    saved: list[Storage | Holder] = field(default_factory=list)
    kept: Storage | None = None  # an attribute of a custom function: no hook sees it, it dies with the node
    backward: BackwardFunction = _released


class StopRecompute(Exception):
    """Raised when a recompute has produced the last saved tensor that its checkpoint needs."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Holder:
    """Stands for one saved tensor of a checkpointed region until the region is recomputed."""

    frame: CheckpointFrame
    storage: Storage | None = None

    def unpack(self) -> Storage:
        """Recompute the region if this is its first use; hand the storage over."""
        if not self.frame.recomputed:
            self.frame.recompute()
        storage = self.storage
        if storage is None:
            raise RuntimeError("a checkpointed region saved fewer tensors when it was recomputed")
        self.storage = None
        return storage


class CheckpointFrame:
    """One region under ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``."""

    __slots__ = ("counter", "engine", "holders", "recomputed", "run", "saved_input", "start")

    def __init__(self, engine: Engine, run: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
        self.engine = engine
        self.run = run
        self.saved_input = Tensor(inputs.storage, inputs.elements, inputs.width)
        self.holders: list[weakref.ref[Holder]] = []
        self.counter = 0
        self.start = 0
        self.recomputed = False
        engine.tape.relabel([inputs.storage.index], Purpose.FORWARD, Purpose.CHECKPOINT_INPUT)

    def pack(self, _storage: Storage) -> Holder:
        """Forward hook: keep nothing."""
        holder = Holder(self)
        self.holders.append(weakref.ref(holder))
        return holder

    def repack(self, storage: Storage) -> Storage:
        """Recompute hook: hand the storage to the holder that waits for it; stop after the last one."""
        holder = self.holders[self.counter]()
        self.counter += 1
        if holder is not None:
            holder.storage = storage
        if self.counter == len(self.holders):
            self.engine.tape.relabel_since(self.start, Purpose.RECOMPUTE)
            raise StopRecompute
        return storage

    def recompute(self) -> None:
        """Run the region again with gradients on, until its last saved tensor exists."""
        engine, tape = self.engine, self.engine.tape
        state = engine.pack, engine.grad_enabled, tape.default_label, tape.site, tape.layer
        engine.pack, engine.grad_enabled, tape.default_label = self.repack, True, Purpose.FORWARD
        tape.mark("recompute")
        self.start = len(tape.events)
        saved_input = self.saved_input
        detached = Tensor(saved_input.storage, saved_input.elements, saved_input.width, True)
        try:
            self.run(detached)
        except StopRecompute:
            pass
        finally:
            engine.pack, engine.grad_enabled, tape.default_label, tape.site, tape.layer = state
            engine.end_autocast()
            self.recomputed = True
        tape.mark("backward")


class Engine:
    """Allocates tensors on a tape and runs backward over the graph built by :class:`Ops`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.grad_enabled = True
        self.pack: PackHook | None = None
        self.thread = "forward"
        self._sequence = 0

    # ---- allocation -------------------------------------------------------------------------------------------
    def new(self, elements: int, width: int, op: str, label: str | None = None) -> Tensor:
        """A new tensor of ``elements`` × ``width`` bytes, made by operator ``op``; freed at once if nobody keeps it."""
        tape = self.tape
        index = len(tape.sizes)
        tape.sizes.append(elements * width)
        tape.labels.append(label or tape.default_label)
        tape.ops.append(op)
        tape.sites.append(tape.site)
        tape.layers.append(tape.layer)
        tape.events.append(index)
        return Tensor(Storage(index, tape.events.append), elements, width)

    def end_autocast(self) -> None:
        """An autocast region ends (a recomputation is one of its own): copies of weights that it cached are dropped."""

    # ---- graph ------------------------------------------------------------------------------------------------
    def edge(self, tensor: Tensor) -> GradNode | None:
        """The node that takes ``tensor``'s gradient; None if it needs none."""
        if tensor.node is not None:
            return tensor.node
        return self._accumulator(tensor) if tensor.requires_grad else None

    def node(self, *inputs: Tensor) -> GradNode | None:
        """A new node for an operator on ``inputs``; None if no gradient is wanted."""
        if not self.grad_enabled:
            return None
        for tensor in inputs:
            if tensor.requires_grad:
                break
        else:
            return None
        self._sequence += 1
        tape = self.tape
        return GradNode(self._sequence, [self.edge(tensor) for tensor in inputs], tape.site, tape.layer)

    def attach(self, out: Tensor, node: GradNode, backward: BackwardFunction) -> None:
        """Make ``out`` the output of ``node``."""
        node.backward = backward
        out.node = node
        out.requires_grad = True

    def save(self, node: GradNode, tensor: Tensor) -> None:
        """Save ``tensor`` for ``node``'s backward (through the pack hook, if one is set)."""
        storage = tensor.storage
        if self.pack is None:
            labels = self.tape.labels
            if labels[storage.index] == Purpose.FORWARD:
                labels[storage.index] = Purpose.SAVED
            node.saved.append(storage)
        else:
            node.saved.append(self.pack(storage))

    def checkpoint(self, run: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Run a region keeping only its input (non-reentrant)."""
        frame = CheckpointFrame(self, run, inputs)
        previous, self.pack = self.pack, frame.pack
        try:
            return run(inputs)
        finally:
            self.pack = previous

    def checkpoint_reentrant(self, run: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Run a region without a graph; its backward recomputes all of it and runs a nested backward."""
        node = self.node(inputs)
        self.grad_enabled = False
        try:
            out = run(inputs)
        finally:
            self.grad_enabled = True
        if node is None:
            return out
        node.saved.append(inputs.storage)
        self.tape.relabel([inputs.storage.index], Purpose.FORWARD, Purpose.CHECKPOINT_INPUT)
        elements, width = inputs.elements, inputs.width

        def backward(grad: Tensor, saved: list[Storage]) -> Grads:
            tape = self.tape
            detached = Tensor(saved[0], elements, width, True)
            tape.mark("recompute")
            start, label = len(tape.events), tape.default_label
            tape.default_label = Purpose.FORWARD
            self.grad_enabled = True
            outputs = run(detached)
            self.grad_enabled = False
            self.end_autocast()
            tape.default_label = label
            tape.relabel_since(start, Purpose.RECOMPUTE)
            tape.mark("backward")
            self.backward(outputs, grad)
            return (detached.grad,)

        # The output of a custom function is the same storage under a new tensor.
        result = Tensor(out.storage, out.elements, out.width)
        self.attach(result, node, backward)
        return result

    # ---- backward ---------------------------------------------------------------------------------------------
    def backward(self, root: Tensor, grad: Tensor) -> None:
        """Run backward from ``root`` with incoming gradient ``grad`` (the caller keeps its own reference)."""
        first = root.node
        if first is None:
            return
        tape = self.tape
        state = self.grad_enabled, self.pack, self.thread, tape.default_label, tape.site, tape.layer
        self.grad_enabled, self.pack, self.thread, tape.default_label = False, None, "backward", Purpose.BACKWARD
        pending = self._dependencies(first)
        buffers: dict[GradNode, Tensor] = {first: grad}
        del grad
        ready: list[tuple[int, GradNode]] = [(-first.sequence, first)]
        while ready:
            node = heappop(ready)[1]
            tape.site, tape.layer = node.site, node.layer
            saved = [item if isinstance(item, Storage) else item.unpack() for item in node.saved]
            outputs = list(node.backward(buffers.pop(node), saved))
            saved.clear()
            node.saved.clear()
            if node.sequence < _ACCUMULATOR_SEQUENCE:  # an accumulator holds its leaf until the graph dies
                node.backward = _released
            outputs.reverse()
            for target in node.edges:
                out = outputs.pop()
                if target is not None:
                    if out is not None:
                        self._route(buffers, target, out)
                    pending[target] -= 1
                    if not pending[target]:
                        heappush(ready, (-target.sequence, target))
                del out
        self.grad_enabled, self.pack, self.thread, tape.default_label, tape.site, tape.layer = state

    def _route(self, buffers: dict[GradNode, Tensor], target: GradNode, grad: Tensor) -> None:
        """Add ``grad`` to the input buffer of ``target`` (torch: ``InputBuffer::accumulate``)."""
        held = buffers.get(target)
        if held is None:
            buffers[target] = grad
        elif sys.getrefcount(held) > 3 or sys.getrefcount(held.storage) > 2:
            # Someone else holds the first one (3 = the buffer, this variable, the call): a new tensor.
            buffers[target] = self.new(held.elements, held.width, "add")
        # else: added in place

    @staticmethod
    def _dependencies(root: GradNode) -> dict[GradNode, int]:
        """How many gradients each node waits for."""
        counts: dict[GradNode, int] = {}
        stack = [root]
        while stack:
            for target in stack.pop().edges:
                if target is not None:
                    if target not in counts:
                        counts[target] = 0
                        stack.append(target)
                    counts[target] += 1
        return counts

    def _accumulator(self, leaf: Tensor) -> GradNode:
        known = leaf.accumulator() if leaf.accumulator is not None else None
        if known is not None:
            return known
        self._sequence += 1
        node = GradNode(_ACCUMULATOR_SEQUENCE + self._sequence, (), self.tape.site, self.tape.layer)

        def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
            if leaf.grad is None:  # torch steals the buffer: .grad is a detached view of it
                leaf.grad = Tensor(grad.storage, grad.elements, grad.width)
            return ()  # otherwise it is added in place

        node.backward = backward
        leaf.accumulator = weakref.ref(node)
        return node
