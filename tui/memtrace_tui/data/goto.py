"""Where a line leads when it is opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goto:
    """A screen, and what to show there: an event for the cursor, a filter for the tables, a segment or a block.

    ``address`` selects the segment or block that holds it.
    """

    view: str
    event: int | None = None
    filter: str | None = None
    address: int | None = None
