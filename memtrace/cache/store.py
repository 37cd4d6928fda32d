"""Frozen dataclasses of arrays to a file of the cache and back.

The arrays come first, as they are, so that a mapped file is used without being read; an array of one repeated value
takes the room of one. Behind them stands a pickle that names no classes but those of the caller, its digest and length.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Callable, Collection
from functools import partial
from hashlib import blake2b
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_ALIGN = 64
_DIGEST_BYTES, _NUMBER_BYTES = 32, 8
Value = TypeVar("Value")
_Place = tuple[str, int, int, int]  # of an array: type, items that are stored, where they begin, items


class Unfit(ValueError):
    """A value that can't be stored, or bytes that hold none."""


class Shelf:
    """A file under way. An array is written once, however often it is part of a value."""

    def __init__(self, out: IO[bytes], classes: Collection[type]) -> None:
        self._out, self._classes = out, classes
        self._end = 0  # of the arrays
        self._places: dict[int, tuple[NDArray[Any], _Place]] = {}  # by id of an array that is kept alive
        self._maps: list[mmap.mmap] = []

    def laid(self, value: Value, mapped: Callable[[], mmap.mmap]) -> Value:
        """The same value, its arrays those of the file: what of them is not looked at takes no memory, nor time to
        write again. ``mapped`` maps the file. Raises Unfit, OSError."""
        head = self._description(value)
        self._maps.append(mapped())

        def laid_array(*place: Any) -> NDArray[Any]:
            made = _array(memoryview(self._maps[-1]), *place)
            self._places[id(made)] = made, place
            return made

        made: Value = _read(head, laid_array, self._classes)
        return made

    def rest(self) -> None:
        """What was read of the file so far takes no memory any more."""
        for each in self._maps if hasattr(mmap, "MADV_DONTNEED") else ():
            each.madvise(mmap.MADV_DONTNEED)

    def finish(self, value: Any) -> None:
        """Write what :func:`unpack` returns. Raises Unfit for what can't be stored, OSError."""
        head = self._description(value)
        self._out.write(head)
        self._out.write(blake2b(head, digest_size=_DIGEST_BYTES).digest() + len(head).to_bytes(_NUMBER_BYTES, "little"))

    def place_of(self, value: NDArray[Any]) -> _Place:
        """Where an array is in the file, once it is there. Raises Unfit for one that has no place in any."""
        if id(value) in self._places:
            return self._places[id(value)][1]
        if value.ndim != 1 or value.dtype.kind not in "biuf":
            raise Unfit(value.dtype.str)
        repeated = len(value) > 1 and value.strides == (0,)
        stored = np.ascontiguousarray(value[:1] if repeated else value)
        start = self._end
        if stored.nbytes:
            self._out.write(stored.data.cast("B"))
            self._out.write(bytes(-stored.nbytes % _ALIGN))
        self._end += -(-stored.nbytes // _ALIGN) * _ALIGN
        return stored.dtype.str, len(stored), start, len(value)

    def _description(self, value: Any) -> bytes:
        out = io.BytesIO()
        try:
            _Writer(out, self).dump(value)
        except (pickle.PicklingError, RecursionError) as error:
            raise Unfit(str(error)) from None
        return self._end.to_bytes(_NUMBER_BYTES, "little") + out.getvalue()

    def knows(self, kind: type) -> bool:
        """Whether objects of a class may be stored."""
        return kind in self._classes


class _Writer(pickle.Pickler):
    def __init__(self, out: io.BytesIO, shelf: Shelf) -> None:
        super().__init__(out, protocol=5)
        self._shelf = shelf

    def reducer_override(self, value: Any) -> Any:
        """What stands for an array, or for an object of a class that is known."""
        if isinstance(value, np.ndarray):
            return _array, self._shelf.place_of(value)
        if value is _array or self._shelf.knows(value if isinstance(value, type) else type(value)):
            return NotImplemented
        raise Unfit(type(value).__name__)


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


def unpack(data: memoryview, classes: Collection[type]) -> Any:
    """What :meth:`Shelf.finish` was given. Arrays share ``data``. Raises Unfit for anything else.

    Nothing but the pickle is read here: arrays over a mapped file are read where they are looked at.
    """
    end = len(data) - _DIGEST_BYTES - _NUMBER_BYTES
    begin = end - int.from_bytes(data[-_NUMBER_BYTES:], "little")
    if not 0 <= begin <= end - _NUMBER_BYTES:
        raise Unfit("length")
    head = data[begin:end]
    if blake2b(head, digest_size=_DIGEST_BYTES).digest() != data[end:-_NUMBER_BYTES]:
        raise Unfit("digest")
    if begin != int.from_bytes(head[:_NUMBER_BYTES], "little"):
        raise Unfit("length")
    return _read(head, partial(_array, data[:begin]), classes)


def _read(head: bytes | memoryview, array: Callable[..., NDArray[Any]], classes: Collection[type]) -> Any:
    """The value of a description, its arrays made by ``array``."""
    known: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in classes}
    known[__name__, _array.__name__] = array
    try:
        return _Reader(io.BytesIO(head[_NUMBER_BYTES:]), known).load()
    except Unfit:
        raise
    except Exception as error:  # pickle says that any may come: of a class that was another one when this was written
        raise Unfit(str(error)) from None
