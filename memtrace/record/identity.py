"""What a storage is, by identity: parameters, quantisation constants, adapters, gradients, optimizer states, buffers.

Nothing here allocates GPU memory or waits for the GPU: only addresses and sizes are read. A storage is named once; the
first name wins (tied weights).
"""

from __future__ import annotations

from collections.abc import Iterable
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
    if type(tensor).__name__ == "DTensor":
        tensor = tensor._local_tensor  # this rank's shard
    try:
        if tensor.device.type != device_type and not getattr(tensor, "is_paged", False):
            return None
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, AttributeError):  # meta, fake, sparse or wrapper tensors
        return None
    return (address, size) if address and size else None


class _Labels(list[Label]):
    """Labels of the tensors on one device, in order."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def add(self, tensor: Any, kind: Purpose, name: str) -> None:
        found = storage_of(tensor, self.device_type) if tensor is not None else None
        if found is not None:
            self.append(Label(found[0], found[1], kind, name, getattr(tensor, "is_paged", False)))

    def add_quant_state(self, state: Any, name: str) -> None:
        """The constants of a bitsandbytes ``QuantState``, nested ones included."""
        while state is not None:
            for part in ("absmax", "code", "offset"):
                self.add(getattr(state, part, None), Purpose.QUANT_STATE, f"{name}.{part}")
            state, name = getattr(state, "state2", None), f"{name}.state2"

    def add_nested(self, value: Any, name: str) -> None:
        """Whatever an optimizer keeps for a parameter."""
        if isinstance(value, dict):
            for key, item in value.items():
                self.add_nested(item, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                self.add_nested(item, f"{name}.{index}")
        else:
            self.add(value, Purpose.OPTIMIZER_STATE, name)


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


def model_labels(found: Contents, device_type: str, trained: frozenset[int] | None = None) -> list[Label]:
    """Parameters, quantisation constants and buffers of a model; for ``trained`` see :func:`is_trained`."""
    labels = _Labels(device_type)
    for name, parameter in found.parameters:
        if _is_packed(parameter):
            labels.add(parameter, Purpose.QUANTIZED, name)
            labels.add_quant_state(getattr(parameter, "quant_state", None), f"{name}.quant_state")
            labels.add(getattr(parameter, "SCB", None), Purpose.QUANT_STATE, f"{name}.SCB")
        else:
            kind = Purpose.PARAMS if is_trained(name, parameter, trained) else Purpose.UNQUANTIZED
            labels.add(parameter, kind, name)
    for name, module in found.modules:
        plain = module.__dict__  # what is neither parameter, buffer nor module
        if "state" in plain:  # bitsandbytes' Linear8bitLt moves its constants there in the first forward pass
            for part in ("SCB", "SCBt"):
                labels.add(getattr(plain["state"], part, None), Purpose.QUANT_STATE, f"{name}.state.{part}")
        if "quant_state" in plain:
            labels.add_quant_state(plain["quant_state"], f"{name}.quant_state")
        for key, buffer in module._buffers.items():
            labels.add(buffer, _BUFFERS.get(key, Purpose.BUFFER), f"{name}.{key}" if name else key)
    return labels


def gradient_labels(named: Iterable[tuple[str, Any]], device_type: str) -> list[Label]:
    """The gradients that exist now."""
    labels = _Labels(device_type)
    for name, parameter in named:
        if parameter.grad is not None:
            labels.add(parameter.grad, Purpose.GRADS, f"{name}.grad")
    return labels


def optimizer_labels(optimizer: Any, names: dict[int, tuple[str, Any]], device_type: str) -> list[Label]:
    """The states that exist now, found in ``optimizer.state`` whatever the optimizer calls them."""
    labels = _Labels(device_type)
    for position, (parameter, state) in enumerate(list(optimizer.state.items())):
        if isinstance(state, dict):
            labels.add_nested(state, names[id(parameter)][0] if id(parameter) in names else f"parameter{position}")
    return labels


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
