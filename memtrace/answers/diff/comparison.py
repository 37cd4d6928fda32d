"""The answer of a comparison: two budgets, what lies between them, and the call sites that account for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtrace.answers.report import Report
from memtrace.frozen import dataclass

_HEAD = (
    "file", "device", "at", "moment", "requested_bytes", "allocated_bytes", "reserved_bytes", "categories",
    "subcategories", "peaks", "exact", "warnings",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SiteDelta:
    """One call site in both recordings; ``frame`` is its place in AFTER, or in BEFORE if it is gone.

    ``match`` says what showed that the two are one site (see :class:`memtrace.answers.diff.match.Pair`); None: it is
    only in one of them. Kinds of fragmentation have no frame and match by their name (``kind``).
    """

    category: str
    subcategory: str
    module: str
    frame: str
    frame_before: str
    before_bytes: int
    after_bytes: int
    delta_bytes: int
    before_count: int
    after_count: int
    match: str | None


@dataclass(frozen=True, slots=True)
class Delta:
    """AFTER minus BEFORE. Peaks are over each whole recording, the rest at each one's event."""

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    categories: Mapping[str, int]
    subcategories: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended: ``ok`` or ``oom``, and the step it died in or got to (None where steps were not recognised)."""

    outcome: str
    step: int | None


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of the change. ``was`` and ``now`` are what the two runs have there (``from`` and ``to`` in the JSON)."""

    id: str
    title: str
    bytes: int
    evidence: str
    was: str | None = None
    now: str | None = None

    def as_json(self) -> dict[str, Any]:
        """With the keys of the contract."""
        keys = {"id": self.id, "title": self.title, "bytes": self.bytes, "evidence": self.evidence}
        return {**keys, "from": self.was, "to": self.now}


@dataclass(frozen=True, slots=True)
class Story:
    """How two runs ended, what is unlike in them, and why the peak changed: ``causes`` sum to ``change_bytes``.

    ``explains`` names the peak: ``peak_reserved_bytes`` or ``peak_allocated_bytes``. ``unlike`` has (before, after);
    ``events``, too: where each run was looked at for the causes, its peak of allocated memory in the steps of both.
    """

    before: RunEnd
    after: RunEnd
    unlike: dict[str, tuple[str | None, str | None]]
    alike: dict[str, str]
    explains: str
    was_bytes: int
    now_bytes: int
    causes: tuple[Cause, ...]
    events: tuple[int, int]
    curves: tuple[str, str]
    """Allocated memory of each run over its events, one character for a sixtieth, on one scale."""
    sentence: str

    @property
    def change_bytes(self) -> int:
        """After minus before."""
        return self.now_bytes - self.was_bytes

    def as_json(self) -> dict[str, Any]:
        """The keys that a comparison gets from it."""
        ends = {"before": self.before.outcome, "after": self.after.outcome}
        return {
            "outcome": ends | {"before_step": self.before.step, "after_step": self.after.step},
            "explains": self.explains,
            "causes": [cause.as_json() for cause in self.causes],
            "causes_at": {"before": self.events[0], "after": self.events[1]},
            "unlike": {name: {"before": a, "after": b} for name, (a, b) in self.unlike.items()},
            "alike": self.alike,
            "sentence": self.sentence,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """Two budgets and what lies between them. ``sites`` are sorted by size of change, unchanged ones last."""

    before: Report
    after: Report
    delta: Delta
    sites: tuple[SiteDelta, ...]
    story: Story | None = None

    @property
    def sentence(self) -> str:
        """What the author of the change would write."""
        return self.story.sentence if self.story is not None else ""

    @property
    def lora_meaning(self) -> str:
        """What the category ``lora`` holds in the two: ``trained`` where neither has adapters."""
        return "trained" if self.before.lora == self.after.lora == {"meaning": "trained"} else "adapters"

    @property
    def unmatched(self) -> tuple[SiteDelta, ...]:
        """Sites of one recording that nothing in the other answers to."""
        return tuple(site for site in self.sites if site.match is None)

    def to_json(self) -> dict[str, Any]:
        """The answer as the contract has it."""
        gone = [site for site in self.unmatched if site.after_count == 0]
        new = [site for site in self.unmatched if site.after_count > 0]
        return {
            "before": head(self.before),
            "after": head(self.after),
            "delta": self.delta,
            "sites": self.sites,
            "unmatched": {
                "before_bytes": sum(site.before_bytes for site in gone),
                "after_bytes": sum(site.after_bytes for site in new),
                "before": gone,
                "after": new,
            },
            "compared": {
                "before": moment(self.before),
                "after": moment(self.after),
                "alike": self.before.moment == self.after.moment,
            },
            **(self.story.as_json() if self.story is not None else {}),
        }


def moment(budget: Report) -> dict[str, Any]:
    """Where a run was looked at."""
    return {"step": budget.moment.step, "phase": budget.moment.phase, "event": budget.at.event}


def head(budget: Report) -> dict[str, Any]:
    """A report without its call sites."""
    return {name: getattr(budget, name) for name in _HEAD}
