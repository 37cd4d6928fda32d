"""Forecasts: the same run again with options changed, where a recording carries its configuration; and the judge's word
on a request that a forecast run is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memtrace.allocator.config import AllocatorConfig, from_snapshot, release_of
from memtrace.allocator.rounding import round_size
from memtrace.analysis import Analysis
from memtrace.estimate.forecast import RunPlan, forecast
from memtrace.estimate.options import RunOptions
from memtrace.estimate.placement import ForecastRefusal, Peaks
from memtrace.estimate.recorded import NOT_COVERED, recorded_gpu, recorded_tokens, setup_of
from memtrace.estimate.schedule import steps_of
from memtrace.estimate.source import ShapeSource
from memtrace.explain.facts import FactSource, OomFacts, measured
from memtrace.explain.verdict import Verdict, judge
from memtrace.frozen import dataclass

_CLOSE_SHARE = 0.05
"""A forecast that misses the recorded peak by more says nothing about changes."""
_MOST_BATCHES = 2_000


@dataclass(frozen=True, slots=True)
class Forecaster:
    """A recorded run as a plan: its configuration, the lengths that were recorded, and the allocator's settings without
    a limit. ``allocated_bytes`` is the most it allocates as it was."""

    plan: RunPlan
    lengths: tuple[int, ...]
    config: AllocatorConfig
    allocated_bytes: int = 0

    def peaks(self, changes: Mapping[str, Any]) -> Peaks | None:
        """Peaks with options of ``memtrace estimate`` changed, ``max_length`` (tokens a sequence) among them; None for
        what is not covered."""
        options = {key: value for key, value in changes.items() if key != "max_length"}
        if options.get("checkpointing"):
            options["embeddings_require_grad"] = True  # whatever enables it switches that on
        longest = changes.get("max_length", max(self.lengths))
        try:
            changed = replace(self.plan.options, **options)
            lengths = [min(length, longest) for length in self.lengths]
            return forecast(replace(self.plan, options=changed, steps=_steps(lengths, changed)), self.config).peaks
        except NOT_COVERED:
            return None


def forecaster_of(analysis: Analysis, held_bytes: int | None) -> Forecaster | None:
    """None where the file carries no configuration, or where the forecast does not match what was recorded: the peak,
    or at a refusal at least the ``held_bytes`` that were reserved then."""
    try:
        setup = setup_of(analysis)
        if setup is None:
            return None
        snapshot, options = analysis.timeline.snapshot, setup.options
        found = recorded_tokens(analysis, setup.shape, options.hidden_bytes) or [options.tokens]
        lengths = tuple(tokens // options.batch for tokens in found[:_MOST_BATCHES] for _ in range(options.batch))
        plan = RunPlan(
            ShapeSource(setup.shape), options, _steps(list(lengths), options), recorded_gpu(snapshot.memtrace)
        )
        config = from_snapshot(snapshot.settings, release_of(snapshot)).with_limit(None)
    except NOT_COVERED:
        return None
    whole = Forecaster(plan, lengths, config)
    peaks = whole.peaks({})
    if peaks is None:
        return None
    if held_bytes is not None:
        matches = peaks.reserved_bytes >= held_bytes
    else:
        measured = analysis.timeline.peaks()[1].size_bytes
        matches = abs(peaks.allocated_bytes - measured) <= _CLOSE_SHARE * measured
    return replace(whole, allocated_bytes=peaks.allocated_bytes) if matches else None


def _steps(lengths: list[int], options: RunOptions) -> Any:
    return steps_of(lengths, batch=options.batch, accumulation=options.accumulation)


def judge_forecast(refusal: ForecastRefusal, config: AllocatorConfig) -> Verdict:
    """What ``memtrace explain`` would say of a recording of this run."""
    return judge(
        OomFacts(
            source=FactSource.SNAPSHOT,
            **measured(asked=round_size(refusal.tensor_bytes, config), driver_asked=refusal.requested_bytes),
            **measured(allocated=refusal.allocated_bytes, reserved=refusal.reserved_bytes),
            **measured(slack=refusal.free_bytes, limit=config.limit_bytes),
            pieces=refusal.pieces,
            usable_bytes=refusal.usable_bytes,
            still_needed_bytes=refusal.still_needed_bytes,
        )
    )
