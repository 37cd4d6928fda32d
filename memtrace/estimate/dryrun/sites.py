"""Which module's code runs now: in the forward pass from module hooks, in backward from the node's number."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch

Site = tuple[str, int]
_NOWHERE: Site = ("", -1)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_WRAPPERS = re.compile(r"^(?:base_model\.model\.)?(?:model\.|transformer\.|gpt_neox\.|decoder\.)*")


def site_of(path: str) -> Site:
    """(path inside the decoder layer, layer number) of a module path; -1 and a short path outside the layers."""
    path = path.replace(".base_layer", "").removesuffix(".default")
    match = _LAYER.search(path)
    if match is None:
        return _WRAPPERS.sub("", path), -1
    inner = path[match.end() :]
    for adapter in ("lora_A", "lora_B", "lora_dropout"):
        if inner.endswith(f".{adapter}"):
            inner = f"{inner.removesuffix(f'.{adapter}')}.lora"
    return inner, int(match.group(1))


class DrySites:
    """Keeps the stack of running modules. ``on_recompute(True)`` and ``(False)`` frame a checkpoint's recomputation."""

    def __init__(self) -> None:
        self.checkpoint_inputs: list[Any] = []
        self.on_recompute: Callable[[bool], None] = lambda _begins: None
        self._names: dict[int, Site] = {}
        self._running: list[Site] = []
        self._recomputing: Any = None
        self._numbers: list[int] = []
        self._sites: list[Site] = []

    def name_modules(self, model: Any) -> None:
        """Know the modules of ``model`` by their paths."""
        self._names = {id(module): site_of(path) for path, module in model.named_modules()}

    def where(self) -> Site:
        """The running module's site."""
        if torch._C._current_graph_task_id() != -1 and self._recomputing is None:
            node = torch._C._current_autograd_node()
            if node is None:
                return _NOWHERE
            position = bisect_right(self._numbers, node._sequence_nr()) - 1
            return self._sites[position] if position >= 0 else _NOWHERE
        return self._running[-1] if self._running else _NOWHERE

    def follow(self) -> None:
        """Follow all module calls, for the rest of this process."""
        hooks = torch.nn.modules.module
        hooks.register_module_forward_pre_hook(self._enter)
        hooks.register_module_forward_hook(self._leave, always_call=True)

    def _enter(self, module: Any, args: Any) -> None:
        site = self._names.get(id(module))
        if site is None:
            site = self._running[-1] if self._running else _NOWHERE
        if torch._C._current_graph_task_id() != -1:
            if self._recomputing is None:
                self._recomputing = module
                self.on_recompute(True)
        elif getattr(module, "gradient_checkpointing", False) and args and isinstance(args[0], torch.Tensor):
            self.checkpoint_inputs.append(args[0].untyped_storage().data_ptr())
        self._running.append(site)
        self._moved()

    def _leave(self, module: Any, _args: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()
        self._moved()
        if self._recomputing is module:
            self._recomputing = None
            self._running.clear()
            self.on_recompute(False)

    def _moved(self) -> None:
        """From this number on, autograd nodes belong to the module that runs now."""
        number = torch.autograd._get_sequence_nr()
        site = self._running[-1] if self._running else _NOWHERE
        if self._numbers and self._numbers[-1] == number:
            self._sites[-1] = site
        else:
            self._numbers.append(number)
            self._sites.append(site)
