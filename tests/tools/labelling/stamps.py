"""Stamp every allocation with the operator that asked for it, and note what autograd saves.

Used for the instrumented second run that gives truth labels. Each operator gets a number, which
``_set_memory_metadata`` writes on the events of the calling thread: ``"17"`` while operator 17 runs, ``"17+3"`` after
it when three checkpoint recomputations have stopped by then. Operators, saved tensors and checkpoint recomputations
are kept as plain rows for :mod:`tools.labelling.labels`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from memtrace.record import backend as backend_module
from memtrace.record.labels import storage_of

# Python frames that stand between C++ and a dispatch mode.
_MACHINERY = ("_python_dispatch", "/_ops.py", "/_stats.py", "/_compile.py", "/_dynamo/", "capture_standin")


@dataclass(slots=True)
class Operator:
    """One dispatched operator. ``outputs`` are (storage address, shape, dtype is floating) of its results.

    ``module`` is the path of module classes that ran it, ``call`` the number of the innermost one's call.
    """

    name: str
    outputs: list[tuple[int, tuple[int, ...], bool]]
    module: str
    in_backward: bool
    in_recompute: bool
    from_engine: bool
    casts_packed: bool
    call: int


@dataclass(slots=True)
class StampLog:
    """What an instrumented run leaves behind; positions are operator numbers."""

    operators: list[Operator] = field(default_factory=list)
    saved: list[tuple[int, int, bool]] = field(default_factory=list)  # (address, operator number, while recomputing)
    recomputes: list[tuple[int, int]] = field(default_factory=list)  # (first, one past the last) operator number

    def as_dict(self) -> dict[str, Any]:
        """Plain rows, for JSON."""
        rows = [
            [o.name, o.outputs, o.module, o.in_backward, o.in_recompute, o.from_engine, o.casts_packed, o.call]
            for o in self.operators
        ]
        return {"operators": rows, "saved": self.saved, "recomputes": self.recomputes}


@contextlib.contextmanager
def stamping(packed_addresses: Any = lambda: frozenset()) -> Iterator[StampLog]:
    """Instrument the block. ``packed_addresses()`` gives the storages of quantised weights, to tell their casts."""
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils import checkpoint
    from torch.utils._python_dispatch import TorchDispatchMode

    backend = backend_module.get()
    log = StampLog()
    modules: list[tuple[str, int]] = [("", 0)]  # (path, number of the call), the innermost last
    calls = itertools.count(1)
    depth = [0]
    in_backward = torch._C._current_graph_task_id

    def between() -> int:
        """Stamp what comes after the last operator; returns the next operator's number."""
        backend.set_metadata(f"{len(log.operators) - 1}+{len(log.recomputes)}")
        return len(log.operators)

    class Stamp(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            number = len(log.operators)
            source = args[0] if args and isinstance(args[0], torch.Tensor) else None
            operator = Operator(
                str(func),
                [],
                modules[-1][0],
                in_backward() != -1,
                depth[0] > 0,
                _only_dispatch_frames(sys._getframe().f_back),
                source is not None
                and source.dtype in (torch.int8, torch.uint8)
                and (storage_of(source, backend.device_type) or (0, 0))[0] in packed_addresses(),
                modules[-1][1],
            )
            log.operators.append(operator)
            backend.set_metadata(str(number))
            try:
                result = func(*args, **(kwargs or {}))
            finally:
                backend.set_metadata(f"{number}+{len(log.recomputes)}")
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    found = storage_of(tensor, backend.device_type)
                    if found is not None:
                        operator.outputs.append((found[0], tuple(tensor.shape), tensor.is_floating_point()))
            return result

    def enter(module: Any, _args: Any) -> None:
        modules.append((f"{modules[-1][0]}/{type(module).__name__}", next(calls)))

    def leave(module: Any, _args: Any, _out: Any) -> None:
        if len(modules) > 1:
            modules.pop()

    def note_saved(tensor: Any) -> None:
        found = storage_of(tensor, backend.device_type)
        if found is not None:
            log.saved.append((found[0], len(log.operators), depth[0] > 0))

    def pack(tensor: Any) -> Any:
        note_saved(tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    original_hook = checkpoint._recomputation_hook

    class Recompute(inspect.unwrap(original_hook)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            keep: Any = self.pack_hook  # type: ignore[has-type]

            def note_and_keep(tensor: Any) -> Any:
                note_saved(tensor)
                return keep(tensor)

            self.pack_hook = note_and_keep

        def __enter__(self) -> Any:
            self._first = between()
            depth[0] += 1
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            depth[0] -= 1
            # Ended, or stopped early by an exception that still holds the recomputed function's locals.
            if not error or error[0] is None or not issubclass(error[0], RuntimeError):
                stopped(self._first)
            return super().__exit__(*error)

    def stopped(first: int) -> None:
        log.recomputes.append((first, len(log.operators)))
        between()

    original_backward = checkpoint.CheckpointFunction.backward

    def reentrant_backward(ctx: Any, *grads: Any) -> Any:
        run = ctx.run_function

        def recompute(*args: Any) -> Any:
            first = between()
            depth[0] += 1
            try:
                out = run(*args)
            finally:
                depth[0] -= 1
            stopped(first)
            return out

        ctx.run_function = recompute
        return original_backward(ctx, *grads)

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    checkpoint._recomputation_hook = Recompute
    if original_hook is not inspect.unwrap(original_hook):  # a recording begun before this mended PyTorch 2.11
        backend_module._keep_errors_of_recomputations(torch)
    checkpoint.CheckpointFunction.backward = staticmethod(reentrant_backward)
    try:
        with Stamp(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            yield log
    finally:
        checkpoint._recomputation_hook = original_hook
        checkpoint.CheckpointFunction.backward = original_backward
        for hook in hooks:
            hook.remove()
        backend.set_metadata("")


def _only_dispatch_frames(frame: Any) -> bool:
    """Whether the autograd engine itself called the operator, as it does to sum gradients.

    Nothing but PyTorch's dispatch machinery stands between; a nested engine runs below the frame that started it.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _MACHINERY):
            return bool(frame.f_code.co_name == "_engine_run_backward")
        frame = frame.f_back
    return True
