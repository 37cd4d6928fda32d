"""A pickle machine for strangers' files: builtin containers, strings and numbers, every step and size bounded.

It accepts what any pickle protocol writes for such data and refuses the rest: objects, sets, references to storage,
tuples nested so that hashing them would never end, integers of thousands of digits, memo indices beyond the file.
Memory stays a small multiple of the bytes read. The C machine of the standard library has none of these bounds, so a
file that this one has passed, and only such a file, may be given to it.
"""

from __future__ import annotations

import struct
from typing import Any

from memtrace.snapshot.bounds import CutShort, Damaged
from memtrace.snapshot.decoder.machine_steps import Steps

_MARGIN = 16  # more than any opcode with operands of fixed size

_i4 = struct.Struct("<i").unpack_from
_u4 = struct.Struct("<I").unpack_from
_u8 = struct.Struct("<Q").unpack_from


class Machine(Steps):
    """Runs one pickle."""

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
                    raise Damaged("appends to what is no list")
                self.before_change(target)
                target += items
            elif op == 0x61:  # APPEND
                value = pop()
                target = stack[-1]
                if type(target) is not list or (marks and len(stack) <= marks[-1]):
                    raise Damaged("appends to what is no list")
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
