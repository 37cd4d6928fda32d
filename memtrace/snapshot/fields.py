"""Turn lists of recorded dictionaries into columns: fast where the data is sound, exact about what is not."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import SnapshotError

# Below 2**60 sums of millions of sizes can't overflow int64; the allocator itself refuses larger requests.
_MAX_SIZE_BYTES = 1 << 60


def as_list(value: Any, what: str) -> list[Any]:
    """``value`` if it is a list (or tuple), else a SnapshotError that names it."""
    if isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return list(value)
    raise SnapshotError(f"{what} is {kind_of(value)}, expected a list")


def as_dicts(value: Any, what: str) -> list[dict[str, Any]]:
    """A list whose items are all dictionaries."""
    items = as_list(value, what)
    if not set(map(type, items)) <= {dict}:
        index, item = next((i, x) for i, x in enumerate(items) if type(x) is not dict)
        raise SnapshotError(f"{what}[{index}] is {kind_of(item)}, expected a dictionary")
    return items


def values_of(entries: Sequence[dict[str, Any]], key: str, default: Any) -> list[Any]:
    """What each entry has under a key."""
    try:
        return list(map(itemgetter(key), entries))
    except KeyError:
        return [entry.get(key, default) for entry in entries]


def integers(entries: Sequence[dict[str, Any]], key: str, what: str, default: int | None) -> NDArray[np.int64]:
    """One int64 column. ``default`` fills missing or null values; with None the key is required."""
    values = values_of(entries, key, default)
    if set(map(type, values)) <= {int}:  # numpy would take 512.5, "512" and True for whole numbers
        with contextlib.suppress(OverflowError):
            return np.array(values, dtype=np.int64)
    return np.array([_integer(entry, key, f"{what}[{i}]", default) for i, entry in enumerate(entries)], dtype=np.int64)


def _integer(entry: dict[str, Any], key: str, where: str, default: int | None) -> int:
    value = entry.get(key)
    if value is None:
        if default is None:
            raise SnapshotError(f"{where} has no {key!r}")
        return default
    if type(value) is not int:
        raise SnapshotError(f"{where}: {key!r} is {kind_of(value)}, expected an integer")
    if (1 << 63) <= value < (1 << 64):
        value -= 1 << 64  # a 64-bit handle or address read as unsigned
    if not -(1 << 63) <= value < (1 << 63):
        raise SnapshotError(f"{where}: {key!r} does not fit 64 bits")
    return value


def sizes(entries: Sequence[dict[str, Any]], key: str, what: str, default: int | None) -> NDArray[np.int64]:
    """Like :func:`integers`, for byte counts: 0 to below 2**60."""
    return _within(integers(entries, key, what, default), _MAX_SIZE_BYTES - 1, key, what, "size in bytes")


def addresses(entries: Sequence[dict[str, Any]], key: str, what: str, default: int | None) -> NDArray[np.int64]:
    """Like :func:`integers`, for device addresses: 0 to 2**62, so that address + size can't overflow."""
    return _within(integers(entries, key, what, default), 1 << 62, key, what, "device address")


def _within(column: NDArray[np.int64], most: int, key: str, what: str, kind: str) -> NDArray[np.int64]:
    bad = (column < 0) | (column > most)
    if bad.any():
        index = int(np.argmax(bad))
        raise SnapshotError(f"{what}[{index}]: {key!r} is {int(column[index])}, which is not a {kind}")
    return column


def numbered(values: Sequence[Any]) -> tuple[NDArray[np.int32], tuple[Any, ...]]:
    """One int32 column of codes, and the distinct values that they stand for, in order of appearance.

    Values that can't be hashed are replaced by their text, since a damaged file may hold anything.
    """
    try:
        distinct = dict.fromkeys(values)
    except TypeError:
        values = list(map(_hashable, values))
        distinct = dict.fromkeys(values)
    codes = {value: i for i, value in enumerate(distinct)}
    return np.fromiter(map(codes.__getitem__, values), np.int32, len(values)), tuple(codes)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    try:
        hash(value)
    except TypeError:
        return kind_of(value)
    return value


def kind_of(value: Any) -> str:
    """A short, safe name of a value for messages; never its whole text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        return "a number" if isinstance(value, float) or abs(value) > 10**18 else str(value)
    if isinstance(value, str):
        text = value[:30].encode("unicode_escape").decode("ascii")
        return f"the text {text!r}"
    return f"a {type(value).__name__}"
