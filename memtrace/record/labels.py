"""Labels by identity, each with the time at which it was true.

Weights, buffers and optimizer states are looked up when a snapshot is taken. Gradients come and go with every step,
so their addresses are also noted just before each optimizer step, while they are all alive; a snapshot taken later
can then label the gradients that were alive at an earlier peak.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from memtrace.attribution.categories import Purpose
from memtrace.record import identity
from memtrace.record.backend import import_torch
from memtrace.record.identity import Contents, Label

KEPT_STEPS = 64  # optimizer steps whose gradients stay labelled


class LabelBook:
    """Collects labels of one process's models and optimizers, without keeping either alive."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._models: dict[int, weakref.ref[Any]] = {}
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._gradients: deque[tuple[int, list[tuple[int, int, int]]]] = deque(maxlen=KEPT_STEPS)  # see note_gradients
        self._got_gradients: set[int] = set()  # ids of parameters
        self._remembered: list[tuple[int, Label]] = []  # (µs, label)

    def remember(self, models: list[Contents], optimizers: list[Any], time_us: int) -> None:
        """Keep what is where now, for a snapshot that is taken after the program has let go of its objects."""
        now = self._present(models, optimizers, self._names(models, optimizers))
        known = {(label.address, label.name) for label in now}
        earlier = [row for row in self._remembered if (row[1].address, row[1].name) not in known]
        self._remembered = [(time_us, label) for label in now] + earlier

    def add_model(self, model: Any) -> None:
        """Know a model, whether or not the garbage collector would find it."""
        _keep(self._models, model)

    def add_optimizer(self, optimizer: Any) -> None:
        """Know an optimizer. From the first one on gradients are noted before steps, no more after backward passes."""
        if not self._optimizers:
            self._gradients.clear()
        _keep(self._optimizers, optimizer)

    def note_gradients(self, parameters: Iterable[Any], time_us: int) -> None:
        """Remember (address, bytes, id of the parameter) of all gradients there are. About a µs a gradient."""
        rows = []
        for parameter in parameters:
            found = identity.storage_of(parameter.grad, self.device_type) if parameter.grad is not None else None
            if found is not None:
                rows.append((*found, id(parameter)))
        if rows:
            self._gradients.append((time_us, rows))
            self._got_gradients.update(row[2] for row in rows)

    @property
    def knows_optimizers(self) -> bool:
        """Whether any optimizer has stepped or was named."""
        return bool(self._optimizers)

    def known(self) -> tuple[list[Contents], list[Any]]:
        """(models, optimizers) that were added and are alive; nothing is searched for."""
        models = [model for ref in self._models.values() if (model := ref()) is not None]
        optimizers = [item for ref in self._optimizers.values() if (item := ref()) is not None]
        return [identity.contents(model) for model in _outermost(models)], optimizers

    def found(self) -> tuple[list[Contents], list[Any]]:
        """(outermost models with weights, optimizers) that are alive: those added, then any the garbage collector
        knows. Takes tenths of a second where there are many objects."""
        torch = import_torch()
        models, optimizers = ([ref() for ref in refs.values()] for refs in (self._models, self._optimizers))
        tracked = gc.get_objects()
        kinds = set(map(type, tracked))  # asked by type(), not isinstance, which would wake lazy proxies
        modules = {kind for kind in kinds if issubclass(kind, torch.nn.Module)}
        steppers = {kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
        models += [item for item in tracked if type(item) in modules]
        optimizers += [item for item in tracked if type(item) in steppers]
        each = {id(item): item for item in optimizers if hasattr(item, "param_groups")}
        outermost = _outermost([model for model in models if model is not None])
        return [identity.contents(model) for model in outermost], list(each.values())

    def _trained(self, models: list[Contents], optimizers: list[Any]) -> frozenset[int]:
        """Ids of the parameters that are trained: those that got a gradient.

        Before any did, those that an optimizer updates; without one, those of models in training mode that require one.
        """
        in_models = [p for model in models for _, p in model.parameters]
        optimized = identity.optimizer_parameters(optimizers)
        if self._got_gradients:  # else a backward pass that failed may have reached some of them only
            return frozenset(self._got_gradients | {id(p) for p in [*in_models, *optimized] if p.grad is not None})
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
        for position, parameter in enumerate(identity.optimizer_parameters(optimizers)):
            names.setdefault(id(parameter), (f"parameter{position}", parameter))
        return names

    def _present(self, models: list[Contents], optimizers: list[Any], names: dict[int, tuple[str, Any]]) -> list[Label]:
        """Weights, buffers and optimizer states."""
        trained = self._trained(models, optimizers)
        labels: list[Label] = []
        for model in models:
            labels += identity.model_labels(model, self.device_type, trained)
        for optimizer in optimizers:
            labels += identity.optimizer_labels(optimizer, names, self.device_type)
        return identity.unique(labels)

    def collect(self, models: list[Contents], optimizers: list[Any], since_us: int) -> list[dict[str, Any]]:
        """Rows for the snapshot's ``labels``, for events from ``since_us`` on.

        ``from_time_us`` and ``until_time_us`` say when the storage at ``address`` was seen to be this; ``null`` means
        open: from an unknown beginning, or up to the snapshot.
        """
        names = self._names(models, optimizers)
        present = self._present(models, optimizers, names)
        present = identity.unique([*present, *identity.gradient_labels(names.values(), self.device_type)])
        rows = [_row(label, None) for label in present]
        known = {(label.address, label.name) for label in present}
        for time_us, label in self._remembered:
            if time_us >= since_us and (label.address, label.name) not in known:
                rows.append(_row(label, time_us))
        for time_us, gradients in self._gradients:
            if time_us >= since_us:
                for address, size, parameter in gradients:
                    name = names[parameter][0] if parameter in names else "parameter"
                    rows.append(_row(Label(address, size, Purpose.GRADS, f"{name}.grad"), time_us))
        return rows


def _keep(refs: dict[int, weakref.ref[Any]], item: Any) -> None:
    known = refs.get(id(item))
    if known is None or known() is not item:
        refs[id(item)] = weakref.ref(item)


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
    if label.outside:
        row["outside"] = True
    return row
