"""Frozen dataclasses of arrays to one block of bytes and back: what a file of the cache holds.

Only classes that the caller names are made again. The description is JSON, the arrays follow it as they are, so that a
mapped file is used without being read; an array of one repeated value takes the room of one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 64
_DTYPES = {"<i8", "<i4", "<i2", "<u8", "|u1", "|b1", "|i1", "<u4", "<u2", "<f8"}


_PLAIN = (type(None), bool, int, float, str)


class Unfit(ValueError):
    """A value that can't be stored, or bytes that hold none."""


class _Writer:
    def __init__(self, classes: Mapping[str, type]) -> None:
        self._names = {kind: name for name, kind in classes.items()}
        self.arrays: list[NDArray[Any]] = []
        self._known: dict[int, dict[str, Any]] = {}  # an array that several hold is stored once

    def describe(self, value: Any) -> Any:
        """JSON for a value; arrays are put aside and named by number."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, np.ndarray):
            if id(value) not in self._known:
                self._known[id(value)] = self._array(value)
            return {"array": self._known[id(value)]}
        name = self._names.get(type(value))
        if name is not None:
            return {"class": name, "fields": {f: self.describe(getattr(value, f)) for f in _fields(type(value))}}
        if type(value) is tuple and value and type(value[0]) in self._names and {*map(type, value)} == {type(value[0])}:
            columns = [[getattr(item, name) for item in value] for name in _fields(type(value[0]))]
            if all(type(part) in _PLAIN for column in columns for part in column):  # tens of thousands of frames
                return {"rows": self._names[type(value[0])], "columns": columns}
        if type(value) in (tuple, list):
            return {type(value).__name__: [self.describe(item) for item in value]}
        if type(value) is dict:
            return {"dict": [[self.describe(key), self.describe(item)] for key, item in value.items()]}
        raise Unfit(type(value).__name__)

    def _array(self, value: NDArray[Any]) -> dict[str, Any]:
        if value.ndim != 1 or value.dtype.str not in _DTYPES:
            raise Unfit(value.dtype.str)
        repeated = len(value) > 1 and value.strides == (0,)
        self.arrays.append(np.ascontiguousarray(value[:1] if repeated else value))
        return {
            "dtype": value.dtype.str,
            "count": len(value),
            "repeated": repeated,
            "number": len(self.arrays) - 1,
        }


def _fields(kind: Any) -> tuple[str, ...]:
    return kind._fields if issubclass(kind, tuple) else tuple(f.name for f in dataclasses.fields(kind))


def pack(value: Any, classes: Mapping[str, type]) -> list[bytes | memoryview]:
    """The parts of the stored form, in order. Raises Unfit for what can't be stored."""
    writer = _Writer(classes)
    tree = writer.describe(value)
    sizes = [array.nbytes for array in writer.arrays]
    try:
        head = json.dumps({"tree": tree, "sizes": sizes}, separators=(",", ":")).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise Unfit(str(error)) from None
    parts: list[bytes | memoryview] = [len(head).to_bytes(8, "little"), head, bytes(-(8 + len(head)) % _ALIGN)]
    for array in writer.arrays:
        if array.nbytes:
            parts.append(array.data.cast("B"))
        parts.append(bytes(-array.nbytes % _ALIGN))
    return parts


def unpack(data: memoryview, classes: Mapping[str, type]) -> Any:
    """What :func:`pack` was given. Arrays share ``data``. Raises Unfit for anything else.

    Nothing but the description is read here: arrays over a mapped file are read where they are looked at.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        head = json.loads(bytes(data[8 : 8 + length]))
        places: list[memoryview] = []
        at = -(-(8 + length) // _ALIGN) * _ALIGN
        for size in head["sizes"]:
            places.append(data[at : at + size])
            at += -(-size // _ALIGN) * _ALIGN
        if at != len(data):
            raise Unfit("length")
        return _build(head["tree"], places, classes)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise Unfit(str(error)) from None


def _build(node: Any, places: list[memoryview], classes: Mapping[str, type]) -> Any:
    """What a piece of the description stands for."""
    if not isinstance(node, dict):
        return node
    ((kind, content), *more) = node.items()
    if kind == "array":
        return _array(content, places[content["number"]])
    if kind == "rows":
        return tuple(map(classes[content], *more[0][1]))
    if kind == "class":
        return classes[content](**{name: _build(item, places, classes) for name, item in more[0][1].items()})
    if kind == "dict":
        return {_build(key, places, classes): _build(item, places, classes) for key, item in content}
    items = [_build(item, places, classes) for item in content]
    return tuple(items) if kind == "tuple" else items


def _array(entry: dict[str, Any], data: memoryview) -> NDArray[Any]:
    if entry["dtype"] not in _DTYPES:
        raise Unfit("dtype")
    value: NDArray[Any] = np.frombuffer(data, dtype=entry["dtype"])
    if len(value) != (1 if entry["repeated"] else entry["count"]):
        raise Unfit("length")
    return np.broadcast_to(value[0], (entry["count"],)) if entry["repeated"] else value
