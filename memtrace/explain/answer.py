"""The answer of ``memtrace explain``: one dataclass, shown alike as JSON, text and Markdown.

Sizes are bytes. ``bytes`` of a finding is what it measured in the recording (or read from a text), never an estimate;
estimates stand in ``saves_bytes`` of an advice, with what they rest on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from memtrace.frozen import dataclass


class Basis(StrEnum):
    """What a saving rests on: the allocator simulated over the recorded program, the same run forecast with the change
    made, arithmetic, or experience alone."""

    REPLAY = "replay"
    FORECAST = "forecast"
    FORMULA = "formula"
    RULE = "rule"


@dataclass(frozen=True, slots=True)
class Advice:
    """One concrete change. ``saves_bytes`` is what the peak (or the refused state) would lose; None if unknown.

    ``proof``: the terms of a formula, or what a replay or forecast of the change came to.
    """

    change: str
    saves_bytes: int | None
    basis: Basis
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Together:
    """All changes at once, one a finding: the most that would be reserved, against the capacity (or the recorded peak).
    ``enough``: the fewest findings whose changes do; empty where nothing was refused or nothing is enough.
    ``tokens_share``: if they do not fit, how much of the batch's tokens would at most, where that is known."""

    peak_bytes: int
    capacity_bytes: int
    fits: bool
    basis: Basis
    enough: tuple[str, ...] = ()
    tokens_share: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, measured. ``evidence`` says what in the recording speaks for it; ``frame`` is the main call site."""

    id: str
    title: str
    bytes: int | None
    evidence: str
    advice: tuple[Advice, ...] = ()
    frame: str = ""
    per_step: bool = False
    """``bytes`` is a rate: bytes a step."""
    beside: str = ""
    """What it holds beside ``bytes`` that the first advice saves too, in a few words with its size."""
    tried: tuple[Advice, ...] = ()
    """Changes that were tried and save next to nothing: no advice, but said with their figures."""

    @property
    def stake_bytes(self) -> int:
        """What acting on it could win, for sorting: the best saving, else the bytes it measured."""
        savings = [advice.saves_bytes for advice in self.advice if advice.saves_bytes is not None]
        return max(savings) if savings else (self.bytes or 0)


@dataclass(frozen=True, slots=True)
class When:
    """When memory ran out or, with ``kind`` "peak", when use was highest. ``step`` counts from the recording's start;
    with ``kind`` "log" phase and step are read from a log (its progress bar counts finished steps), without an event.

    ``first_step`` is None where the recording can't tell. ``grew_bytes`` compares with the same point of the previous
    pass over the model, by ``category/subcategory``; empty where there was none.
    """

    phase: str
    step: int | None
    first_step: bool | None
    event: int | None
    kind: str
    grew_bytes: Mapping[str, int]
    lora: Mapping[str, str] = field(default_factory=lambda: {"meaning": "adapters"})
    """What the category of that key holds, as in the report."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the process could have had: at least ``low_bytes``, less than or equal to ``high_bytes``.

    ``kind``: "limit" (of this process) or "card". ``source``: "given", "log", "recorded", "measured" (the card was
    full) or "inferred" (a refusal although the card had room).
    """

    low_bytes: int
    high_bytes: int
    kind: str
    source: str

    @property
    def is_exact(self) -> bool:
        """Whether both bounds agree."""
        return self.low_bytes == self.high_bytes


@dataclass(frozen=True, slots=True)
class Pieces:
    """Free memory inside what was reserved at a refusal. ``usable``: largest block that could have served the request's
    pool and stream; ``own_free``: all of that pool and stream; ``elsewhere``: free bytes of other pools and streams;
    ``releasable``: what a flush would have given back; ``slack``: all of it together, pending frees included."""

    allocated_bytes: int
    slack_bytes: int
    usable_bytes: int
    own_free_bytes: int
    elsewhere_bytes: int
    releasable_bytes: int
    pending_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything ``explain`` has to say; the first fields are the JSON contract."""

    oom: Mapping[str, object] | None
    verdict: str
    confidence: str
    when: When | None
    because: tuple[str, ...]
    findings: tuple[Finding, ...]
    together: Together | None = None
    ooms: tuple[Mapping[str, object], ...] = ()
    capacity: Capacity | None = None
    pieces: Pieces | None = None
    needed_bytes: int | None = None
    """What the pass would still have asked for from a refusal on, estimated; None if nothing tells."""
    sizes: tuple[str, ...] = ()
    worth_saying: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
