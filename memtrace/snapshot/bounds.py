"""What a stranger's file may ask for, and what is raised when it asks for more."""

from __future__ import annotations

from typing import Any

import numpy as np

from memtrace.errors import SnapshotError

MAX_INTEGER_BYTES = 256
MAX_TUPLE_ITEMS = 10_000
MAX_NESTED_TUPLE_ITEMS = 4096
MAX_KEY_ITEMS = 16
_MAX_DEPTH = 64
_MAX_SHARED_PARTS = 1_000_000  # parts met more than once in what is handed through as it is
_MAX_SHARED_ENTRIES = 100_000  # trace entries or blocks read more than once


class Damaged(Exception):
    """Not a sound pickle; the text says why."""


class CutShort(Exception):
    """The bytes end before the pickle does."""


class Foreign(Exception):
    """Sound so far, but the pickle asks for something only other programs' files hold (an object, outside storage)."""


class Hostile(Exception):
    """Would cost far more than a snapshot of its size; the text says why."""


class Unsupported(Exception):
    """Perhaps sound, but not for the compiled decoder: the plain one reads the file, and knows what is wrong."""


def refuse_expansion(value: Any, what: str) -> None:
    """Raise SnapshotError for containers that are small in memory and endless when written out, or nested too deeply.

    Lists within lists that share their parts double with every level; a list that holds itself never ends.
    """
    sizes: dict[int, int] = {}
    stored = 0

    def size_of(container: Any, depth: int) -> int:
        nonlocal stored
        known = sizes.get(id(container))
        if known is not None:
            return known
        if depth > _MAX_DEPTH:
            raise SnapshotError(f"{what!r} is nested without end; damaged or hostile")
        total = len(container)
        stored += total
        for part in container.values() if type(container) is dict else container:
            if isinstance(part, (dict, list, tuple)) and part:
                total += size_of(part, depth + 1)
        sizes[id(container)] = total
        return total

    if isinstance(value, (dict, list, tuple)) and size_of(value, 0) > 2 * stored + _MAX_SHARED_PARTS:
        raise SnapshotError(f"{what!r} names its parts over and over; damaged or hostile")


def refuse_sharing(lists: list[Any]) -> None:
    """Raise SnapshotError if few lists or entries stand for many: a few bytes could mean a trace for
    thousands of devices, or of millions of events."""
    for item in lists:
        if isinstance(item, list) and len(item) > _MAX_SHARED_ENTRIES:
            ids = np.sort(np.fromiter(map(id, item), dtype=np.int64, count=len(item)))
            if np.count_nonzero(ids[1:] == ids[:-1]) > _MAX_SHARED_ENTRIES:
                raise SnapshotError("one entry is named over and over, which no snapshot does; damaged or hostile")
    sizes = [(id(item), len(item)) for item in lists if hasattr(item, "__len__")]
    if sum(size for _, size in sizes) > sum(dict(sizes).values()) + _MAX_SHARED_ENTRIES:
        raise SnapshotError("one list of entries is used over and over, which no snapshot does; damaged or hostile")
