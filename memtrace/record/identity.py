"""What a storage is, by identity: parameters, quantisation constants, adapters, gradients, optimizer states, buffers.

Nothing here allocates GPU memory or waits for the GPU: only addresses and sizes are read. A storage is named once; the
first name wins (tied weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from memtrace.attribution.categories import Purpose

# Quantised layers of other libraries (GPTQ, AWQ, EETQ, HQQ) keep their packed weights and constants as buffers.
_BUFFERS = dict.fromkeys(("qweight", "W_q", "weight_packed"), Purpose.QUANTIZED) | dict.fromkeys(
    ("qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point"), Purpose.QUANT_STATE
)
_ADAPTER_TOKENS = ("lora_", "modules_to_save.", "vera_", "ia3_", "adapter_")


class Label(NamedTuple):
    """One storage: ``address`` and ``size_bytes`` as the allocator sees them.

    ``outside`` is true for managed (paged) memory, which never passes through the caching allocator.
    """

    address: int
    size_bytes: int
    purpose: Purpose
    name: str
    outside: bool = False


@dataclass(frozen=True, slots=True)
class Contents:
    """A model's modules and parameters by name, each once: gone through once, since that is what takes long."""

    model: Any
    modules: list[tuple[str, Any]]
    parameters: list[tuple[str, Any]]


def contents(model: Any) -> Contents:
    """As ``named_modules()`` and ``named_parameters()`` would give them, in a fraction of the time."""
    modules: list[tuple[str, Any]] = []
    parameters: list[tuple[str, Any]] = []
    seen: set[int] = set()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modules.append((name, module))
        own, children = module._parameters, module._modules
        if not own and not children:
            continue
        prefix = f"{name}." if name else ""
        for key, parameter in own.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                parameters.append((prefix + key, parameter))
        stack += [(prefix + key, child) for key, child in reversed(children.items()) if child is not None]
    return Contents(model, modules, parameters)


def storage_of(tensor: Any, device_type: str) -> tuple[int, int] | None:
    """(address, bytes) of a tensor's storage on the recorded device; ``None`` for anything else."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard of this rank
    try:
        if tensor.device.type != device_type and not getattr(tensor, "is_paged", False):
            return None
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, AttributeError):  # meta, fake, sparse or wrapper tensors
        return None
    return (address, size) if address and size else None


def _label(tensor: Any, kind: Purpose, name: str, device_type: str) -> Iterator[Label]:
    found = storage_of(tensor, device_type) if tensor is not None else None
    if found is not None:
        yield Label(*found, kind, name, bool(getattr(tensor, "is_paged", False)))


def _quant_state(state: Any, name: str, device_type: str) -> Iterator[Label]:
    """The constants of a bitsandbytes ``QuantState``, nested ones included."""
    while state is not None:
        for part in ("absmax", "code", "offset"):
            yield from _label(getattr(state, part, None), Purpose.QUANT_STATE, f"{name}.{part}", device_type)
        state, name = getattr(state, "state2", None), f"{name}.state2"


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


def model_labels(found: Contents, device_type: str, trained: frozenset[int] | None = None) -> Iterator[Label]:
    """Parameters, quantisation constants and buffers of a model; for ``trained`` see :func:`is_trained`."""
    for name, parameter in found.parameters:
        packed = _is_packed(parameter)
        kind = Purpose.PARAMS if is_trained(name, parameter, trained) else Purpose.UNQUANTIZED
        yield from _label(parameter, Purpose.QUANTIZED if packed else kind, name, device_type)
        if packed:
            yield from _quant_state(getattr(parameter, "quant_state", None), f"{name}.quant_state", device_type)
            yield from _label(getattr(parameter, "SCB", None), Purpose.QUANT_STATE, f"{name}.SCB", device_type)
    for name, module in found.modules:
        plain = module.__dict__  # what is neither parameter, buffer nor module
        if "state" in plain:  # bitsandbytes' Linear8bitLt moves its constants there in the first forward pass
            for part in ("SCB", "SCBt"):
                tensor = getattr(plain["state"], part, None)
                yield from _label(tensor, Purpose.QUANT_STATE, f"{name}.state.{part}", device_type)
        if "quant_state" in plain:
            yield from _quant_state(plain["quant_state"], f"{name}.quant_state", device_type)
        for key, buffer in module._buffers.items():
            full = f"{name}.{key}" if name else key
            yield from _label(buffer, _BUFFERS.get(key, Purpose.BUFFER), full, device_type)


def gradient_labels(named: Iterable[tuple[str, Any]], device_type: str) -> Iterator[Label]:
    """The gradients that exist now."""
    for name, parameter in named:
        if parameter.grad is not None:
            yield from _label(parameter.grad, Purpose.GRADS, f"{name}.grad", device_type)


def optimizer_labels(optimizer: Any, names: dict[int, tuple[str, Any]], device_type: str) -> Iterator[Label]:
    """The states that exist now, found in ``optimizer.state`` whatever the optimizer calls them."""
    for position, (parameter, state) in enumerate(list(optimizer.state.items())):
        if isinstance(state, dict):
            name = names[id(parameter)][0] if id(parameter) in names else f"parameter{position}"
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
