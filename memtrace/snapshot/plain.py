"""A quick look over a whole pickle: does it hold nothing but what snapshots hold?

The C pickle machine has no bounds: a few hundred bytes of tuples within tuples keep it hashing for years, and a memo
index can ask for gigabytes. A regular expression checks at its speed that every opcode is one that PyTorch's dumps
use, with operands in bounds. What it does not recognise goes to the slower machine that bounds every step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache


class Look(Enum):
    """What the look found."""

    PLAIN = "nothing but what snapshots hold"
    CUT_SHORT = "plain, but the end is missing"
    OTHER = "something else"


_LONGEST_TOKEN_BYTES = 258  # of those the expression knows
_TEXT_OPCODES = {0x8C: 1, 0x58: 4, 0x8D: 8}  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8: bytes of their length
_SHORT_TEXTS = 48  # longer ones are left to the loop: an expression for each length takes time to compile


@lru_cache(maxsize=256)
def _tokens(index_bytes: int, top: int) -> re.Pattern[bytes]:
    """Any run of plain opcodes; memo indices have ``index_bytes`` bytes, the highest at most ``top``, then zeros."""
    index = rb"." * (index_bytes - 1) + b"[\\x00-\\x%02x]" % top + rb"\x00" * (4 - index_bytes)
    integer = rb"(?:K.|M..|J.{4}|\x8a(?:%s))" % _counted((6, 8, 5, 7, 9, *range(5)))
    return re.compile(
        rb"(?:"
        rb"[}\]\x94ueNas\x88\x89]"  # containers, MEMOIZE, SETITEMS, APPENDS, NONE, APPEND, SETITEM, booleans
        rb"|[hq].|j.{4}"  # BINGET, BINPUT, LONG_BINGET
        rb"|%(integer)s(?:%(integer)s\x86)?+"  # BININT1, BININT2, BININT, LONG1, or TUPLE2 of two: a pool id
        rb"|\x8c(?:%(texts)s)"  # SHORT_BINUNICODE
        rb"|\((?:%(integer)s{2}t)?+"  # MARK, or a pair of integers in C++ dumps
        rb"|r%(index)s"  # LONG_BINPUT
        rb"|[G\x95].{8}"  # BINFLOAT, FRAME
        rb")*+" % {b"texts": _counted(range(_SHORT_TEXTS)), b"integer": integer, b"index": index},
        re.DOTALL,
    )


def _counted(sizes: Iterable[int]) -> bytes:
    """Operands that begin with their length."""
    return b"|".join(b"%s.{%d}" % (re.escape(bytes((size,))), size) for size in sizes)


def look(data: bytes) -> Look:
    """Look over a pickle of protocol 2 or newer."""
    size = len(data)
    if size < 3 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        return Look.OTHER
    index_bytes = min(4, (size.bit_length() + 7) // 8)
    tokens = _tokens(index_bytes, min(255, size >> 8 * (index_bytes - 1)))
    at = 2
    while True:
        match = tokens.match(data, at)
        at = match.end() if match is not None else at
        if at >= size:
            return Look.CUT_SHORT
        op = data[at]
        if op == 0x2E:  # STOP
            return Look.PLAIN
        if op in _TEXT_OPCODES:
            start = at + 1 + _TEXT_OPCODES[op]
            if start > size:
                return Look.CUT_SHORT
            at = start + int.from_bytes(data[at + 1 : start], "little")
            if at > size:
                return Look.CUT_SHORT
            continue
        return Look.CUT_SHORT if size - at < _LONGEST_TOKEN_BYTES and _incomplete(data, at) else Look.OTHER


def _incomplete(data: bytes, at: int) -> bool:
    """Whether a plain opcode begins at ``at`` whose operands are missing."""
    op, rest = data[at], len(data) - at - 1
    fixed = {0x68: 1, 0x71: 1, 0x4B: 1, 0x4D: 2, 0x4A: 4, 0x6A: 4, 0x72: 4, 0x47: 8, 0x95: 8}
    if op in fixed:
        return rest < fixed[op]
    if op == 0x8A:
        return rest == 0 or rest - 1 < data[at + 1]
    return False
