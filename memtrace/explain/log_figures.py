"""The figures of an out-of-memory text as intervals, and what follows from them.

A printed ``1.34 GiB`` stands for 1.335 to 1.345 GiB. Differences of such figures are uncertain by megabytes, often as
much as the request itself, so every comparison is made between intervals and may come out undecided.
"""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.oomlog import OomMessage
from memtrace.units import format_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes between ``low`` and ``high``."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The most likely value."""
        return (self.low + self.high) / 2

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Span) -> Span:
        return Span(self.low - other.high, self.high - other.low)

    def times(self, factor: float) -> Span:
        """Scaled by a positive factor."""
        return Span(self.low * factor, self.high * factor)

    def floor_zero(self) -> Span:
        """The part that is not negative (a difference known to be a size)."""
        return Span(max(0.0, self.low), max(0.0, self.high))

    def __str__(self) -> str:
        return format_bytes(round(self.middle))


def smaller(one: Span | None, other: Span | None) -> Span | None:
    """Minimum of two amounts; an unknown one is ignored."""
    if one is None or other is None:
        return one or other
    return Span(min(one.low, other.low), min(one.high, other.high))


def at_least(one: Span, other: Span) -> bool | None:
    """Whether ``one >= other``; None where the printed digits leave it open."""
    if one.low >= other.high:
        return True
    if one.high < other.low:
        return False
    return None


@dataclass(frozen=True, slots=True)
class LogFigures:
    """Amounts in bytes as intervals; None where the text neither prints an amount nor implies it.

    ``reserved`` and ``slack`` (reserved but unallocated) follow from each other and ``allocated``. ``outside`` is
    what is neither free nor PyTorch's: total - free - reserved. ``own_outside`` is this process's part of that
    (its process figure - reserved), ``others`` the rest. ``room`` is what the driver or the process limit would
    still give, ``capacity`` the smaller of the two bounds.
    """

    tried: Span | None
    total: Span | None
    free: Span | None
    allocated: Span | None
    reserved: Span | None
    slack: Span | None
    limit: Span | None
    room: Span | None
    capacity: Span | None
    outside: Span | None
    own_outside: Span | None
    others: Span | None
    own_pid: int | None
    """A process line that must be this process, by the figures."""


def log_figures(message: OomMessage) -> LogFigures:
    """Intervals of a message's figures and their derived amounts."""

    def span(name: str) -> Span | None:
        found = message.interval(name)
        return Span(*found) if found else None

    total, free, allocated = span("total_bytes"), span("free_bytes"), span("allocated_bytes")
    reserved, slack, limit = span("reserved_bytes"), span("reserved_unallocated_bytes"), span("limit_bytes")
    process = span("process_bytes")
    if allocated is not None and reserved is None and slack is not None:
        reserved = allocated + slack
    elif allocated is not None and slack is None and reserved is not None:
        slack = (reserved - allocated).floor_zero()
    own_pid: int | None = None
    if total and free and reserved and process is None:
        own_pid, process = _own_process(message, total - free, reserved)
    outside = (total - free - reserved).floor_zero() if total and free and reserved else None
    return LogFigures(
        tried=span("tried_bytes"),
        total=total,
        free=free,
        allocated=allocated,
        reserved=reserved,
        slack=slack,
        limit=limit,
        room=smaller(free, (limit - reserved).floor_zero() if limit and reserved else None),
        capacity=smaller(total, limit),
        outside=outside,
        own_outside=(process - reserved).floor_zero() if process and reserved else None,
        others=(total - free - process).floor_zero() if process and total and free else None,
        own_pid=own_pid,
    )


def _own_process(message: OomMessage, used: Span, reserved: Span) -> tuple[int | None, Span | None]:
    """The process line that is this process, if the figures leave no other choice.

    Inside a container the failing process appears under a number it does not know. What PyTorch reserved is in use
    by one of the listed processes, or by one that is not listed: if all that the others hold and all that nobody is
    named for is less than it, the process in question is the one.
    """
    known = [(pid, amount) for pid, amount in message.other_processes if amount is not None]
    if not known or len(known) != len(message.other_processes):
        return None, None
    half = 0.005 * (1 << 30)
    named = sum(amount for _, amount in known)
    unnamed_high = max(0.0, used.high - named + half * len(known))
    fitting = [(pid, amount) for pid, amount in known if amount + half >= reserved.low]
    if len(fitting) == 1 and unnamed_high < reserved.low:
        pid, amount = fitting[0]
        return pid, Span(amount - half, amount + half)
    return None, None
