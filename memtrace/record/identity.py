"""What a storage is, by identity: parameters, quantisation constants, adapters, gradients, optimizer states, buffers.

Nothing here allocates GPU memory or waits for the GPU: only addresses and sizes are read. A storage is named once; the
first name wins (tied weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from memtrace.attribution.categories import Purpose

# Quantised layers of other libraries (GPTQ, AWQ, EETQ, HQQ) keep their packed weights and constants as buffers.
_BUFFERS = dict.fromkeys(("qweight", "W_q", "weight_packed"), Purpose.QUANTIZED) | dict.fromkeys(
    ("qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point"), Purpose.QUANT_STATE
)
_ADAPTER_TOKENS = ("lora_", "modules_to_save.", "vera_", "ia3_", "adapter_")


@dataclass(frozen=True, slots=True)
class Label:
    """One storage: ``address`` and ``size_bytes`` as the allocator sees them.

    ``outside`` is true for managed (paged) memory, which never passes through the caching allocator.
    """

    address: int
    size_bytes: int
    purpose: Purpose
    name: str
    outside: bool = False


def storage_of(tensor: Any, device_type: str) -> tuple[int, int] | None:
    """(address, bytes) of a tensor's storage on the recorded device; ``None`` for anything else."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard of this rank
    device = getattr(tensor, "device", None)
    if device is None or (device.type != device_type and not getattr(tensor, "is_paged", False)):
        return None
    try:
        storage = tensor.untyped_storage()
        address, size = int(storage.data_ptr()), int(storage.nbytes())
    except (RuntimeError, NotImplementedError, AttributeError):  # meta, fake, sparse or wrapper tensors
        return None
    return (address, size) if address and size else None


def _label(tensor: Any, kind: Purpose, name: str, device_type: str) -> Iterator[Label]:
    found = storage_of(tensor, device_type)
    if found is not None:
        yield Label(*found, kind, name, bool(getattr(tensor, "is_paged", False)))


def _quant_state(state: Any, name: str, device_type: str) -> Iterator[Label]:
    """The constants of a bitsandbytes ``QuantState``, nested ones included."""
    for part in ("absmax", "code", "offset"):
        yield from _label(getattr(state, part, None), Purpose.QUANT_STATE, f"{name}.{part}", device_type)
    nested = getattr(state, "state2", None)
    if nested is not None:
        yield from _quant_state(nested, f"{name}.state2", device_type)


def _is_packed(parameter: Any) -> bool:
    """Whether a parameter holds quantised values (``Params4bit`` and ``Int8Params``, whatever their storage type)."""
    if getattr(parameter, "quant_state", None) is not None or type(parameter).__name__ == "Int8Params":
        return True
    return not (parameter.dtype.is_floating_point or parameter.dtype.is_complex)


def is_trained(name: str, parameter: Any, trained: frozenset[int] | None) -> bool:
    """Whether a parameter belongs to what is trained: an adapter by its name, or one whose id is in ``trained``.

    Where that is ``None``, ``requires_grad`` decides.
    """
    if any(token in name for token in _ADAPTER_TOKENS):
        return True
    return bool(parameter.requires_grad) if trained is None else id(parameter) in trained


def model_labels(model: Any, device_type: str, trained: frozenset[int] | None = None) -> Iterator[Label]:
    """Parameters, quantisation constants and buffers of a model; for ``trained`` see :func:`is_trained`."""
    for name, parameter in model.named_parameters():
        packed = _is_packed(parameter)
        kind = Purpose.PARAMS if is_trained(name, parameter, trained) else Purpose.UNQUANTIZED
        if packed:
            kind = Purpose.QUANTIZED
        yield from _label(parameter, kind, name, device_type)
        if packed:
            yield from _quant_state(getattr(parameter, "quant_state", None), f"{name}.quant_state", device_type)
            yield from _label(getattr(parameter, "SCB", None), Purpose.QUANT_STATE, f"{name}.SCB", device_type)
    for name, module in model.named_modules():
        # bitsandbytes' Linear8bitLt moves its constants to ``state`` in the first forward pass.
        state = getattr(module, "state", None)
        for part in ("SCB", "SCBt") if hasattr(state, "SCB") else ():
            yield from _label(getattr(state, part, None), Purpose.QUANT_STATE, f"{name}.state.{part}", device_type)
        yield from _quant_state(getattr(module, "quant_state", None), f"{name}.quant_state", device_type)
    for name, buffer in model.named_buffers():
        kind = _BUFFERS.get(name.rpartition(".")[2], Purpose.BUFFER)
        yield from _label(buffer, kind, name, device_type)


def gradient_labels(named: Iterable[tuple[str, Any]], device_type: str) -> Iterator[Label]:
    """The gradients that exist now."""
    for name, parameter in named:
        if parameter.grad is not None:
            yield from _label(parameter.grad, Purpose.GRADS, f"{name}.grad", device_type)


def optimizer_labels(optimizer: Any, names: dict[int, str], device_type: str) -> Iterator[Label]:
    """The states that exist now, found in ``optimizer.state`` whatever the optimizer calls them."""
    for position, (parameter, state) in enumerate(list(optimizer.state.items())):
        if isinstance(state, dict):
            name = names.get(id(parameter), f"parameter{position}")
            yield from _nested_labels(state, name, device_type)


def _nested_labels(value: Any, name: str, device_type: str) -> Iterator[Label]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _nested_labels(item, f"{name}.{key}", device_type)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _nested_labels(item, f"{name}.{index}", device_type)
    else:
        yield from _label(value, Purpose.OPTIMIZER_STATE, name, device_type)


def optimizer_parameters(optimizers: Iterable[Any]) -> list[Any]:
    """Every parameter that the optimizers update, each once."""
    seen: dict[int, Any] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen.setdefault(id(parameter), parameter)
    return list(seen.values())


def unique(labels: Iterable[Label]) -> list[Label]:
    """The first label of every address."""
    kept: dict[int, Label] = {}
    for label in labels:
        kept.setdefault(label.address, label)
    return list(kept.values())
