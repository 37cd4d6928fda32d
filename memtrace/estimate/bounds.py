"""What no real run reaches: beyond it a number is a slip, and working on it would take for ever."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

from memtrace.errors import UsageError
from memtrace.units import TIB, format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.estimate.options import RunOptions
    from memtrace.estimate.shapes import ModelShape

_MOST_TOKENS = 100_000_000  # of a micro-batch
_MOST_CHUNKS = 2_048  # of the chunked loss, each of which is stepped through
_MOST_MICRO_BATCHES = 1_000_000
_MOST_BYTES = 32 * TIB  # at once; allocator addresses have 47 bits, and segments are more than what lives in them


def check_options(options: RunOptions) -> None:
    """Raise UsageError for a run that nobody trains."""
    tokens = options.tokens
    if tokens > _MOST_TOKENS:
        raise UsageError(
            f"{format_count(tokens)} tokens a micro-batch ({options.sequence} × {options.batch}) is out of range: at "
            f"most {format_count(_MOST_TOKENS)}"
        )
    if options.accumulation > _MOST_MICRO_BATCHES:
        raise UsageError(f"accumulation is out of range: at most {format_count(_MOST_MICRO_BATCHES)} micro-batches")
    if options.loss == "chunked" and tokens > _MOST_CHUNKS * options.chunk_tokens:
        raise UsageError(
            f"{format_count(-(-tokens // options.chunk_tokens))} chunks of the loss is out of range: at most "
            f"{format_count(_MOST_CHUNKS)}"
        )


def check_rank(options: RunOptions, shape: ModelShape) -> None:
    """Raise UsageError for a rank above the widest layer's, where an adapter could be no larger than the weight."""
    widest = max(max(inputs, outputs) for _, inputs, outputs, _ in shape.linears)
    if options.rank > widest:
        raise UsageError(f"rank {options.rank} is out of range: no layer of {shape.name} is wider than {widest}")


def check_size(events: Iterable[int], sizes: list[int]) -> None:
    """Raise UsageError for a run that would hold more than 32 TiB at once: events and bytes as in a tape."""
    if sum(sizes) <= _MOST_BYTES:
        return
    changes = (sizes[event] if 0 <= event < len(sizes) else -sizes[~event] if event < 0 else 0 for event in events)
    highest = max(accumulate(changes), default=0)
    if highest > _MOST_BYTES:
        raise UsageError(
            f"the run would need {format_bytes(highest)}, more than any device has: "
            "check the model's sizes and the options"
        )
