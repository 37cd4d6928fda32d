"""Frozen dataclasses of arrays to one block of bytes and back: what a file of the cache holds.

A pickle that names no classes but those of the caller, behind its digest. The arrays follow it as they are, so that a
mapped file is used without being read; an array of one repeated value takes the room of one.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 64
_DIGEST_BYTES, _NUMBER_BYTES = 32, 8


class Unfit(ValueError):
    """A value that can't be stored, or bytes that hold none."""


class _Writer(pickle.Pickler):
    def __init__(self, out: io.BytesIO, classes: Collection[type]) -> None:
        super().__init__(out, protocol=5)
        self._classes = classes
        self.parts: list[bytes | memoryview] = []
        self.end = 0  # of the arrays, from where they begin

    def reducer_override(self, value: Any) -> Any:
        """What stands for an array, or for an object of a class that is known."""
        if isinstance(value, np.ndarray):
            return self._array(value)
        if value is _array or (value if isinstance(value, type) else type(value)) in self._classes:
            return NotImplemented
        raise Unfit(type(value).__name__)

    def _array(self, value: NDArray[Any]) -> Any:
        if value.ndim != 1 or value.dtype.kind not in "biuf":
            raise Unfit(value.dtype.str)
        repeated = len(value) > 1 and value.strides == (0,)
        stored = np.ascontiguousarray(value[:1] if repeated else value)
        start = self.end
        self.parts += [stored.data.cast("B") if stored.nbytes else b"", bytes(-stored.nbytes % _ALIGN)]
        self.end += -(-stored.nbytes // _ALIGN) * _ALIGN
        return _array, (stored.dtype.str, len(stored), start, len(value))


def _array(arrays: memoryview, dtype: str, stored: int, start: int, count: int) -> NDArray[Any]:
    value: NDArray[Any] = np.frombuffer(arrays, dtype, stored, start) if stored else np.zeros(0, dtype)
    return value if stored == count else np.broadcast_to(value[0], (count,))


class _Reader(pickle.Unpickler):
    def __init__(self, head: io.BytesIO, known: dict[tuple[str, str], Any]) -> None:
        super().__init__(head)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """A class that is known; Unfit for any other."""
        if (module, name) not in self._known:
            raise Unfit(name)
        return self._known[module, name]


def pack(value: Any, classes: Collection[type]) -> list[bytes | memoryview]:
    """The parts of the stored form, in order. Raises Unfit for what can't be stored."""
    out = io.BytesIO()
    writer = _Writer(out, classes)
    try:
        writer.dump(value)
    except (pickle.PicklingError, RecursionError) as error:
        raise Unfit(str(error)) from None
    head = writer.end.to_bytes(_NUMBER_BYTES, "little") + out.getvalue()
    start = _DIGEST_BYTES + _NUMBER_BYTES + len(head)
    digest = blake2b(head, digest_size=_DIGEST_BYTES).digest()
    return [digest, len(head).to_bytes(_NUMBER_BYTES, "little"), head, bytes(-start % _ALIGN), *writer.parts]


def unpack(data: memoryview, classes: Collection[type]) -> Any:
    """What :func:`pack` was given. Arrays share ``data``. Raises Unfit for anything else.

    Nothing but the pickle is read here: arrays over a mapped file are read where they are looked at.
    """
    begin = _DIGEST_BYTES + _NUMBER_BYTES
    end = begin + int.from_bytes(data[_DIGEST_BYTES:begin], "little")
    head, arrays = data[begin:end], data[-(-end // _ALIGN) * _ALIGN :]
    if blake2b(head, digest_size=_DIGEST_BYTES).digest() != data[:_DIGEST_BYTES]:
        raise Unfit("digest")
    if len(arrays) != int.from_bytes(head[:_NUMBER_BYTES], "little"):
        raise Unfit("length")
    known: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in classes}
    known[__name__, _array.__name__] = partial(_array, arrays)
    try:
        return _Reader(io.BytesIO(head[_NUMBER_BYTES:]), known).load()
    except Unfit:
        raise
    except Exception as error:  # pickle says that any may come: of a class that was another one when this was written
        raise Unfit(str(error)) from None
