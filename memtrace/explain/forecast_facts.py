"""The facts of the request that a forecast run is refused, for the one judge of refused requests."""

from __future__ import annotations

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import round_size
from memtrace.estimate.forecast import RunOom
from memtrace.explain.facts import OomFacts, Source, Span
from memtrace.explain.verdict import Verdict, judge


def judge_forecast(oom: RunOom, config: AllocatorConfig) -> Verdict:
    """What ``memtrace explain`` would say of a recording of this run."""
    refusal = oom.refusal
    return judge(
        OomFacts(
            source=Source.SNAPSHOT,
            asked=Span.exactly(round_size(refusal.tensor_bytes, config)),
            driver_asked=Span.exactly(refusal.requested_bytes),
            allocated=Span.exactly(refusal.allocated_bytes),
            reserved=Span.exactly(refusal.reserved_bytes),
            slack=Span.exactly(refusal.free_bytes),
            limit=Span.exactly(config.limit_bytes) if config.limit_bytes is not None else None,
            pieces=refusal.pieces,
            usable_bytes=refusal.usable_bytes,
            still_needed_bytes=refusal.still_needed_bytes,
        )
    )
