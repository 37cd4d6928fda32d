"""Python's own plain unpickler, kept to builtin containers, texts and numbers: for pickles that no dump of PyTorch is.

The standard library's ``pickle._Unpickler`` runs one opcode after the other in Python. Here it loses every opcode that
asks for an object, and what could cost far more than the file's size is bounded: nested tuples, whose hash visits every
path through them, integers of thousands of digits, keys, lines. What it refuses is given to no other machine.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, ClassVar

from memtrace.snapshot.bounds import (
    MAX_INTEGER_BYTES,
    MAX_KEY_ITEMS,
    MAX_NESTED_TUPLE_ITEMS,
    MAX_TUPLE_ITEMS,
    CutShort,
    Damaged,
    Foreign,
    Hostile,
)
from memtrace.units import printable

_LINE_BYTES = 1 << 16
_OBJECTS = (
    "GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "EXT1", "EXT2", "EXT4",
)  # fmt: skip
_NEVER = ("EMPTY_SET", "ADDITEMS", "FROZENSET", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER")
_NAMED = ("GLOBAL", "STACK_GLOBAL", "INST")  # those that call find_class
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_Base: Any = pickle._Unpickler


class _Whole(io.BytesIO):
    """Bytes whose end is never passed in silence."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if size is not None and len(data) < size:
            raise EOFError
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(_LINE_BYTES)
        if line.endswith(b"\n"):
            return line
        if len(line) < _LINE_BYTES:
            raise EOFError
        raise Hostile("a line without end")


class Machine(_Base):  # type: ignore[misc]
    """Runs one pickle. Raises Damaged, CutShort, Foreign or Hostile, and whatever else a damaged one makes it raise."""

    dispatch: ClassVar[dict[int, Callable[[Machine], None]]] = dict(_Base.dispatch)

    def __init__(self, data: bytes) -> None:
        self._size = len(data)
        self._weights: dict[int, tuple[int, Any]] = {}  # of tuples that hold tuples; keeps them alive
        self._data = _Whole(data)
        super().__init__(self._data, encoding="ASCII")

    def load(self) -> Any:
        """The pickled object."""
        try:
            made = super().load()
        except EOFError:
            raise CutShort from None
        except (IndexError, KeyError):
            raise Damaged("takes from an empty stack, or an unknown opcode") from None
        except (pickle.UnpicklingError, ValueError) as error:
            raise (CutShort if "exhausted" in str(error) else Damaged)(str(error)) from None
        if self.metastack:
            raise Damaged("ends at an open container")
        return made

    def find_class(self, module: str, name: str) -> Any:
        raise Foreign(f"holds the Python object {printable(f'{module}.{name}')[:80]}")

    def persistent_load(self, pid: Any) -> Any:
        raise Foreign("refers to storage outside the file, as a checkpoint does")

    def _unnamed(self) -> None:
        raise Foreign("holds the Python object of an unknown name")

    def _never(self) -> None:
        raise Hostile("a set or a byte array, which no snapshot holds")

    def _frame(self) -> None:
        """Pass over a frame's head, as the C machine does for bytes: where frames end says nothing of opcodes."""
        if self._data.tell() + int.from_bytes(self.read(8), "little") + 8 > self._size:
            raise CutShort

    def _tuple(self, make: Callable[[Machine], None]) -> None:
        make(self)
        made = self.stack[-1]
        weight = len(made)
        if weight > MAX_TUPLE_ITEMS:
            raise Hostile(f"a tuple of {weight} items")
        if any(type(item) is tuple for item in made):
            weight += sum(self._weights.get(id(item), (len(item),))[0] for item in made if type(item) is tuple)
            if weight > MAX_NESTED_TUPLE_ITEMS:
                raise Hostile("tuples within tuples without end")
            self._weights[id(made)] = weight, made

    def _set(self, make: Callable[[Machine], None]) -> None:
        if make is _Base.load_setitem:
            target, keys = self.stack[-3], self.stack[-2:-1]
        else:  # to the mark
            target, keys = (None if make is _Base.load_dict else self.metastack[-1][-1]), self.stack[::2]
        if target is not None and type(target) is not dict:
            raise Damaged("sets items of something that is not a dictionary")
        for key in keys:
            parts = key if type(key) is tuple else (key,)
            if len(parts) > MAX_KEY_ITEMS:
                raise Hostile(f"a key of {len(parts)} parts")
            if not all(isinstance(part, (str, int, float, bytes, type(None))) for part in parts):
                raise Damaged("a key with a container in it")
        make(self)

    def _append(self, make: Callable[[Machine], None]) -> None:
        target = self.stack[-2] if make is _Base.load_append else self.metastack[-1][-1]
        if type(target) is not list:
            raise Damaged("appends to something that is not a list")
        make(self)

    def _put(self, make: Callable[[Machine], None]) -> None:
        make(self)
        if next(reversed(self.memo)) > self._size:  # at most one object a byte is stored
            raise Hostile("a memo index beyond the file")

    def _integer(self, make: Callable[[Machine], None]) -> None:
        make(self)
        if type(self.stack[-1]) is int and self.stack[-1].bit_length() > 8 * MAX_INTEGER_BYTES:
            raise Hostile("an integer of hundreds of bytes")


def _checked(check: Callable[[Machine, Callable[[Machine], None]], None], *names: str) -> None:
    """Let ``check`` run the opcodes."""
    for name in names:
        make = Machine.dispatch[_CODES[name]]
        Machine.dispatch[_CODES[name]] = lambda machine, make=make: check(machine, make)  # type: ignore[misc]


for _name in _OBJECTS:
    if _name not in _NAMED:
        Machine.dispatch[_CODES[_name]] = Machine._unnamed
Machine.dispatch[_CODES["FRAME"]] = Machine._frame
for _name in _NEVER:
    Machine.dispatch[_CODES[_name]] = Machine._never
_checked(Machine._tuple, "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_checked(Machine._set, "SETITEM", "SETITEMS", "DICT")
_checked(Machine._append, "APPEND", "APPENDS")
_checked(Machine._put, "PUT", "BINPUT", "LONG_BINPUT")
_checked(Machine._integer, "INT", "LONG", "LONG1", "LONG4")
