"""What a storage is, by identity: parameters, quantisation constants, adapters, gradients, optimizer states, buffers.

Nothing here allocates GPU memory or waits for the GPU: only addresses and sizes are read. A storage is named once; the
first name wins (tied weights). Weights, buffers and optimizer states are looked up when a snapshot is taken. Gradients
come and go with every step, so their addresses are also noted just before each optimizer step, while they are all
alive; a snapshot taken later can then label the gradients that were alive at an earlier peak.
"""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from memtrace.attribution.categories import Purpose
from memtrace.record.backend import import_torch

KEPT_STEPS = 64  # optimizer steps whose gradients stay labelled
Gradient = tuple[int, int, int]  # address, bytes, id of the parameter
_KEPT_LOOKS = 8  # of those after each optimizer's first step, the newest first
# Quantised layers of other libraries (GPTQ, AWQ, EETQ, HQQ) keep their packed weights and constants as buffers.
_BUFFERS = dict.fromkeys(("qweight", "W_q", "weight_packed"), Purpose.QUANTIZED) | dict.fromkeys(
    ("qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point"), Purpose.QUANT_STATE
)
_ADAPTER = re.compile(r"lora_|modules_to_save\.|vera_|ia3_|adapter_")


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
    """A model's parameters and buffers by name, each once, and the modules that keep quantisation constants besides.

    ``is_checkpointed``: a module says that it recomputes its activations.
    """

    model: Any
    parameters: list[tuple[str, Any]]
    buffers: list[tuple[str, Any]]
    quantized: list[tuple[str, Any]]
    is_checkpointed: bool


def contents(model: Any) -> Contents:
    """As ``named_parameters()`` and ``named_buffers()`` would give them, in one pass: going through takes long."""
    parameters: list[tuple[str, Any]] = []
    buffers: list[tuple[str, Any]] = []
    quantized: list[tuple[str, Any]] = []
    checkpointed: list[str] = []
    seen: set[int] = set()

    def walk(module: Any, prefix: str) -> None:
        seen.add(id(module))
        plain = module.__dict__
        for key, parameter in plain["_parameters"].items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                parameters.append((prefix + key, parameter))
        for key, buffer in plain["_buffers"].items():
            buffers.append((prefix + key, buffer))
        if "state" in plain or "quant_state" in plain:
            quantized.append((prefix, module))
        if plain.get("gradient_checkpointing"):
            checkpointed.append(prefix)
        for key, child in plain["_modules"].items():
            if child is not None and id(child) not in seen:
                walk(child, f"{prefix}{key}.")

    walk(model, "")
    return Contents(model, parameters, buffers, quantized, bool(checkpointed))


def storage_of(tensor: Any, device_type: str) -> tuple[int, int] | None:
    """(address, bytes) of a tensor's storage on the recorded device; ``None`` for anything else."""
    if type(tensor).__name__ == "DTensor":
        tensor = tensor._local_tensor  # this rank's shard
    try:  # is_cuda rather than device.type, which takes longer than all the rest
        if not (getattr(tensor, f"is_{device_type}") or getattr(tensor, "is_paged", False)):
            return None
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, AttributeError):  # meta, fake, sparse or wrapper tensors
        return None
    return (address, size) if address and size else None


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Where many objects live, half of a look's time goes into Python's collections, though no label is garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Labels(dict[int, Label]):
    """The first label of every address on one kind of device."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def add(self, tensor: Any, purpose: Purpose, name: str) -> None:
        """Label a tensor's storage, if it is one on the device."""
        found = None if tensor is None else storage_of(tensor, self.device_type)
        if found is not None and found[0] not in self:
            self[found[0]] = Label(*found, purpose, name, getattr(tensor, "is_paged", False))

    def _add_quant_state(self, state: Any, name: str) -> None:
        """The constants of a bitsandbytes ``QuantState``, nested ones included."""
        while state is not None:
            for part in ("absmax", "code", "offset"):
                self.add(getattr(state, part, None), Purpose.QUANT_STATE, f"{name}.{part}")
            state, name = getattr(state, "state2", None), f"{name}.state2"

    def add_model(self, found: Contents, trained: frozenset[int] | None = None) -> None:
        """Parameters, quantisation constants and buffers of a model.

        ``trained`` has the ids of the parameters that are trained, besides adapters, which are known by their names;
        where it is ``None``, ``requires_grad`` decides.
        """
        for name, parameter in found.parameters:
            if _is_packed(parameter):
                self.add(parameter, Purpose.QUANTIZED, name)
                self._add_quant_state(getattr(parameter, "quant_state", None), f"{name}.quant_state")
                self.add(getattr(parameter, "SCB", None), Purpose.QUANT_STATE, f"{name}.SCB")
            else:
                is_trained = parameter.requires_grad if trained is None else id(parameter) in trained
                is_trained = is_trained or _ADAPTER.search(name)
                self.add(parameter, Purpose.PARAMS if is_trained else Purpose.UNQUANTIZED, name)
        for prefix, module in found.quantized:
            plain = module.__dict__  # what is neither parameter, buffer nor module
            for part in ("SCB", "SCBt"):  # bitsandbytes' Linear8bitLt moves them there in the first forward pass
                self.add(getattr(plain.get("state"), part, None), Purpose.QUANT_STATE, f"{prefix}state.{part}")
            self._add_quant_state(plain.get("quant_state"), f"{prefix}quant_state")
        for name, buffer in found.buffers:
            self.add(buffer, _BUFFERS.get(name.rpartition(".")[2], Purpose.BUFFER), name)

    def add_optimizer(self, optimizer: Any, names: dict[int, tuple[str, Any]]) -> None:
        """The states that exist now, found in ``optimizer.state`` whatever the optimizer calls them."""
        for position, (parameter, state) in enumerate(list(optimizer.state.items())):
            if isinstance(state, dict):
                self._add_states(state, names[id(parameter)][0] if id(parameter) in names else f"parameter{position}")

    def _add_states(self, states: dict[Any, Any], name: str) -> None:
        for key, value in list(states.items()):
            if isinstance(value, (dict, list, tuple)):
                self._add_states(value if isinstance(value, dict) else dict(enumerate(value)), f"{name}.{key}")
            else:
                self.add(value, Purpose.OPTIMIZER_STATE, f"{name}.{key}")

    def add_gradients(self, named: Iterable[tuple[str, Any]]) -> None:
        """The gradients that exist now, where they may be read."""
        for name, parameter in () if is_own_thread() else named:
            self.add(parameter.grad, Purpose.GRADS, f"{name}.grad")


def is_own_thread() -> bool:
    """Whether this is one of the recorder's threads beside the program's, which read no ``grad``: backward passes set
    gradients without Python's lock, and reading one that is just let go of ends the program (PyTorch 2.11 and 2.13)."""
    return threading.current_thread().name.startswith("memtrace-")


def _is_packed(parameter: Any) -> bool:
    """Whether a parameter holds quantised values (``Params4bit`` and ``Int8Params``, whatever their storage type)."""
    if getattr(parameter, "quant_state", None) is not None or type(parameter).__name__ == "Int8Params":
        return True
    return not (parameter.dtype.is_floating_point or parameter.dtype.is_complex)


def optimizer_parameters(optimizers: Iterable[Any]) -> list[Any]:
    """Every parameter that the optimizers update, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


class LabelBook:
    """Collects labels of one process's models and optimizers, each with the time at which it was true, without keeping
    any alive."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.knows_optimizers = False  # whether any has stepped or was named
        self._models: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id
        self._optimizers: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._gradients: deque[tuple[int, list[Gradient]]] = deque(maxlen=KEPT_STEPS)  # by when they were noted
        self._got_gradients: set[int] = set()  # ids of parameters
        self._remembered: deque[tuple[int, Labels]] = deque(maxlen=_KEPT_LOOKS)  # (µs, what was there)

    def remember(self, models: list[Contents], optimizers: list[Any], time_us: int) -> None:
        """Keep what is where now, for a snapshot that is taken after the program has let go of its objects."""
        self._remembered.appendleft((time_us, self._present(models, optimizers, self._names(models, optimizers))))

    def add_model(self, model: Any) -> None:
        """Know a model, whether or not the garbage collector would find it."""
        self._models[id(model)] = model

    def add_optimizer(self, optimizer: Any) -> None:
        """Know an optimizer. From the first one on gradients are noted before steps, no more after backward passes."""
        if not self.knows_optimizers:
            self.knows_optimizers = True
            self._gradients.clear()
        self._optimizers[id(optimizer)] = optimizer

    def gradients(self, parameters: Iterable[Any] | None = None) -> list[Gradient]:
        """The gradients there are, of ``parameters`` or else of what was added; about a µs each. Not to be called in an
        own thread."""
        if parameters is None:
            parameters = optimizer_parameters(list(self._optimizers.values()))
            parameters = parameters or [p for model in self.alive()[0] for _, p in model.parameters]
        rows = []
        for parameter in parameters:
            grad = parameter.grad  # made anew each time it is asked for
            found = None if grad is None else storage_of(grad, self.device_type)
            if found is not None:
                rows.append((*found, id(parameter)))
        return rows

    def note_gradients(self, parameters: Iterable[Any], time_us: int) -> None:
        """Remember all gradients there are."""
        if rows := self.gradients(parameters):
            self._gradients.append((time_us, rows))
            self._got_gradients.update(row[2] for row in rows)

    def alive(self, search: bool = False) -> tuple[list[Contents], list[Any]]:
        """(outermost models with weights, optimizers) that were added and are alive; with ``search`` also any that the
        garbage collector knows, which takes tenths of a second where there are many objects."""
        models, optimizers = list(self._models.values()), list(self._optimizers.values())
        if search:
            torch, tracked = import_torch(), gc.get_objects()
            kinds = set(map(type, tracked))  # asked by type(), not isinstance, which would wake lazy proxies
            modules = {kind for kind in kinds if issubclass(kind, torch.nn.Module)}
            steppers = {kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
            models += [item for item in tracked if type(item) in modules]
            optimizers += [item for item in tracked if type(item) in steppers]
        each = {id(item): item for item in optimizers if hasattr(item, "param_groups")}
        return [contents(model) for model in _outermost(models)], list(each.values())

    def _trained(self, models: list[Contents], optimizers: list[Any]) -> frozenset[int]:
        """Ids of the parameters that are trained: those that got a gradient.

        Before any did, those that an optimizer updates; without one, those of models in training mode that require one.
        """
        in_models = [p for model in models for _, p in model.parameters]
        optimized = optimizer_parameters(optimizers)
        if got := self._got_gradients:  # else a backward pass that failed may have reached some of them only
            others = [] if is_own_thread() else [p for p in [*in_models, *optimized] if id(p) not in got]
            return frozenset(got | {id(p) for p in others if p.grad is not None})
        if not optimized:
            optimized = [p for model in models if model.model.training for _, p in model.parameters]
        return frozenset(id(p) for p in optimized if p.requires_grad)

    @staticmethod
    def _names(models: list[Contents], optimizers: list[Any]) -> dict[int, tuple[str, Any]]:
        """(name, parameter) by the parameter's id; the first name wins."""
        names: dict[int, tuple[str, Any]] = {}
        for model in models:
            for name, parameter in model.parameters:
                names.setdefault(id(parameter), (name, parameter))
        for position, parameter in enumerate(optimizer_parameters(optimizers)):
            names.setdefault(id(parameter), (f"parameter{position}", parameter))
        return names

    def _present(self, models: list[Contents], optimizers: list[Any], names: dict[int, tuple[str, Any]]) -> Labels:
        """Weights, buffers and optimizer states."""
        trained = self._trained(models, optimizers)
        labels = Labels(self.device_type)
        for model in models:
            labels.add_model(model, trained)
        for optimizer in optimizers:
            labels.add_optimizer(optimizer, names)
        return labels

    def collect(
        self, models: list[Contents], optimizers: list[Any], since_us: int, gradients: Iterable[Gradient] = ()
    ) -> list[dict[str, Any]]:
        """Rows for the snapshot's ``labels``, for events from ``since_us`` on. ``gradients`` were found before, in a
        thread that may look for them.

        ``from_time_us`` and ``until_time_us`` say when the storage at ``address`` was seen to be this; ``null`` means
        open: from an unknown beginning, or up to the snapshot.
        """
        names = self._names(models, optimizers)
        present = self._present(models, optimizers, names)
        present.add_gradients(names.values())
        for address, size, parameter in gradients:
            if address not in present and parameter in names:
                present[address] = Label(address, size, Purpose.GRADS, f"{names[parameter][0]}.grad")
        rows = [_row(label, None) for label in present.values()]
        known = {(label.address, label.name) for label in present.values()}
        for time_us, labels in list(self._remembered):
            new = [label for label in labels.values() if (label.address, label.name) not in known]
            known.update((label.address, label.name) for label in new)
            rows += [_row(label, time_us) for label in new if time_us >= since_us]
        for time_us, noted in list(self._gradients):  # the program may note more meanwhile
            if time_us >= since_us:
                for address, size, parameter in noted:
                    name = names[parameter][0] if parameter in names else "parameter"
                    rows.append(_row(Label(address, size, Purpose.GRADS, f"{name}.grad"), time_us))
        return rows


def _outermost(modules: list[Any]) -> list[Any]:
    """Those that hold weights and are not part of another, each once."""
    distinct = {id(module): module for module in modules}
    inner = {id(child) for module in distinct.values() for child in module.children()}
    return [module for key, module in distinct.items() if key not in inner and _holds_weights(module)]


def _holds_weights(module: Any) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _row(label: Label, seen_us: int | None) -> dict[str, Any]:
    """``seen_us``: the one time at which it was seen to be there; ``None`` for what is there now."""
    row: dict[str, Any] = {
        "address": label.address,
        "bytes": label.size_bytes,
        "category": label.purpose.category.value,
        "subcategory": label.purpose.subcategory,
        "name": label.name,
        "from_time_us": seen_us,
        "until_time_us": seen_us,
    }
    return row | {"outside": True} if label.outside else row
