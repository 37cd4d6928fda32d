"""Where a line leads when it is opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goto:
    """A screen ("" the present one), and what to show there: an event for the cursor, a filter, a segment or a block.

    ``address`` selects the segment or block that holds it. With ``frame`` (a number in the table of stacks) or
    ``history`` (a range of addresses) no screen but a list of what is known of it opens.
    """

    view: str = ""
    event: int | None = None
    filter: str | None = None
    address: int | None = None
    frame: int | None = None
    history: tuple[int, int] | None = None
