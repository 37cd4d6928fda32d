"""``dataclass`` of the standard library, for classes that are ``frozen``, defined in a quarter of the time.

The library's own compiles seven methods for every class (up to Python 3.12 one by one), which took a command that needs
a hundred of them longer than reading a small recording. Here ``__init__`` alone is compiled; the others are functions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, FrozenInstanceError
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(kind=None, /, *, frozen=False, eq=True, slots=False, **how):
        """As ``dataclasses.dataclass``, which also makes those that are not frozen."""
        if not frozen:
            return dataclasses.dataclass(kind, eq=eq, slots=slots, **how)
        define = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, **how)

        def frozen_one(kind):
            own = set(vars(kind))
            made = define(kind)
            methods = _methods(made, eq)
            if slots:  # what pickle and copy do by themselves would set attributes
                methods |= {"__getstate__": _state, "__setstate__": _set_state}
            for name, method in methods.items():
                if name not in own:
                    setattr(made, name, method)
            return made

        return frozen_one


def _methods(kind: Any, has_eq: bool) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    methods = {"__init__": _init(kind, fields), "__repr__": _repr, "__setattr__": _refuse, "__delattr__": _refuse}
    compared = [field.name for field in fields if field.compare]
    if has_eq and compared:
        values = attrgetter(*compared)
        methods["__eq__"] = lambda one, other: (
            values(one) == values(other) if other.__class__ is one.__class__ else NotImplemented
        )
        methods["__hash__"] = lambda one: hash(values(one))
    return methods


def _init(kind: Any, fields: tuple[dataclasses.Field[Any], ...]) -> Any:
    names: dict[str, Any] = {"put": object.__setattr__, "MISSING": MISSING}
    arguments: dict[bool, list[str]] = {False: ["self"], True: ["*"]}  # by whether they are given by name only
    lines = []
    for field in fields:
        name, value = field.name, field.name
        if field.default is not MISSING:
            names[f"default_{name}"] = field.default
        elif field.default_factory is not MISSING:
            names[f"make_{name}"], value = field.default_factory, f"make_{name}() if {name} is MISSING else {name}"
        if field.init:
            default = f"=default_{name}" if field.default is not MISSING else "=MISSING" if value != name else ""
            arguments[bool(field.kw_only)].append(name + default)
        elif field.default is not MISSING or value != name:
            value = f"default_{name}" if value == name else f"make_{name}()"
        else:
            continue
        lines.append(f" put(self, {name!r}, {value})")
    if hasattr(kind, "__post_init__"):
        lines.append(" self.__post_init__()")
    given = arguments[False] + (arguments[True] if len(arguments[True]) > 1 else [])
    exec(f"def __init__({', '.join(given)}):\n" + "\n".join(lines or [" pass"]), names)
    made = names["__init__"]
    made.__qualname__ = f"{kind.__qualname__}.__init__"
    made.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    return made


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _refuse(self: Any, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
