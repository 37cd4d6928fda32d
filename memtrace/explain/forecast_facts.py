"""The facts of the request that a forecast run is refused, for the one judge of refused requests."""

from __future__ import annotations

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import round_size
from memtrace.estimate.forecast import RunOom
from memtrace.explain.facts import ByteSpan, FactSource, OomFacts
from memtrace.explain.verdict import Verdict, judge


def judge_forecast(oom: RunOom, config: AllocatorConfig) -> Verdict:
    """What ``memtrace explain`` would say of a recording of this run."""
    refusal = oom.refusal
    return judge(
        OomFacts(
            source=FactSource.SNAPSHOT,
            asked=ByteSpan.exactly(round_size(refusal.tensor_bytes, config)),
            driver_asked=ByteSpan.exactly(refusal.requested_bytes),
            allocated=ByteSpan.exactly(refusal.allocated_bytes),
            reserved=ByteSpan.exactly(refusal.reserved_bytes),
            slack=ByteSpan.exactly(refusal.free_bytes),
            limit=ByteSpan.exactly(config.limit_bytes) if config.limit_bytes is not None else None,
            pieces=refusal.pieces,
            usable_bytes=refusal.usable_bytes,
            still_needed_bytes=refusal.still_needed_bytes,
        )
    )
