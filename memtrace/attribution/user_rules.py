"""Rules of the user's own: a TOML file of frame patterns, applied before memtrace's table.

[[rule]]
id = "our-cache"
file = "ourlib/cache\\.py$"      # regular expressions, searched in any frame of the stack
function = "^put$"               # at least one of file and function
category = "activations"
subcategory = "kv_cache"
why = "kept between calls by our cache"
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import SUBCATEGORIES, Category, Evidence, Purpose
from memtrace.attribution.rules import Rule
from memtrace.errors import UsageError
from memtrace.frozen import dataclass
from memtrace.history.timeline import Timeline
from memtrace.snapshot.container import read_at_most

_KEYS = {"id", "file", "function", "category", "subcategory", "why"}
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class UserRule:
    """A pattern on frames and what it means."""

    id: str
    file: re.Pattern[str] | None
    function: re.Pattern[str] | None
    purpose: Purpose
    why: str


def read_rules(path: str | os.PathLike[str]) -> tuple[UserRule, ...]:
    """Read a rules file. Raises SnapshotError where it can't be read, UsageError with what is wrong in it."""
    import tomllib

    try:
        data = tomllib.loads(read_at_most(Path(path), _LARGEST_BYTES, "rules file").decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML ({error})") from None
    entries = data.get("rule")
    if not isinstance(entries, list) or not entries or set(data) != {"rule"}:
        raise UsageError(f"{path}: expected one or more [[rule]] tables and nothing else")
    return tuple(_read_rule(entry, f"{path}: rule {i + 1}", i) for i, entry in enumerate(entries))


def _read_rule(entry: object, where: str, number: int) -> UserRule:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise UsageError(f"{where}: every value must be a string")
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r} (known: {', '.join(sorted(_KEYS))})")
    if "file" not in entry and "function" not in entry:
        raise UsageError(f"{where}: give a pattern for 'file', for 'function' or for both")
    name = entry.get("category", "")
    possible = [str(c) for c in Category if c not in (Category.FRAGMENTATION, Category.UNATTRIBUTED)]
    if name not in possible:
        raise UsageError(f"{where}: 'category' must be one of {', '.join(possible)}")
    category = Category(name)
    subcategory = entry.get("subcategory", "")
    if subcategory not in SUBCATEGORIES[category]:
        raise UsageError(f"{where}: 'subcategory' of {name} must be one of {', '.join(SUBCATEGORIES[category])}")
    return UserRule(
        id=entry.get("id", f"user-{number + 1}"),
        file=_pattern(entry.get("file"), where),
        function=_pattern(entry.get("function"), where),
        purpose=SUBCATEGORIES[category][subcategory],
        why=entry.get("why", "a rule of your own matches its stack"),
    )


def _pattern(text: str | None, where: str) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UsageError(f"{where}: {text!r} is not a regular expression ({error})") from None


def as_rule(rule: UserRule) -> Rule:
    """A row of the table that ``user_mask`` applies."""
    why = rule.why.replace("{", "{{").replace("}", "}}")  # a rule's sentence is a format of its own
    return Rule(rule.id, rule.purpose, Evidence.FRAME, lambda s: s.persistent, why)


def user_mask(rule: UserRule, timeline: Timeline) -> NDArray[np.bool_]:
    """Rows of ``Timeline.allocations`` whose stack has a frame that the rule's patterns fit."""
    table = timeline.snapshot.stacks
    frames = np.array(
        [
            (rule.file is None or rule.file.search(frame.filename.replace("\\", "/")) is not None)
            and (rule.function is None or rule.function.search(frame.name) is not None)
            for frame in table.frames
        ],
        dtype=np.bool_,
    )
    stacks = np.zeros(len(table) + 1, dtype=np.bool_)  # the last entry is for "no stack"
    if len(frames):
        owner = np.repeat(np.arange(len(table)), np.diff(table.start))
        stacks[owner[frames[table.frame]]] = True
    return stacks[timeline.allocations.stack]
