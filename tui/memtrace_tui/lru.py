"""A small least-recently-used cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """At most ``size`` answers; the one not asked for longest goes first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The answer for ``key``, made if it isn't there."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        value = make()
        self._answers[key] = value
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()
