"""Notes the birth and death of every storage on the ``meta`` device, with operator, module, layer and stack."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtrace.attribution.categories import Purpose
from memtrace.estimate.dryrun.stacks import DryStacks
from memtrace.estimate.stream import Tape

Where = Callable[[], tuple[str, int]]
"""Gives (module path inside its layer, layer number or -1) of the code that runs now."""

DEVICE = "meta"


class Observer:
    """The book of storages: writes allocations and frees on a :class:`memtrace.estimate.stream.Tape`.

    ``stacks`` runs parallel to the tape's sizes: one interned stack an allocation.
    """

    def __init__(self, where: Where) -> None:
        self.tape = Tape()
        self.stacks = DryStacks()
        self.stack_of: list[int] = []
        self.where = where
        self.vocabulary = 0  # rows of the head: tensors that wide belong to logits and loss
        self._live: dict[int, tuple[int, Any]] = {}

    def see(self, tensor: Any, op: str, label: str | None = None) -> int | None:
        """Note a tensor's storage if it is new; returns its index on the tape (None: it takes no memory)."""
        if tensor.device.type != DEVICE:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known[0]
        size = storage.nbytes()
        if not size:
            return None
        if label is None and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
            label = self._label_of_the_head(op)
        index = self.born(size, op, label)
        self._live[key] = index, weakref.ref(storage, lambda _ref: self._died(key, index))
        return index

    def _label_of_the_head(self, op: str) -> str | None:
        """Logits and their copies in the forward pass; what the loss makes of them, and all gradients of that width."""
        current = self.tape.default_label
        if current == Purpose.BACKWARD or (current == Purpose.FORWARD and op == "_log_softmax"):
            return Purpose.LOSS
        return Purpose.LOGITS if current == Purpose.FORWARD else None

    def _died(self, key: int, index: int) -> None:
        del self._live[key]
        self.tape.events.append(~index)

    def index_of(self, tensor: Any) -> int | None:
        """The tape's index of a tensor's storage, if it is known and alive."""
        known = self._live.get(tensor.untyped_storage()._cdata) if tensor.device.type == DEVICE else None
        return known[0] if known is not None else None

    def born(self, size_bytes: int, op: str, label: str | None = None) -> int:
        """An allocation that no tensor stands for (a kernel's buffer, a workspace); :meth:`gone` ends it."""
        tape = self.tape
        index = len(tape.sizes)
        tape.site, tape.layer = self.where()
        tape.sizes.append(size_bytes)
        tape.labels.append(label or tape.default_label)
        tape.ops.append(op)
        tape.sites.append(tape.site)
        tape.layers.append(tape.layer)
        self.stack_of.append(self.stacks.here())
        tape.events.append(index)
        return index

    def gone(self, index: int) -> None:
        """The end of what :meth:`born` began."""
        self.tape.events.append(~index)

    def index_of_key(self, key: int) -> int | None:
        """The tape's index of the storage at C++ address ``key``, if it is alive."""
        known = self._live.get(key)
        return known[0] if known is not None else None

    def relabel_tensors(self, tensors: Any, label: str) -> None:
        """Give the storages of ``tensors`` their label."""
        for tensor in tensors:
            index = self.index_of(tensor)
            if index is not None:
                self.tape.labels[index] = label

    def forget(self) -> None:
        """Stop noting deaths: what is alive now stays alive in the stream."""
        self._live.clear()


Handler = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


class DispatchMode(TorchDispatchMode):  # type: ignore[misc]
    """Runs every operator through its handler (``handlers``, by name without overload) and notes what it returns."""

    def __init__(self, observer: Observer, handlers: dict[str, Handler]) -> None:
        super().__init__()
        self.observer = observer
        self.handlers = handlers
        self._plans: dict[Any, tuple[str, Handler | None, bool]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's own switch: without it every operator goes through a wrapper that imports the compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = self._plan(func)
        name, handler, makes_storage = plan
        result = handler(self, func, args, kwargs or {}) if handler is not None else func(*args, **(kwargs or {}))
        if makes_storage:
            self.note(result, name)
        return result

    def _plan(self, func: Any) -> tuple[str, Handler | None, bool]:
        name = func._schema.name.partition("::")[2]
        makes_storage = any(output.alias_info is None for output in func._schema.returns)
        return name, self.handlers.get(name), makes_storage

    def note(self, result: Any, name: str, label: str | None = None) -> None:
        """Note the storages of a result: a tensor, or a sequence with tensors in it."""
        if isinstance(result, torch.Tensor):
            self.observer.see(result, name, label)
        elif isinstance(result, list | tuple):
            for item in result:
                self.note(item, name, label)

    @contextlib.contextmanager
    def buffers(self, op: str, *sizes_bytes: int, label: str | None = None) -> Iterator[None]:
        """A kernel's own buffers, alive for the duration of the block."""
        indices = [self.observer.born(size, op, label) for size in sizes_bytes if size]
        yield
        for index in reversed(indices):
            self.observer.gone(index)
