"""The changes that can be made to a run so that it needs less memory, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from memtrace.allocator.config import AllocatorConfig
from memtrace.estimate.forecast import RunPlan
from memtrace.estimate.options import ALL_LINEAR, RunOptions
from memtrace.estimate.schedule import MicroBatch, Step
from memtrace.estimate.source import ShapeSource, StreamSource
from memtrace.frozen import dataclass

_RECOMPUTED = 1 / 3  # of a step: one forward pass more for each forward and backward pass, which takes twice as long
_LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class FitChange:
    """One option changed. ``why`` says what it does and what it costs."""

    option: str
    was: str
    now: str
    why: str


@dataclass(frozen=True, slots=True)
class FitRun:
    """A run with its allocator settings, limit included."""

    plan: RunPlan
    config: AllocatorConfig


Make = Callable[[FitRun], tuple[FitRun, str, str] | None]


@dataclass(frozen=True, slots=True)
class Move:
    """A change that can be made: ``time_share`` more time a step; ``alters`` says how far the training becomes another
    one (0: the same), on a scale of our own that only orders plans.

    ``make`` gives the changed run, None where there is nothing to change.
    """

    option: str
    time_share: float
    alters: float
    make: Make
    why: str

    @property
    def slowdown(self) -> str:
        """``none``, ``small`` (below a tenth) or ``large``."""
        return "none" if self.time_share <= 0 else "small" if self.time_share < 0.1 else "large"

    @property
    def cost(self) -> str:
        """For people: the time that it takes, or that it makes another training."""
        if self.alters:
            return "other training"
        return f"about {self.time_share:.0%} more time" if self.time_share > 0 else "free"


def _sets(when: Callable[[RunOptions], bool] | None = None, **fields: Any) -> Make:
    """A change of fields of the options, the first of which is told, where it differs and ``when`` says so."""
    name, value = next(iter(fields.items()))

    def make(run: FitRun) -> tuple[FitRun, str, str] | None:
        options = run.plan.options
        was = getattr(options, name)
        if was == value or (when is not None and not when(options)):
            return None
        return replace(run, plan=replace(run.plan, options=replace(options, **fields))), _words(was), _words(value)

    return make


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _expandable(run: FitRun) -> tuple[FitRun, str, str] | None:
    if run.config.expandable_segments:
        return None
    return replace(run, config=replace(run.config, expandable_segments=True)), "off", "expandable_segments:True"


def _longest_first(run: FitRun) -> tuple[FitRun, str, str] | None:
    steps = tuple(sorted(run.plan.steps, key=lambda step: -max(batch.tokens for batch in step)))
    if steps == run.plan.steps:
        return None
    return replace(run, plan=replace(run.plan, steps=steps)), "given", "longest-first"


def _smaller_batches(run: FitRun) -> tuple[FitRun, str, str] | None:
    """Micro-batches of half as many sequences, twice as many of them a step: the same training."""
    rows = max(batch.rows for step in run.plan.steps for batch in step)
    if rows < 2:
        return None
    steps = tuple(tuple(part for batch in step for part in _halves(batch)) for step in run.plan.steps)
    options = run.plan.options
    options = replace(options, batch=max(options.batch // 2, 1), accumulation=2 * options.accumulation)
    changed = replace(run, plan=replace(run.plan, steps=steps, options=options))
    return changed, f"{rows}", f"{-(-rows // 2)}"


def _halves(batch: MicroBatch) -> list[MicroBatch]:
    first = -(-batch.rows // 2)
    return [replace(batch, rows=rows) for rows in (first, batch.rows - first) if rows]


def _shorter(run: FitRun) -> tuple[FitRun, str, str] | None:
    """Sequences cut to three quarters of the longest."""
    longest = max(batch.length for step in run.plan.steps for batch in step)
    most = longest * 3 // 4 // 64 * 64
    if most < _LEAST_TOKENS:
        return None
    steps: tuple[Step, ...] = tuple(
        tuple(replace(batch, length=min(batch.length, most)) for batch in step) for step in run.plan.steps
    )
    options = replace(run.plan.options, sequence=min(run.plan.options.sequence, most))
    return replace(run, plan=replace(run.plan, steps=steps, options=options)), f"{longest}", f"{most}"


def _half_rank(run: FitRun) -> tuple[FitRun, str, str] | None:
    rank = run.plan.options.rank
    return _sets(rank=rank // 2)(run) if rank > 8 else None


def few_targets(source: StreamSource) -> tuple[str, ...]:
    """Attention's queries and values; where one weight holds them and the keys, that one."""
    fused = isinstance(source, ShapeSource) and source.shape.fused_projections
    return ("qkv_proj",) if fused else ("q_proj", "v_proj")


def _fewer_targets(run: FitRun) -> tuple[FitRun, str, str] | None:
    few = few_targets(run.plan.source)
    return _sets(lambda options: options.targets == (ALL_LINEAR,), targets=few)(run)


def moves() -> Iterator[Move]:
    """Every change, cheapest first; what is listed twice can be made twice."""
    yield Move("allocator settings", 0, 0, _expandable, "free pieces join: no more loss to fragmentation")
    yield Move("keep logits", 0, 0, _sets(keep_logits=False), "the loop lets go of the logits before backward")
    sdpa = _sets(lambda o: o.attention == "eager", attention="sdpa")
    yield Move("attention", -0.05, 0, sdpa, "no tokens x tokens matrices, and faster")
    scales = _sets(lambda o: o.quant == "nf4", quant="nf4-dq")
    yield Move("quantization", 0, 0, scales, "the scales of the weights are quantised too")
    yield Move("order", 0, 0, _longest_first, "the longest batch comes first, when memory is whole")
    eight = _sets(lambda o: not o.optimizer.startswith(("paged_adamw_8bit", "sgd")), optimizer="adamw_8bit")
    yield Move("optimizer", 0.01, 0, eight, "8-bit states: a quarter of their memory")
    paged = _sets(lambda o: not o.optimizer.startswith(("paged", "sgd")), optimizer="paged_adamw_8bit")
    yield Move("optimizer", 0.02, 0, paged, "8-bit states in pageable memory, outside the allocator")
    chunks = _sets(lambda o: o.loss == "full", loss="chunked", keep_logits=False)
    yield Move("loss", 0.03, 0, chunks, "logits of some tokens at a time, made again in the backward pass")
    bits = _sets(lambda o: o.quant in ("none", "int8"), quant="nf4-dq")
    yield Move("quantization", 0.08, 0, bits, "weights in 4 bits, turned to 16 for each product")
    again = _sets(checkpointing=True, embeddings_require_grad=True)  # whatever switches one on, does the other
    yield Move("checkpointing", _RECOMPUTED, 0, again, "each layer's forward pass runs twice")
    for _ in range(6):
        yield Move("micro-batch", 0.05, 0, _smaller_batches, "fewer at once, more often; M: the accumulation so far")
    half = _sets(prepare_kbit=False)
    yield Move("precision", 0, 0.1, half, "hidden states, norms and head in 16 bits: less stable")
    for _ in range(3):
        yield Move("rank", 0, 0.2, _half_rank, "half as much is trained")
    yield Move("targets", 0, 0.3, _fewer_targets, "only attention's queries and values get adapters")
    for _ in range(8):
        yield Move("length", 0, 0.25, _shorter, "longer sequences are cut")


OPTIONS = tuple(dict.fromkeys(move.option for move in moves()))
