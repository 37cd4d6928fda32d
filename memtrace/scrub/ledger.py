"""What was removed and what stays recognisable, counted while a snapshot is scrubbed."""

from __future__ import annotations

from collections.abc import Hashable


class Ledger:
    """Distinct things by kind: ``removed`` (only ever counted) and ``kept`` (shown by ``memtrace scrub --check``).

    ``number`` gives each distinct text of a kind the next number, from 1, in the order in which they are met.
    """

    def __init__(self) -> None:
        self._removed: dict[str, dict[Hashable, int]] = {}
        self._kept: dict[str, dict[str, None]] = {}

    def number(self, kind: str, text: Hashable) -> int:
        """The text's number among those removed of this kind."""
        seen = self._removed.setdefault(kind, {})
        return seen.setdefault(text, len(seen) + 1)

    def remove(self, kind: str, text: Hashable) -> None:
        """Count a thing that is gone; the same thing twice counts once."""
        self.number(kind, text)

    def keep(self, kind: str, text: str) -> None:
        """Note a text that a reader may recognise."""
        self._kept.setdefault(kind, {})[text] = None

    @property
    def removed(self) -> dict[str, int]:
        """Kind -> number of distinct things."""
        return {kind: len(seen) for kind, seen in self._removed.items()}

    @property
    def kept(self) -> dict[str, list[str]]:
        """Kind -> texts, sorted."""
        return {kind: sorted(texts) for kind, texts in self._kept.items()}
