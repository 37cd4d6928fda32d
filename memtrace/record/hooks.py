"""Follow an unchanged program: where its forward, backward and optimizer steps begin and end.

The outermost modules that the program calls are found with PyTorch's global module hooks. Those slow every module call
down, so they go as soon as the models are known; from then on only the classes of the found models are watched, which
costs a few microseconds a step. Optimizers are followed through the global step hooks, the backward pass through
``torch.autograd.backward``. Everything is undone by :meth:`AutoHooks.remove`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from memtrace.record import messages
from memtrace.record.backend import import_torch
from memtrace.record.phases import BACKWARD, BETWEEN, EVALUATION, FORWARD, OPTIMIZER, PhaseLog

_MOST_SEQUENCES = 1024  # of a batch, whose lengths are kept
_DISCOVERY_CALLS = 16  # outermost calls after which discovery ends where no optimizer ever steps


class OutermostStep:
    """Whose step is running: an optimizer may wrap another (ZeRO's states do), and both are one step."""

    def __init__(self) -> None:
        self._running: int | None = None

    def begins(self, optimizer: Any) -> None:
        self._running = self._running or id(optimizer)

    def ends(self, optimizer: Any) -> bool:
        """Whether it was the outermost one."""
        if self._running not in (None, id(optimizer)):
            return False
        self._running = None
        return True

    def forget(self) -> None:
        """A step that an error ended is over."""
        self._running = None


class AutoHooks:
    """Calls ``on_model(model)``, ``on_call(rows, tokens of one)``, ``after_backward()``, ``before_step(optimizer)`` and
    ``after_step(optimizer)``."""

    def __init__(
        self,
        log: PhaseLog,
        on_model: Callable[[Any], None],
        on_call: Callable[[int, int], None],
        after_backward: Callable[[], None],
        before_step: Callable[[Any], None],
        after_step: Callable[[Any], None],
    ) -> None:
        self.log = log
        self.on_model, self.on_call, self.after_backward = on_model, on_call, after_backward
        self.before_step, self.after_step = before_step, after_step
        self._local = threading.local()
        self._compiling: Callable[[], bool] = lambda: False
        self._handles: list[Any] = []
        self._discovery: list[Any] = []
        self._classes: dict[type, Any] = {}
        self._backward: tuple[Any, Any] | None = None
        self._calls = 0
        self._logits: Callable[[], Any] | None = None  # of the last call, as long as anything holds them
        self._passes = 0  # backward passes since the last optimizer step
        self._tokens = 0  # of the last training call
        self._step = OutermostStep()

    def install(self) -> None:
        """Begin to follow the program."""
        torch = import_torch()
        from torch.nn.modules import module as modules
        from torch.optim import optimizer as optimizers

        self._compiling = getattr(getattr(torch, "compiler", None), "is_compiling", self._compiling)
        self._discovery = [
            modules.register_module_forward_pre_hook(self._first_call),
            modules.register_module_forward_hook(self._first_call_ends, always_call=True),
        ]
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._optimizer_begins),
            optimizers.register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # reentrant checkpointing
                return original(*args, **kwargs)
            is_marked = self.log.name == BACKWARD  # by the program, which will say when it ends
            self._step.forget()
            self.log.enter(BACKWARD)
            result = original(*args, **kwargs)
            self.log.completed += 1
            if not is_marked:
                self.log.enter(BETWEEN)  # not after an error: the phase stays what it was when it failed
            self._passes += 1
            if self._logits is not None:  # the graph has been let go of: does the program itself hold them?
                self.log.run["keep_logits"] = self._logits() is not None
            messages.safely("looking at the gradients", self.after_backward)
            return result

        torch.autograd.backward = backward
        self._backward = (original, backward)

    def remove(self) -> None:
        """Undo everything; safe to call twice."""
        self._end_discovery()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for cls, own_call in self._classes.items():
            if own_call is None:
                del cls.__call__
            else:
                setattr(cls, "__call__", own_call)  # noqa: B010
        self._classes = {}
        if self._backward is not None:
            torch = import_torch()
            if torch.autograd.backward is self._backward[1]:
                torch.autograd.backward = self._backward[0]
            self._backward = None

    def _end_discovery(self) -> None:
        for handle in self._discovery:
            handle.remove()
        self._discovery = []

    # the outermost module
    def watch(self, model: Any) -> None:
        """Follow a model that is known to be an outermost one."""
        self.on_model(model)
        cls = type(model)
        if cls in self._classes:
            return
        own_call = cls.__dict__.get("__call__")
        hooks = self

        def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if own_call is not None:
                return own_call(module, *args, **kwargs)
            parent: Any = super(cls, module)
            return parent.__call__(*args, **kwargs)  # looked up now: others may patch it meanwhile

        @functools.wraps(cls.__call__)
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            if hooks._compiling() or not hooks._begins():
                return plain_call(module, *args, **kwargs)
            messages.safely("looking at a call", hooks._note_input, args, kwargs)
            try:
                result = plain_call(module, *args, **kwargs)
            finally:
                hooks._local.inside = False
            messages.safely("looking at a call", hooks._note_output, result)
            hooks._ends()
            return result

        try:
            setattr(cls, "__call__", __call__)  # noqa: B010
        except (TypeError, AttributeError):  # an extension class that refuses
            return
        self._classes[cls] = own_call

    def _begins(self) -> bool:
        """Note the start of an outermost call; false inside one, and inside autograd (a recomputation)."""
        if getattr(self._local, "inside", False):
            return False
        torch = import_torch()
        if torch._C._current_graph_task_id() != -1:
            return False
        self._local.inside = True
        self.log.autocast |= bool(torch.is_autocast_enabled())
        self.log.enter(FORWARD if torch.is_grad_enabled() else EVALUATION)
        return True

    def _ends(self) -> None:
        if self.log.name == EVALUATION:
            self.log.enter(BETWEEN)
        self.log.completed += 1
        self._calls += 1
        if self._calls >= _DISCOVERY_CALLS and self._discovery:
            self._end_discovery()

    def _first_call(self, module: Any, _args: Any) -> None:
        if self._compiling() or getattr(self._local, "inside", False):
            return
        with messages.guarded("looking at a module"):
            if hasattr(module, "_orig_mod"):  # torch.compile: what it traces should hold no hooks
                self._end_discovery()
                self.watch(module)
                self.log.enter(FORWARD)
            elif next(module.parameters(), None) is not None and self._begins():
                self._local.module = module
                self._note_input(_args, {})
                self.watch(module)

    def _first_call_ends(self, module: Any, _args: Any, output: Any) -> None:
        if not self._compiling() and getattr(self._local, "module", None) is module:
            self._local.module = None
            self._local.inside = False
            if output is not None:  # None after an error, too: hooks are called all the same
                messages.safely("looking at a call", self._note_output, output)
                self._ends()

    # what the run is like
    def _note_input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Batch and length of the training call with the most tokens, and the lengths of its sequences by its mask.

        The mask is read on the CPU: nothing is allocated on the GPU, and only a new largest batch waits for it.
        """
        run, given = self.log.run, kwargs.get("input_ids", kwargs.get("inputs_embeds", next(iter(args), None)))
        shape = tuple(getattr(given, "shape", ()))
        if len(shape) == 2:
            self.on_call(int(shape[0]), int(shape[1]))
        if self.log.name != FORWARD or len(shape) < 2:
            return
        if given.is_floating_point() and "inputs_embeds" not in kwargs:
            self._note_head(given.numel() // max(shape[-1], 1))
            return
        self._tokens = shape[0] * shape[1]
        if shape[0] * shape[1] > run.get("batch", 0) * run.get("seq_len", 0):
            run |= {"batch": int(shape[0]), "seq_len": int(shape[1])}
            run.pop("lengths", None)
            mask: Any = kwargs.get("attention_mask")
            if tuple(getattr(mask, "shape", ())) == shape[:2]:
                run["lengths"] = [int(length) for length in mask.cpu().sum(-1).tolist()][:_MOST_SEQUENCES]

    def _note_head(self, tokens: int) -> None:
        """The program takes the logits of so many hidden states itself: of all of the last call, or of a chunk."""
        run = self.log.run
        if run.get("loss") in ("own", "chunked") and tokens < self._tokens:
            run |= {"loss": "chunked", "chunk_tokens": max(tokens, run.get("chunk_tokens", 0))}
        elif run.get("loss") == "own" and self._tokens:
            run["loss"] = "full"

    def _note_output(self, output: Any) -> None:
        """Whether the model made loss and logits in a training call; "own": the program goes on from hidden states."""
        if self.log.name != FORWARD:
            return
        run = self.log.run
        logits = getattr(output, "logits", None)
        if getattr(output, "loss", None) is not None:
            run["loss"] = "full" if logits is not None else "fused"
        elif logits is None and getattr(output, "last_hidden_state", None) is not None:
            run.setdefault("loss", "own")
        self._logits = weakref.ref(logits) if logits is not None else None

    # the optimizer
    def _optimizer_begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._step.begins(optimizer)
        messages.safely("looking at the gradients", self.before_step, optimizer)
        if self._passes:
            self.log.run["accumulate"] = max(self._passes, self.log.run.get("accumulate", 1))
        self._passes = 0
        self.log.enter(OPTIMIZER)

    def _optimizer_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._step.ends(optimizer):
            return
        self.log.completed += 1
        self.log.enter(BETWEEN)
        messages.safely("counting a step", self.after_step, optimizer)
        if self._discovery:
            self._end_discovery()
