"""The whole snapshot: what is known to be harmless stays, the rest is hidden, wherever it stands.

Numbers stay. A key stays if it is one that PyTorch, memtrace or a public configuration writes. A text stays word by
word. Stacks have rules of their own (:mod:`memtrace.scrub.frames`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from memtrace.errors import SnapshotError
from memtrace.scrub.frames import FrameScrubber
from memtrace.scrub.hiding import Hiding, ScrubOptions

_EMPTIED: Mapping[str, Any] = {"forward_frames": [], "problems": [], "pid": None}  # readers expect the key
_PROCESS = re.compile(r"(?<=\bProcess )\d+")
_FRAMES = ("frames", "cpp_frames")
_DEEPEST = 12
_MOST_KEYS = 4096


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """``snapshot`` in builtin containers, ready to be pickled. ``removed``: kind -> number of distinct things that are
    gone; ``kept``: kind -> texts that stay and that a reader may recognise."""

    snapshot: dict[str, Any] | list[Any]
    removed: Mapping[str, int]
    kept: Mapping[str, list[str]]


def scrub(raw: dict[str, Any] | list[Any], options: ScrubOptions | None = None) -> Scrubbed:
    """The snapshot without personal things. ``raw`` is what PyTorch dumped; its lists are changed in place.

    Raises SnapshotError where the containers are not those of a snapshot.
    """
    hiding = Hiding(options or ScrubOptions())
    snapshot = _Scrubber(hiding, FrameScrubber(raw, hiding)).clean(raw, "")
    return Scrubbed(snapshot, hiding.removed, hiding.kept)


class _Scrubber:
    """Old containers to new ones; what was one object stays one, which says that two events came from one call."""

    def __init__(self, hiding: Hiding, frames: FrameScrubber) -> None:
        self._hiding, self._frames = hiding, frames
        self._made: dict[int, tuple[Any, Any]] = {}  # by id; old objects are held, so that no id is given again
        self._texts: dict[tuple[str, str], str] = {}
        self._is_harmless = lru_cache(maxsize=4096)(hiding.is_harmless)

    def clean(self, value: Any, key: str, depth: int = 0) -> Any:
        """What may stay of a value under a key; None for what is neither number, text nor container."""
        kind = type(value)
        if value is None or kind in (int, float, bool):
            return value
        if kind is str:
            known = self._texts.get((key, value))
            if known is None:
                text, is_message = value, key == "message"
                if is_message:
                    text = _PROCESS.sub(lambda found: str(self._hiding.number("process ids", found[0])), text)
                known = self._hiding.words(text, any_number=is_message, gpu=key == "gpu")
                self._texts[key, value] = known
            return known
        if depth > _DEEPEST:
            return None
        if kind is tuple:
            return tuple([self.clean(item, key, depth + 1) for item in value])
        made = self._made.get(id(value))
        if made is not None:
            return made[1]
        if kind is list:
            self._made[id(value)] = (value, value)
            for i, item in enumerate(value):  # rows one by one, so that old and new are never whole together
                is_row = type(item) is dict
                value[i] = self._mapping(item, {}, key, depth) if is_row else self.clean(item, key, depth + 1)
            return value
        if kind is dict:
            new: dict[Any, Any] = {}
            self._made[id(value)] = (value, new)
            return self._mapping(value, new, key, depth)
        return None

    def _mapping(self, value: dict[Any, Any], new: dict[Any, Any], where: str, depth: int) -> dict[Any, Any]:
        if len(value) > _MOST_KEYS:
            raise SnapshotError(f"a dictionary of {len(value):,} entries; no snapshot has such a one")
        for key, part in value.items():
            if key in _FRAMES:
                new[key] = self._frames.stack(part)
            elif key in _EMPTIED:
                new[key] = _EMPTIED[key]
                if part:
                    self._hiding.remove(key.replace("_", " "), str(part)[:100])
            elif type(key) is int or (type(key) is str and self._is_harmless(key)):
                new[key] = self.clean(part, str(key), depth + 1)
            else:
                self._hiding.remove("unknown keys", (where, str(key)[:1000]))
        return new
