"""The same run predicted again with options changed, where a recording carries its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memtrace.analysis import Analysis
from memtrace.errors import MemtraceError
from memtrace.estimate.estimate import estimate
from memtrace.estimate.recorded import Setup, setup_of

_CLOSE_SHARE = 0.05
"""A prediction that misses the recorded peak by more says nothing about changes."""
_ERRORS = (MemtraceError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Predicts one step of the recorded setup; ``allocated_bytes`` is the most it allocates as it was."""

    setup: Setup
    allocated_bytes: int

    def peaks(self, options: Mapping[str, Any]) -> tuple[int, int] | None:
        """(most allocated, most reserved) with the options changed, bytes; None for options that are not covered."""
        try:
            found = estimate(self.setup.shape, replace(self.setup.options, **options))
        except _ERRORS:
            return None
        return found.peak_allocated_bytes, found.peak_reserved_bytes


def forecaster_of(analysis: Analysis, held_bytes: int | None) -> Forecaster | None:
    """None where the file carries no configuration, or where the prediction does not match what was recorded: the peak,
    or at a refusal at least the ``held_bytes`` that were reserved then."""
    try:
        setup = setup_of(analysis)
        if setup is None:
            return None
        found = estimate(setup.shape, setup.options)
    except _ERRORS:
        return None  # not covered, or not a configuration as memtrace writes it
    if held_bytes is not None:
        matches = found.peak_reserved_bytes >= held_bytes
    else:
        measured = analysis.timeline.peaks()[1].size_bytes
        matches = abs(found.peak_allocated_bytes - measured) <= _CLOSE_SHARE * measured
    return Forecaster(setup, found.peak_allocated_bytes) if matches else None
