"""Module names on every allocation (``deep=True``): the allocator stamps them on its events as ``user_metadata``.

Needs PyTorch 2.10 or newer. Costs a Python call on either side of every module call, so it is not part of the normal
recording. Modules run in the backward pass only where checkpointing recomputes them; other backward events stay
unnamed.
"""

from __future__ import annotations

import threading
from typing import Any

from memtrace.record import messages
from memtrace.record.backend import CudaBackend


class DeepNames:
    """Stamps the name of the module that runs on the calling thread's events."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        self._local = threading.local()
        self._names: dict[int, str] = {}
        self._handles: list[Any] = []

    def install(self) -> None:
        """Begin to stamp, where this PyTorch can."""
        from torch.nn.modules import module as modules

        if not self.backend.has_metadata():
            messages.say("this PyTorch can't stamp module names on allocations (2.10 or newer can); going on without")
            return
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Stop stamping."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self.backend.set_metadata("")
        self._handles = []

    def _stack(self) -> list[str]:
        stack: list[str] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _enter(self, module: Any, _args: Any) -> None:
        stack = self._stack()
        name = self._names.get(id(module))
        if name is None:
            for path, inner in module.named_modules(prefix=stack[-1] if stack else ""):
                self._names.setdefault(id(inner), path or type(inner).__name__)
            name = self._names[id(module)]
        stack.append(name)
        self.backend.set_metadata(name)

    def _leave(self, _module: Any, _args: Any, _output: Any) -> None:
        stack = self._stack()
        if stack:
            stack.pop()
        self.backend.set_metadata(stack[-1] if stack else "")
