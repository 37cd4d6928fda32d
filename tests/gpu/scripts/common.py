"""What the training scripts share; nothing here knows memtrace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda:0" if CUDA else "cpu"


def make_lora(model: Any) -> Any:
    """LoRA adapters on all linear layers, with gradient checkpointing."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def tighten(share: float = 0.9) -> None:
    """Limit this process to ``share`` of the most that it has allocated so far."""
    if CUDA:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share * torch.cuda.max_memory_allocated() / total)


def storages(model: Any, optimizers: list[Any]) -> dict[str, dict[int, int]]:
    """Bytes by address of parameters (with quantisation constants), gradients and optimizer states on the device."""
    found: dict[str, dict[int, int]] = {"parameters": {}, "gradients": {}, "states": {}}

    def add(kind: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == torch.device(DEVICE).type:
            if getattr(tensor, "is_paged", False):
                return
            storage = tensor.untyped_storage()
            if storage.nbytes() and all(storage.data_ptr() not in known for known in found.values()):
                found[kind][storage.data_ptr()] = storage.nbytes()

    for parameter in model.parameters():
        add("parameters", parameter)
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            for part in (state.absmax, state.code, getattr(state, "offset", None)):
                add("parameters", part)
            state = state.state2 if getattr(state, "nested", False) else None
    for parameter in model.parameters():
        add("gradients", parameter.grad)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for tensor in state.values():
                add("states", tensor)
    return found


def write_truth(path: str | None, found: dict[str, dict[int, int]]) -> None:
    """For the check that runs the script."""
    if path is not None:
        Path(path).write_text(json.dumps(found))
