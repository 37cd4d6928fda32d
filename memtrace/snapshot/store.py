"""Frozen dataclasses of arrays to one block of bytes and back: what the index file holds.

Only classes that the caller names are made again. The description is JSON, the arrays follow it; an array of one
repeated value takes the room of one, and integers are stored as narrow as their values allow.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 64
_DTYPES = {"<i8", "<i4", "<i2", "<u8", "|u1", "|b1", "|i1", "<u4", "<u2", "<f8"}


class Unfit(ValueError):
    """A value that can't be stored, or bytes that hold none."""


class _Writer:
    def __init__(self, classes: Mapping[str, type]) -> None:
        self._names = {kind: name for name, kind in classes.items()}
        self.arrays: list[NDArray[Any]] = []

    def describe(self, value: Any) -> Any:
        """JSON for a value; arrays are put aside and named by number."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.ndarray):
            return {"array": self._array(value)}
        name = self._names.get(type(value))
        if name is not None and dataclasses.is_dataclass(value):
            return {
                "class": name,
                "fields": {f.name: self.describe(getattr(value, f.name)) for f in dataclasses.fields(value)},
            }
        if name is not None and isinstance(value, tuple):
            return {"class": name, "items": [self.describe(item) for item in value]}
        if type(value) in (tuple, list):
            return {type(value).__name__: [self.describe(item) for item in value]}
        if type(value) is dict:
            return {"dict": [[self.describe(key), self.describe(item)] for key, item in value.items()]}
        raise Unfit(type(value).__name__)

    def _array(self, value: NDArray[Any]) -> dict[str, Any]:
        dtype = value.dtype.str
        if value.ndim != 1 or dtype not in _DTYPES:
            raise Unfit(dtype)
        entry: dict[str, Any] = {"dtype": dtype, "count": len(value)}
        if len(value) > 1 and value.strides == (0,):
            value = value[:1]
            entry["repeated"] = True
        stored = _narrow(value)
        entry |= {"stored": stored.dtype.str, "number": len(self.arrays)}
        self.arrays.append(np.ascontiguousarray(stored))
        return entry


def _narrow(value: NDArray[Any]) -> NDArray[Any]:
    if value.dtype != np.int64 or not len(value):
        return value
    low, high = int(value.min()), int(value.max())
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return value.astype(dtype)
    return value


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


class Stored:
    """What :func:`pack` made, read piece by piece through ``read(first, stop)``, which gives those bytes of it.

    Raises Unfit for bytes that are something else.
    """

    def __init__(self, read: Callable[[int, int], memoryview], classes: Mapping[str, type]) -> None:
        self._read = read
        self._classes = classes
        self._places: list[tuple[int, int]] = []
        with _fit():
            length = int.from_bytes(read(0, 8), "little")
            head = json.loads(bytes(read(8, 8 + length)))
            at = -(-(8 + length) // _ALIGN) * _ALIGN
            for size in head["sizes"]:
                self._places.append((at, at + size))
                at += -(-size // _ALIGN) * _ALIGN
            self.root = Node(self, head["tree"])

    def build(self, node: Any) -> Any:
        """What a piece of the description stands for."""
        if not isinstance(node, dict):
            return node
        ((kind, content), *more) = node.items()
        if kind == "array":
            return self.array(content, 0, content["count"])
        if kind == "class":
            made = self._classes[content]
            ((part, values),) = more
            if part == "items":
                return made(*map(self.build, values))
            return made(**{name: self.build(item) for name, item in values.items()})
        items = map(self.build, content) if kind in ("tuple", "list") else None
        if items is not None:
            return tuple(items) if kind == "tuple" else list(items)
        return {self.build(key): self.build(item) for key, item in content}

    def array(self, entry: dict[str, Any], first: int, stop: int) -> NDArray[Any]:
        """Entries ``first`` to ``stop - 1`` of an array; no more of it is read."""
        if entry["dtype"] not in _DTYPES or entry["stored"] not in _DTYPES:
            raise Unfit("dtype")
        dtype = np.dtype(entry["stored"])
        at, end = self._places[entry["number"]]
        count = 1 if entry.get("repeated") else entry["count"]
        if end - at != count * dtype.itemsize or not 0 <= first <= stop <= entry["count"]:
            raise Unfit("length")
        low, high = (0, 1) if entry.get("repeated") else (first, stop)
        stored: NDArray[Any] = np.frombuffer(
            self._read(at + low * dtype.itemsize, at + high * dtype.itemsize), dtype=dtype
        )
        value = stored.astype(entry["dtype"], copy=False)
        return np.broadcast_to(value[0], (stop - first,)) if entry.get("repeated") else value


class Node:
    """A place in what was stored: nothing of it is read until it is asked for."""

    def __init__(self, stored: Stored, described: Any) -> None:
        self._stored = stored
        self._described = described

    def value(self) -> Any:
        """All of it. Arrays may share the bytes that were read."""
        with _fit():
            return self._stored.build(self._described)

    def is_none(self) -> bool:
        """Whether None is stored here."""
        return self._described is None

    def is_array(self) -> bool:
        """Whether an array is stored here."""
        return isinstance(self._described, dict) and "array" in self._described

    def count(self) -> int:
        """Entries of an array."""
        with _fit():
            return int(self._described["array"]["count"])

    def part(self, first: int, stop: int) -> NDArray[Any]:
        """Entries ``first`` to ``stop - 1`` of an array."""
        with _fit():
            return self._stored.array(self._described["array"], first, stop)

    def fields(self) -> dict[Any, Node]:
        """The parts: a dataclass's fields by name, a dictionary's values by key, a tuple's or list's by position."""
        with _fit():
            ((kind, content), *more) = self._described.items()
            if kind == "class":
                ((_, values),) = more
                parts = values if isinstance(values, dict) else dict(enumerate(values))
            elif kind == "dict":
                parts = {self._stored.build(key): item for key, item in content}
            else:
                parts = dict(enumerate(content))
            return {key: Node(self._stored, item) for key, item in parts.items()}


@contextmanager
def _fit() -> Iterator[None]:
    """Whatever odd bytes make Python raise is one error."""
    try:
        yield
    except Unfit:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise Unfit(str(error)) from None


def unpack(data: memoryview, classes: Mapping[str, type]) -> Any:
    """What :func:`pack` was given. Arrays may share ``data``. Raises Unfit for anything else."""
    return Stored(lambda first, stop: data[first:stop], classes).root.value()
