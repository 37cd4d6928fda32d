"""A pickle machine for strangers' files: builtin containers, strings and numbers, every step and size bounded.

It accepts what any pickle protocol writes for such data and refuses the rest: objects, sets, references to storage,
tuples nested so that hashing them would never end, integers of thousands of digits, memo indices beyond the file.
Memory stays a small multiple of the bytes read. What it refuses is given to no other machine.
"""

from __future__ import annotations

import struct
from codecs import escape_decode
from typing import Any

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
from memtrace.snapshot.window import ReadWindow
from memtrace.units import printable

_MARGIN = 16  # more than any opcode with operands of fixed size
_LINE_BYTES = 1 << 16

_float = struct.Struct(">d").unpack_from
_i4 = struct.Struct("<i").unpack_from
_u4 = struct.Struct("<I").unpack_from
_u8 = struct.Struct("<Q").unpack_from


class Machine:
    """Runs one pickle. ``stack``, ``marks`` (stack heights) and ``memo`` are what the pickle protocol describes.

    ``filled`` counts memo entries, which is where MEMOIZE puts the next one; subclasses that skip over parts of a file
    keep it right. ``regular`` tells that only MEMOIZE was used, so that entries are numbered as they appear.
    """

    def __init__(self, window: ReadWindow) -> None:
        self.window = window
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.filled = 0
        self.regular = True
        self.frame_end = 0  # where the last frame claims to end, in the whole stream
        self._weights: dict[int, tuple[int, Any]] = {}  # of tuples that hold tuples; keeps them alive

    def load(self) -> Any:
        """The pickled object. Raises Damaged, CutShort, Foreign or Hostile."""
        try:
            self.run(-1)
        except (IndexError, struct.error):
            raise Damaged("takes from an empty stack") from None
        except UnicodeDecodeError:
            raise Damaged("a text is not UTF-8") from None
        if self.marks or not self.stack:
            raise Damaged("ends at an open container")
        window = self.window
        if window.cuts and window.cuts[0] < self.position:
            raise Damaged("a frame begins within an opcode")
        while not window.at_end and (
            window.base + window.end < self.frame_end or window.read_bytes < window.frames_end
        ):
            window.move(window.end)
        if window.base + window.end < self.frame_end or window.read_bytes < window.frames_end:
            raise CutShort
        return self.stack[-1]

    def run(self, height: int) -> None:
        """Run until STOP, or until a SETITEMS leaves the stack ``height`` high."""
        window, stack, marks, memo = self.window, self.stack, self.marks, self.memo
        data, at = window.data, self.position
        push, pop = stack.append, stack.pop
        limit = self._limit()
        while True:
            if at >= limit:
                at = self._pass(at)
                data, limit = window.data, self._limit()
            op = data[at]
            at += 1
            if op == 0x68:  # BINGET
                number = data[at]
                at += 1
                push(memo[number] if number in memo else self.missing(number))
            elif op == 0x6A:  # LONG_BINGET
                (number,) = _u4(data, at)
                at += 4
                push(memo[number] if number in memo else self.missing(number))
            elif op == 0x94:  # MEMOIZE
                number = self.filled
                if number not in memo:
                    self.filled = number + 1
                memo[number] = stack[-1]
            elif op == 0x28:  # MARK
                if stack and type(stack[-1]) is list:
                    self.position = at - 1
                    if self.on_mark():
                        data, at = window.data, self.position
                        limit = self._limit()
                        continue
                marks.append(len(stack))
            elif op == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif op == 0x4D:  # BININT2
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif op == 0x4A:  # BININT
                push(_i4(data, at)[0])
                at += 4
            elif op == 0x8A:  # LONG1
                size = data[at]
                at += 1
                if at + size > window.end:
                    data, at = self._need(data, at, size)
                    limit = self._limit()
                push(int.from_bytes(data[at : at + size], "little", signed=True))
                at += size
            elif op == 0x7D:  # EMPTY_DICT
                push({})
            elif op == 0x5D:  # EMPTY_LIST
                push([])
            elif op == 0x8C:  # SHORT_BINUNICODE
                size = data[at]
                at += 1
                if at + size > window.end:
                    data, at = self._need(data, at, size)
                    limit = self._limit()
                push(data[at : at + size].decode("utf-8", "surrogatepass"))
                at += size
            elif op == 0x75:  # SETITEMS
                items = self._to_mark()
                target = stack[-1]
                self._set(target, items)
                if len(stack) == height:
                    self.position = at
                    return
            elif op == 0x65:  # APPENDS
                items = self._to_mark()
                target = stack[-1]
                if type(target) is not list:
                    raise Damaged("appends to something that is not a list")
                self.before_change(target)
                target += items
            elif op == 0x61:  # APPEND
                value = pop()
                target = stack[-1]
                if type(target) is not list or (marks and len(stack) <= marks[-1]):
                    raise Damaged("appends to something that is not a list")
                self.before_change(target)
                target.append(value)
            elif op == 0x73:  # SETITEM
                value = pop()
                key = pop()
                if marks and len(stack) <= marks[-1]:
                    raise Damaged("takes from an empty stack")
                self._set(stack[-1], [key, value])
                if len(stack) == height:
                    self.position = at
                    return
            elif op == 0x95:  # FRAME
                at += 8
                self._frame(window.base + at, *_u8(data, at - 8))
            elif op == 0x2E:  # STOP
                self.position = at
                return
            else:
                self.position = at
                self._rare(op)
                data, at = window.data, self.position
                limit = self._limit()

    def _limit(self) -> int:
        """Up to where opcodes may begin before :meth:`_pass` must have a look."""
        window = self.window
        limit = window.end if window.at_end else window.end - _MARGIN
        return min(limit, window.cuts[0]) if window.cuts else limit

    def _pass(self, at: int) -> int:
        """At a cut, or near the end of what is in sight: where to go on."""
        window = self.window
        if not window.at_end and at >= window.end - _MARGIN:
            window.move(at)
            at = 0
        if at >= window.end:
            raise CutShort
        while window.cuts and window.cuts[0] <= at:
            if window.cuts.pop(0) != at:
                raise Damaged("a frame begins within an opcode")
        return at

    # What subclasses add.

    def on_mark(self) -> bool:
        """Called at a MARK on top of a list, before it is read. True: the subclass has moved the machine on."""
        return False

    def missing(self, number: int) -> Any:
        """What a memo index holds that is not in ``memo``."""
        raise Damaged("refers to an object it has not stored")

    def before_change(self, target: Any) -> None:
        """Called before a container is changed by an opcode."""

    def _frame(self, start: int, size: int) -> None:
        """A frame of ``size`` bytes whose content begins at ``start`` of the stream."""
        # The C machine loses bytes where frames overlap, and would then run others than were checked.
        if start - 9 < self.frame_end:
            raise Damaged("a frame begins within another")
        self.frame_end = start + size

    def _need(self, data: bytes, at: int, size: int) -> tuple[bytes, int]:
        """The data and position with ``size`` more bytes in sight."""
        window = self.window
        if at + size > window.end:
            if not window.at_end:
                window.move(at, size)
                data, at = window.data, 0
            if at + size > window.end:
                raise CutShort
        return data, at

    def _to_mark(self) -> list[Any]:
        if not self.marks:
            raise Damaged("closes a container that was not opened")
        start = self.marks.pop()
        if start > len(self.stack):
            raise Damaged("takes from an empty stack")
        items = self.stack[start:]
        del self.stack[start:]
        if not self.stack:
            raise Damaged("takes from an empty stack")
        return items

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise Damaged("sets items of something that is not a dictionary")
        self.before_change(target)
        for key in items[::2]:
            if type(key) is not str:
                self._check_key(key)
        target.update(zip(items[::2], items[1::2], strict=True))

    def _check_key(self, key: Any) -> None:
        if type(key) is tuple:
            if len(key) > MAX_KEY_ITEMS:
                raise Hostile(f"a key of {len(key)} parts")
            for part in key:
                if type(part) is tuple or part.__hash__ is None:
                    raise Damaged("a key with a container in it")
        elif not isinstance(key, (int, float, bytes, type(None))):
            raise Damaged("a key that is neither text nor number")

    def _put(self, number: int) -> None:
        # A pickle stores at most one object a byte, so an index beyond its length was made to ask for memory.
        if number > self.window.base + self.window.end and (self.window.at_end or number > 1 << 24):
            raise Hostile("a memo index beyond the file")
        self.regular = False
        if number not in self.memo:
            self.filled += 1
        self.memo[number] = self.stack[-1]

    def _tuple(self, items: list[Any]) -> None:
        weight = len(items)
        if weight > MAX_TUPLE_ITEMS:
            raise Hostile(f"a tuple of {weight} items")
        made = tuple(items)
        if any(type(item) is tuple for item in items):
            # Shared tuples within tuples: hashing one visits every path through them.
            weight += sum(self._weights.get(id(item), (len(item),))[0] for item in items if type(item) is tuple)
            if weight > MAX_NESTED_TUPLE_ITEMS:
                raise Hostile("tuples within tuples without end")
            self._weights[id(made)] = weight, made
        self.stack.append(made)

    def _take(self, count: int) -> list[Any]:
        stack = self.stack
        if len(stack) - (self.marks[-1] if self.marks else 0) < count:
            raise Damaged("takes from an empty stack")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    def _counted(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        data, at = self._need(self.window.data, self.position, size)
        self.position = at + size
        return data[at : at + size]

    def _line(self) -> bytes:
        window = self.window
        end = window.data.find(b"\n", self.position, window.end)
        if end < 0 and not window.at_end:
            window.move(self.position, _LINE_BYTES)
            self.position = 0
            end = window.data.find(b"\n", 0, window.end)
        if end < 0 and window.end - self.position < _LINE_BYTES:
            raise CutShort
        if end < 0 or end - self.position > _LINE_BYTES:
            raise Hostile("a line without end")
        line = window.data[self.position : end]
        self.position = end + 1
        return line

    def _rare(self, op: int) -> None:
        stack, push = self.stack, self.stack.append
        if op in _CONSTANTS:
            push(_CONSTANTS[op])
        elif 0x85 <= op <= 0x87:  # TUPLE1 to TUPLE3
            self._tuple(self._take(op - 0x84))
        elif op == 0x29:  # EMPTY_TUPLE
            push(())
        elif op in (0x74, 0x6C, 0x64):  # TUPLE, LIST, DICT (to the mark)
            self._from_mark(op)
        elif op == 0x71:  # BINPUT
            self._put(self._counted(1)[0])
        elif op == 0x72:  # LONG_BINPUT
            self._put(_u4(self._counted(4))[0])
        elif op == 0x47:  # BINFLOAT
            push(_float(self._counted(8))[0])
        elif op == 0x58:  # BINUNICODE
            push(self._counted(_u4(self._counted(4))[0]).decode("utf-8", "surrogatepass"))
        elif op == 0x8D:  # BINUNICODE8
            push(self._counted(_u8(self._counted(8))[0]).decode("utf-8", "surrogatepass"))
        elif op in (0x42, 0x43, 0x8E):  # BINBYTES, SHORT_BINBYTES, BINBYTES8
            size = (
                self._counted(1)[0]
                if op == 0x43
                else (_u4(self._counted(4)) if op == 0x42 else _u8(self._counted(8)))[0]
            )
            push(self._counted(size))
        elif op == 0x8B:  # LONG4
            (size,) = _i4(self._counted(4))
            if size < 0:
                raise Damaged("an integer of negative length")
            if size > MAX_INTEGER_BYTES:
                raise Hostile(f"an integer of {size} bytes")
            push(int.from_bytes(self._counted(size), "little", signed=True))
        elif op == 0x80:  # PROTO
            if self._counted(1)[0] > 5:
                raise Damaged("a pickle protocol that does not exist yet")
        elif op == 0x30:  # POP
            if self.marks and self.marks[-1] == len(stack):
                self.marks.pop()
            else:
                self._take(1)
        elif op == 0x31:  # POP_MARK
            del stack[self._mark() :]
        elif op == 0x32:  # DUP
            push(stack[-1])
        elif op in b"PQ":
            raise Foreign("refers to storage outside the file, as a checkpoint does")
        elif op in b"cioRb\x81\x82\x83\x84\x92\x93\x97\x98":
            raise Foreign(f"holds the Python object {self._named(op)}")
        elif op in b"\x8f\x90\x91\x96":
            raise Hostile("a set or a byte array, which no snapshot holds")
        else:
            self._text(op)

    def _named(self, op: int) -> str:
        """What an opcode that asks for an object says of its name, on one line."""
        name = ""
        if op in b"ci":  # GLOBAL, INST: module and name on two lines
            name = b".".join((self._line(), self._line())).decode("ascii", "replace")
        elif op == 0x93 and len(self.stack) > 1:  # STACK_GLOBAL
            name = ".".join(part if isinstance(part, str) else "?" for part in self.stack[-2:])
        return printable(name)[:80] or "of an unknown name"

    def _mark(self) -> int:
        if not self.marks or self.marks[-1] > len(self.stack):
            raise Damaged("closes a container that was not opened")
        return self.marks.pop()

    def _from_mark(self, op: int) -> None:
        start = self._mark()
        items = self.stack[start:]
        del self.stack[start:]
        if op == 0x74:
            self._tuple(items)
        elif op == 0x6C:
            self.stack.append(items)
        else:
            self.stack.append({})
            self._set(self.stack[-1], items)

    def _text(self, op: int) -> None:
        """Opcodes of protocol 0, whose operands are lines of text."""
        push = self.stack.append
        if op not in b"ILFSVTUgp":
            raise Damaged(f"an unknown opcode, 0x{op:02x}")
        if op in (0x54, 0x55):  # BINSTRING, SHORT_BINSTRING
            size = self._counted(1)[0] if op == 0x55 else _i4(self._counted(4))[0]
            if size < 0:
                raise Damaged("a text of negative length")
            push(self._counted(size).decode("ascii"))
            return
        line = self._line()
        try:
            if op == 0x49:  # INT; 00 and 01 are booleans
                push(line == b"01" if line in (b"00", b"01") else _integer(line))
            elif op == 0x4C:  # LONG
                push(_integer(line.removesuffix(b"L")))
            elif op == 0x46:  # FLOAT
                push(float(line))
            elif op == 0x56:  # UNICODE
                push(line.decode("raw-unicode-escape"))
            elif op == 0x53:  # STRING
                if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"'\"":
                    raise Damaged("a text without quotes")
                push(escape_decode(line[1:-1])[0].decode("ascii"))
            elif op == 0x67:  # GET
                number = _integer(line)
                push(self.memo[number] if number in self.memo else self.missing(number))
            else:  # PUT
                number = _integer(line)
                if number < 0:
                    raise Damaged("a negative memo index")
                self._put(number)
        except ValueError:
            raise Damaged("a number or a text that can't be read") from None


def _integer(line: bytes) -> int:
    if len(line) > 2 * MAX_INTEGER_BYTES:
        raise Hostile(f"an integer of {len(line)} digits")
    return int(line)


_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False}
