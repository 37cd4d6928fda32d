"""Detectors, one a finding: a function that looks at a :class:`~memtrace.explain.case.Case` and answers or is silent.

To add one, write the function under ``@detector(title)`` in the module that fits, and docs/findings/ID.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from memtrace.explain.answer import Finding, Together
from memtrace.explain.case import Case
from memtrace.explain.detectors import (  # noqa: F401  # each registers its detectors
    activations,
    circumstances,
    evaluation,
    growth,
    lengths,
    optimizer,
    weights,
)
from memtrace.explain.detectors.detector import CONTEXT, DETECTORS
from memtrace.explain.proof import Bench, proven, together

__all__ = ["CONTEXT", "DETECTORS", "detect", "ranked"]
_IN_PIECES = frozenset({"variable_length_fragmentation", "reserved_in_pieces"})


def ranked(findings: Iterable[Finding], verdict: str) -> tuple[Finding, ...]:
    """What could save most first, circumstances last; first what grows without end, and pieces
    where they are the verdict."""

    def rank(finding: Finding) -> tuple[int, int]:
        if (verdict == "fragmentation" and finding.id in _IN_PIECES) or finding.per_step:
            return 0, 0
        return (2 if finding.id in CONTEXT else 1), -finding.stake_bytes

    return tuple(sorted(findings, key=rank))


def detect(case: Case) -> tuple[tuple[Finding, ...], Together | None]:
    """Every finding that applies, ranked, its changes tried; and what the best change of each comes to together."""
    bench = Bench(case)
    found, held = [], {}
    for look in DETECTORS.values():
        finding = look(case)
        if finding is not None:
            tested, proposals = proven(bench, finding)
            found.append(tested)
            if proposals:
                held[finding.id] = proposals[0]
    findings = ranked(found, case.verdict.verdict)
    return findings, together(bench, {f.id: held[f.id] for f in findings if f.id in held})
