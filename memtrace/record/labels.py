"""Labels by identity, each with the time at which it was true.

Weights, buffers and optimizer states are looked up when a snapshot is taken. Gradients come and go with every step,
so their addresses are also noted just before each optimizer step, while they are all alive; a snapshot taken later
can then label the gradients that were alive at an earlier peak.
"""

from __future__ import annotations

import gc
import weakref
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memtrace.attribution.categories import Purpose
from memtrace.record import identity
from memtrace.record.backend import import_torch
from memtrace.record.identity import Label

KEPT_STEPS = 64  # optimizer steps whose gradients stay labelled


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Addresses of all gradients at one moment; ``parameters`` are ids, in the same order."""

    time_us: int
    address: array[int]
    size_bytes: array[int]
    parameter: array[int]


class LabelBook:
    """Collects labels of one process's models and optimizers, without keeping either alive."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._models: dict[int, weakref.ref[Any]] = {}
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._gradients: deque[_Gradients] = deque(maxlen=KEPT_STEPS)
        self._remembered: list[dict[str, Any]] = []

    def remember(self, models: list[Any], optimizers: list[Any], time_us: int) -> None:
        """Keep what is where now, for a snapshot that is taken after the program has let go of its objects."""
        rows = [row for row in self.collect(models, optimizers, time_us + 1) if row["subcategory"] != "grads"]
        for row in rows:
            row["from_time_us"] = row["until_time_us"] = time_us
        known = {(row["address"], row["name"]) for row in rows}
        self._remembered = rows + [row for row in self._remembered if (row["address"], row["name"]) not in known]

    def add_model(self, model: Any) -> None:
        """Know a model, whether or not the garbage collector would find it."""
        self._models.setdefault(id(model), weakref.ref(model))

    def add_optimizer(self, optimizer: Any) -> None:
        """Know an optimizer."""
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is not optimizer:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    def note_gradients(self, optimizer: Any, time_us: int) -> None:
        """Remember where the gradients are that ``optimizer`` is about to use. Costs about a µs a gradient."""
        row = _Gradients(time_us, array("Q"), array("Q"), array("Q"))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                found = identity.storage_of(grad, self.device_type) if grad is not None else None
                if found is not None:
                    row.address.append(found[0])
                    row.size_bytes.append(found[1])
                    row.parameter.append(id(parameter))
        if row.address:
            self._gradients.append(row)

    def models(self) -> list[Any]:
        """Outermost modules that are alive: those added, and any other that the garbage collector knows."""
        module_class = import_torch().nn.Module
        found = {id(model): model for ref in self._models.values() if (model := ref()) is not None}
        found |= {id(item): item for item in _instances(module_class)}
        inner = {id(child) for module in found.values() for child in module.children()}
        roots = [module for key, module in found.items() if key not in inner and _holds_weights(module)]
        return sorted(roots, key=lambda module: id(module) not in self._models)

    def optimizers(self) -> list[Any]:
        """Optimizers that are alive."""
        found = {id(item): item for ref in self._optimizers.values() if (item := ref()) is not None}
        found |= {id(item): item for item in _instances(import_torch().optim.Optimizer)}
        return [optimizer for optimizer in found.values() if hasattr(optimizer, "param_groups")]

    def collect(self, models: list[Any], optimizers: list[Any], since_us: int) -> list[dict[str, Any]]:
        """Rows for the snapshot's ``labels``, for events from ``since_us`` on.

        ``from_time_us`` and ``until_time_us`` say when the storage at ``address`` was seen to be this; ``null`` means
        open: from an unknown beginning, or up to the snapshot.
        """
        trained = frozenset(id(p) for p in identity.optimizer_parameters(optimizers))
        named = [pair for model in models for pair in _named(model)]
        names = {id(parameter): name for name, parameter in reversed(named)}
        for position, parameter in enumerate(identity.optimizer_parameters(optimizers)):
            if id(parameter) not in names:
                names[id(parameter)] = f"parameter{position}"
                named.append((names[id(parameter)], parameter))
        present: list[Label] = []
        for model in models:
            present += identity.model_labels(model, self.device_type, trained)
        for optimizer in optimizers:
            present += identity.optimizer_labels(optimizer, names, self.device_type)
        present += identity.gradient_labels(named, self.device_type)
        rows = [_row(label, None, None) for label in identity.unique(present)]
        known = {(row["address"], row["name"]) for row in rows}
        rows += [
            row
            for row in self._remembered
            if row["from_time_us"] >= since_us and (row["address"], row["name"]) not in known
        ]
        for seen in self._gradients:
            if seen.time_us >= since_us:
                rows += _earlier(seen, names)
        return rows


def _holds_weights(module: Any) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _named(model: Any) -> Iterable[tuple[str, Any]]:
    yield from model.named_parameters()


def _instances(cls: type) -> list[Any]:
    """Every tracked instance; ``type()`` is asked, not ``isinstance``, which would wake lazy proxies."""
    tracked = gc.get_objects()
    wanted = {kind for kind in set(map(type, tracked)) if issubclass(kind, cls)}
    return [item for item in tracked if type(item) in wanted]


def _row(label: Label, from_us: int | None, until_us: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "address": label.address,
        "bytes": label.size_bytes,
        "category": label.purpose.category,
        "subcategory": label.purpose.subcategory,
        "name": label.name,
        "from_time_us": from_us,
        "until_time_us": until_us,
    }
    if label.outside:
        row["outside"] = True
    return row


def _earlier(seen: _Gradients, names: dict[int, str]) -> list[dict[str, Any]]:
    """Rows of gradients that were alive just before one optimizer step."""
    rows = []
    for address, size, parameter in zip(seen.address, seen.size_bytes, seen.parameter, strict=True):
        name = f"{names.get(parameter, 'parameter')}.grad"
        rows.append(_row(Label(address, size, Purpose.GRADS, name), seen.time_us, seen.time_us))
    return rows
