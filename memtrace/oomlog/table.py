"""Fixed texts as data: one row a text, with what it means and which figures it carries.

Patterns match text without white space and ignore case. ``word`` is a lower-case piece every match contains: the row
is skipped where it is absent. Groups named in FIGURES, with ``<name>_unit`` beside them (absent: bytes), become
figures; ``device``, ``backend`` and ``component`` become those; a group ``end`` that did not match means that the
text was cut short.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .draft import Draft
from .message import Kind

FIGURES = {
    "tried": "tried_bytes",
    "total": "total_bytes",
    "free": "free_bytes",
    "allocated": "allocated_bytes",
    "limit": "limit_bytes",
    "other": "other_allocations_bytes",
}


def size_groups(name: str) -> str:
    """Pattern of a printed size as groups ``name`` and ``name_unit``."""
    return rf"(?P<{name}>\d[\d,]{{0,20}}(?:\.\d{{1,6}})?)(?P<{name}_unit>bytes?|[KMGT]i?B|B)"


@dataclass(frozen=True)
class Text:
    """One known text."""

    word: str
    pattern: re.Pattern[str]
    kind: Kind
    what: str
    backend: str | None = None
    component: str | None = None
    is_gpu_oom: bool = True
    decimal_units: bool = False
    versions: tuple[str | None, str | None] = (None, None)
    note: str | None = None
    needs_line: re.Pattern[str] | None = None
    """The line the match begins on (prefix and all, with its white space) must contain this."""

    def draft(self, found: re.Match[str]) -> Draft:
        """The message a match stands for."""
        groups = found.groupdict()
        draft = Draft(
            self.kind,
            is_gpu_oom=self.is_gpu_oom,
            backend=(groups.get("backend") or "").lower() or self.backend,
            component=(groups.get("component") or "").lower() or self.component,
            what=self.what,
            versions=self.versions,
        )
        for group, name in FIGURES.items():
            if groups.get(group):
                unit = groups.get(f"{group}_unit") or "bytes"
                draft.put(name, groups[group], unit, decimal_units=self.decimal_units)
        if self.decimal_units and any(v and v[-1:] in "bB" and v[1:2] in "bB" for v in groups.values()):
            draft.note("GB and MB in this text are read as powers of ten; which base it means is not certain")
        draft.cut_short = "end" in groups and not groups["end"]
        device = groups.get("device")
        if device and device.isdigit():
            draft.device = int(device)
        elif device:
            draft.device = ord(device[0])
            draft.note("the device number is a raw byte (PyTorch 2.3-2.9)")
        if self.note:
            draft.note(self.note)
        return draft


def text(
    word: str,
    pattern: str,
    kind: Kind,
    what: str,
    *,
    backend: str | None = None,
    component: str | None = None,
    is_gpu_oom: bool = True,
    decimal_units: bool = False,
    versions: tuple[str | None, str | None] = (None, None),
    note: str | None = None,
    needs_line: str | None = None,
) -> Text:
    """A row; compiles the patterns."""
    return Text(
        word,
        re.compile(pattern, re.IGNORECASE),
        kind,
        what,
        backend,
        component,
        is_gpu_oom,
        decimal_units,
        versions,
        note,
        re.compile(needs_line) if needs_line else None,
    )
