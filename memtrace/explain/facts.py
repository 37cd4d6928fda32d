"""The facts a verdict rests on, the same from a snapshot, a log's text or the failing process itself.

Every amount is an interval of bytes: a point where it was measured, half a last digit to either side where it was
printed (``1.34 GiB`` stands for 1.335 to 1.345 GiB), wider where it was inferred. This module and
:mod:`~memtrace.explain.verdict` import nothing heavy, since the recorder uses them when memory has just run out.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from memtrace.frozen import dataclass
from memtrace.units import format_bytes


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """Bytes between ``low`` and ``high``."""

    low: float
    high: float

    @classmethod
    def exactly(cls, size_bytes: float) -> ByteSpan:
        """A measured amount."""
        return cls(size_bytes, size_bytes)

    @property
    def middle(self) -> float:
        """The most likely value."""
        return (self.low + self.high) / 2

    def __add__(self, other: ByteSpan) -> ByteSpan:
        return ByteSpan(self.low + other.low, self.high + other.high)

    def __sub__(self, other: ByteSpan) -> ByteSpan:
        return ByteSpan(self.low - other.high, self.high - other.low)

    def times(self, factor: float) -> ByteSpan:
        """Scaled by a positive factor."""
        return ByteSpan(self.low * factor, self.high * factor)

    def floor_zero(self) -> ByteSpan:
        """The part that is not negative (a difference known to be a size)."""
        return ByteSpan(max(0.0, self.low), max(0.0, self.high))

    def __str__(self) -> str:
        return format_bytes(round(self.middle))


def measured(**sizes: float | None) -> dict[str, Any]:
    """Measured amounts by name; None stays unknown."""
    return {name: None if value is None else ByteSpan.exactly(value) for name, value in sizes.items()}


def smaller(one: ByteSpan | None, other: ByteSpan | None) -> ByteSpan | None:
    """Minimum of two amounts; an unknown one is ignored."""
    if one is None or other is None:
        return one or other
    return ByteSpan(min(one.low, other.low), min(one.high, other.high))


def at_least(one: ByteSpan, other: ByteSpan) -> bool | None:
    """Whether ``one >= other``; None where the intervals leave it open."""
    if one.low >= other.high:
        return True
    if one.high < other.low:
        return False
    return None


class FactSource(Enum):
    """Where facts come from."""

    SNAPSHOT = "a recording"
    PROCESS = "the process itself"
    TEXT = "what was printed"


class Refuser(Enum):
    """What said no."""

    ALLOCATOR = "PyTorch's allocator, or the driver on its behalf"
    FRACTION = "the process's own limit, before the driver was asked"
    RETRY = "one driver call, after which PyTorch tries again"
    SINGLE = "a bound on single requests"
    LIBRARY = "a library that allocates for itself in a PyTorch process"
    FRAMEWORK = "another framework, or a plan that did not work out"
    HOST = "the machine's memory, or a kernel's on-chip memory"
    KILLED = "somebody who killed the process"


@dataclass(frozen=True, slots=True)
class ForwardProgress:
    """``done`` whole layers of ``total`` (None if unknown, or if the pass began before the recording), each of which
    added ``bytes_per_layer``."""

    done: int
    total: int | None
    bytes_per_layer: int

    @property
    def needed_bytes(self) -> int | None:
        """What the layers that are left would add; None where their number is unknown."""
        return None if self.total is None else max(0, self.total - self.done) * self.bytes_per_layer

    @property
    def at_least_bytes(self) -> int:
        """What is needed at the least: the layers that are left or, where their number is unknown, one."""
        return self.bytes_per_layer if self.needed_bytes is None else self.needed_bytes


@dataclass(frozen=True, slots=True)
class OomFacts:
    """One refused request and the memory around it; None where nothing tells.

    ``asked``: the block it needs; ``driver_asked``: what the driver would have been asked for (a text prints only
    that). ``slack``: free inside what is reserved, pending frees included; ``free``: of the card; ``limit``: of this
    process. ``own_outside``: this process's memory outside the allocator; ``others``: other processes'.
    ``still_needed_bytes``: what the pass would have asked for from here on, this request included.
    """

    source: FactSource
    refuser: Refuser = Refuser.ALLOCATOR
    what: str = ""
    """A sentence on what was refused by whom, where the refuser is not the allocator."""
    asked: ByteSpan | None = None
    driver_asked: ByteSpan | None = None
    allocated: ByteSpan | None = None
    reserved: ByteSpan | None = None
    slack: ByteSpan | None = None
    free: ByteSpan | None = None
    total: ByteSpan | None = None
    limit: ByteSpan | None = None
    own_outside: ByteSpan | None = None
    others: ByteSpan | None = None
    pieces: int | None = None
    usable_bytes: int | None = None
    """The largest free block that the request's pool and stream could have used."""
    still_needed_bytes: int | None = None
    progress: ForwardProgress | None = None
    other_processes: tuple[tuple[int, int], ...] = ()
    """(pid, bytes) of processes on the card that are not this one, as far as they are named."""
    own_pid: int | None = None
    """A process that a text lists as another and that must be this one, by its figures."""
    is_exact: bool = True
    """False where the recording could not be reproduced, so that sizes of blocks are estimates."""

    @property
    def need(self) -> ByteSpan | None:
        """What the driver would have had to give."""
        return self.driver_asked or self.asked

    @property
    def is_limited(self) -> bool:
        """Whether the process's limit, not the card, is what bounds it."""
        if self.limit is None or self.reserved is None:
            return self.limit is not None and (self.total is None or self.limit.high < self.total.low)
        return self.free is None or (self.limit - self.reserved).low < self.free.low

    @property
    def capacity(self) -> ByteSpan | None:
        """What the process could have had: its limit, or what it held and what the card had left, the smaller; the
        card's size where neither is known. Memory of others can't be had."""
        held = self.reserved + self.free if self.reserved is not None and self.free is not None else self.total
        return smaller(self.limit, held)

    @property
    def room(self) -> ByteSpan | None:
        """What the driver or the limit would still give."""
        left = (self.limit - self.reserved).floor_zero() if self.limit and self.reserved else None
        return smaller(self.free, left)

    @property
    def outside(self) -> ByteSpan | None:
        """What is neither free nor this allocator's."""
        if self.total is None or self.free is None or self.reserved is None:
            return None
        return (self.total - self.free - self.reserved).floor_zero()
