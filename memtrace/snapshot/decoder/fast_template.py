"""Events of one shape, recognised in the bytes of a pickle and read by column.

PyTorch writes every event of a trace with the same keys in the same order, so their opcodes differ only in operands. A
template knows the keys' memo entries; applied to a window it finds all places that look like such events and reads
every field of all of them at once. Each byte is checked against the template, and an event counts only if a sound
event ends exactly where it begins: what is accepted means what the pickle machine would have built, or less is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.snapshot.decoder import fast_fields as fields
from memtrace.snapshot.decoder.fast_fields import I8, Bool, Sight, Stacks, Texts

_START = b"}\x94("  # EMPTY_DICT MEMOIZE MARK
_REQUIRED = {"action", "addr", "size"}
_INTEGERS = ("addr", "size", "stream", "time_us")
TEXTS = ("user_metadata", "compile_context", "category")
KEYS = {"action", *_INTEGERS, *TEXTS, "pool_id", "frames"}


@dataclass(frozen=True, slots=True)
class Template:
    """Keys in order, and the bytes that fetch each from the memo: a pickler writes no longer ones."""

    keys: tuple[str, ...]
    slots: tuple[int, ...]  # memo entries of the keys
    fetches: tuple[bytes, ...]

    @property
    def start(self) -> bytes:
        """What every event begins with."""
        return _START + self.fetches[0]


def learn(event: Mapping[str, Any], memo: Mapping[int, Any]) -> Template | None:
    """The template of an event the machine has built; None if this kind can't be read by column.

    Keys are recognised as objects, not by their text: another memo entry may hold an equal text.
    """
    keys = tuple(event)
    if not set(keys) <= KEYS or not set(keys) >= _REQUIRED or "frames" in keys[:-1]:
        return None
    wanted = {id(key): key for key in keys}
    numbers = {key: number for number, entry in memo.items() if (key := wanted.get(id(entry))) is not None}
    if len(numbers) < len(keys):
        return None
    slots = tuple(numbers[key] for key in keys)
    return Template(keys, slots, tuple(map(fields.reference, slots)))


@dataclass(slots=True)
class Parsed:
    """What looks like events in a window, by position; one entry each.

    ``follows``: the next one begins right behind (or behind a change of batch). ``memoized``: entries each adds to the
    memo. ``end`` is behind the event. Fields that a template lacks are absent from the dictionaries.
    """

    start: I8
    end: I8
    ok: Bool
    follows: Bool
    memoized: I8
    action: I8  # memo index
    integers: dict[str, I8]
    texts: dict[str, Texts]
    pool: tuple[I8, I8, I8] | None  # memo index or -1, first, second
    stacks: Stacks | None
    template: Template

    def __len__(self) -> int:
        return len(self.start)


def find(byte: NDArray[np.uint8], wanted: bytes, first: int, last: int) -> I8:
    """Positions of ``wanted`` from ``first`` to before ``last``."""
    at = first + np.flatnonzero(byte[first:last] == wanted[0])
    for offset in range(1, len(wanted)):
        if not len(at):
            break
        at = at[byte.take(at + offset) == wanted[offset]]
    return at


def parse(template: Template, sight: Sight, first: int, last: int) -> Parsed:
    """Everything from ``first`` to before ``last`` that looks like the template's events."""
    start = find(sight.byte, template.start, first, last)
    count = len(start)
    next_start = np.append(start[1:], last)
    at = start + len(_START)
    ok = np.ones(count, dtype=np.bool_)
    memoized = np.ones(count, dtype=np.int64)  # the dictionary itself
    action = at
    numbers: dict[str, I8] = {}
    texts: dict[str, Texts] = {}
    pool: tuple[I8, I8, I8] | None = None
    stacks: Stacks | None = None
    end: I8 | None = None
    for key, fetch in zip(template.keys, template.fetches, strict=True):
        ok &= fields.matches(sight, at, fetch)
        at = at + len(fetch)
        if key == "action":
            action, at, good = fields.references(sight, at)
        elif key in _INTEGERS:
            numbers[key], at, good = fields.integers(sight, at)
        elif key in TEXTS:
            texts[key], at, good = fields.texts(sight, at)
            memoized += texts[key].reference < 0
        elif key == "pool_id":
            number, one, two, at, good = fields.pairs(sight, at)
            pool = (number, one, two)
            memoized += number < 0
        else:
            end = next_start - _gap(sight, next_start)
            stacks, good = fields.stacks(sight, at, end)
            memoized += stacks.kind == fields.WRITTEN
        ok &= good
    if end is None:
        ok &= sight.byte.take(at) == 0x75
        end = at + 1
    gap = next_start - end
    follows = (gap == 0) | ((gap == 2) & fields.matches(sight, end, b"e("))
    if count:
        follows[-1] = False
        # Behind the last one there may be anything; without frames its own end is known.
        if stacks is not None:
            ok[-1] = False
    ok &= end <= last
    return Parsed(start, end, ok, follows, memoized, action, numbers, texts, pool, stacks, template)


def _gap(sight: Sight, next_start: I8) -> I8:
    """Bytes between an event's end and the next event: a change of batch or nothing.

    A guess only: a wrong one makes the event's last bytes fail.
    """
    gap: I8 = np.where(fields.matches(sight, next_start - 3, b"ue("), 2, 0).astype(np.int64)
    return gap


@lru_cache(maxsize=1)
def _token() -> re.Pattern[bytes]:
    """One opcode of an event."""
    counted = b"|".join(b"%s.{%d}" % (re.escape(bytes((size,))), size) for size in range(256))
    return re.compile(
        rb"(?:[}\]\x94(euas\x86]|[hK].|j.{4}|M..|J.{4}|\x8a(?:%(counted)s)|\x8c(?:%(counted)s))"
        % {b"counted": counted},
        re.DOTALL,
    )


def is_boundary(data: bytes, start: int, position: int) -> bool:
    """Whether an opcode of a sound event that begins at ``start`` begins at ``position``."""
    while start < position:
        token = _token().match(data, start)
        if token is None:
            return False
        start = token.end()
    return start == position


def runs_end(parsed: Parsed, good: Bool) -> I8:
    """Indices of events behind which a run of sound events can't go on, ascending."""
    if not len(parsed):
        return np.zeros(0, dtype=np.int64)
    goes_on = good & parsed.follows
    goes_on[:-1] &= good[1:]
    return np.flatnonzero(~goes_on)
