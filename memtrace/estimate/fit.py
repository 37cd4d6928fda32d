"""The cheapest changes that make a run fit, each plan proven by a forecast, and what each option adds.

Changes are tried in order of what they cost: first those that cost no time, then a little, then recomputation and
smaller micro-batches, last those that make it another training (shorter sequences, fewer adapters). A plan is the
fewest and cheapest changes that fit together: everything that still fits without it was taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import factorial
from typing import Any

from memtrace.allocator.config import AllocatorConfig
from memtrace.estimate.advice import requested_peak
from memtrace.estimate.cells import Cells
from memtrace.estimate.estimate import kernels_of
from memtrace.estimate.forecast import Forecast, RunPlan, forecast, prepare
from memtrace.estimate.options import ALL_LINEAR, RunOptions
from memtrace.estimate.schedule import MicroBatch, Step
from memtrace.estimate.source import ShapeSource, StreamSource

SAFETY_SHARE = 0.02
"""A plan must fit with this share of the limit to spare: estimates of reserved memory are off by 3 % at most."""
_RECOMPUTED = 1 / 3  # of a step: one forward pass more for each forward and backward pass, which takes twice as long
_LEAST_TOKENS = 256
_WHOLE_STATES = ("adamw_torch", "adamw_torch_fused", "adamw_bnb", "paged_adamw_32bit")
_MOST_PLANS = 4
_WORST_STEPS = 3  # steps that a change is tried on before it is tried on the whole run
Progress = Callable[[float], None]


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


@dataclass(frozen=True, slots=True)
class FitPlan:
    """Changes that together fit. ``margin_bytes`` is what the limit leaves above the peak of reserved memory."""

    changes: tuple[FitChange, ...]
    moves: tuple[Move, ...]
    forecast: Forecast
    margin_bytes: int

    @property
    def time_share(self) -> float:
        """How much longer a step takes, as a share."""
        return sum(move.time_share for move in self.moves)

    @property
    def cost(self) -> float:
        """For comparing plans: time, and double what it alters."""
        return self.time_share + 2 * sum(move.alters for move in self.moves) + 0.001 * len(self.moves)

    @property
    def slowdown(self) -> str:
        """The worst of its changes."""
        return max((move.slowdown for move in self.moves), key=("none", "small", "large").index, default="none")

    def as_json(self) -> dict[str, Any]:
        """With the keys of the contract."""
        changes = [{"option": c.option, "from": c.was, "to": c.now, "why": c.why} for c in self.changes]
        return {
            "changes": changes,
            "peak_reserved_bytes": self.forecast.peak_reserved_bytes,
            "margin_bytes": self.margin_bytes,
            "slowdown": self.slowdown,
            "time_share": round(self.time_share, 3),
            "other_training": any(move.alters for move in self.moves),
            "basis": "forecast",
        }


def _option(
    name: str, value: Any, word: str | None = None, **also: Any
) -> Callable[[FitRun], tuple[FitRun, str, str] | None]:
    """A change of one field of the options, to a value that it does not have yet."""

    def make(run: FitRun) -> tuple[FitRun, str, str] | None:
        options = run.plan.options
        was = getattr(options, name)
        if was == value:
            return None
        plan = replace(run.plan, options=replace(options, **{name: value}, **also))
        return replace(run, plan=plan), _words(was), word or _words(value)

    return make


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _only_if(test: Callable[[RunOptions], bool], make: Make) -> Make:
    return lambda run: make(run) if test(run.plan.options) else None


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
    return changed, f"{rows}", f"{-(-rows // 2)} (twice the accumulation)"


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
    return _option("rank", rank // 2)(run) if rank > 8 else None


def _few_targets(source: StreamSource) -> tuple[str, ...]:
    """Attention's queries and values; where one weight holds them and the keys, that one."""
    fused = isinstance(source, ShapeSource) and source.shape.fused_projections
    return ("qkv_proj",) if fused else ("q_proj", "v_proj")


def _fewer_targets(run: FitRun) -> tuple[FitRun, str, str] | None:
    few = _few_targets(run.plan.source)
    return _option("targets", few)(run) if run.plan.options.targets == (ALL_LINEAR,) else None


def moves() -> Iterator[Move]:
    """Every change, cheapest first; what is listed twice can be made twice."""
    yield Move("allocator settings", 0, 0, _expandable, "free pieces join: no more loss to fragmentation")
    yield Move("keep logits", 0, 0, _option("keep_logits", False), "the loop lets go of the logits before backward")
    sdpa = _only_if(lambda o: o.attention == "eager", _option("attention", "sdpa"))
    yield Move("attention", -0.05, 0, sdpa, "no tokens x tokens matrices, and faster")
    scales = _only_if(lambda o: o.quant == "nf4", _option("quant", "nf4-dq"))
    yield Move("quantization", 0, 0, scales, "the scales of the weights are quantised too")
    yield Move("order", 0, 0, _longest_first, "the longest batch comes first, when memory is whole")
    states = _only_if(
        lambda o: not o.optimizer.startswith(("paged_adamw_8bit", "sgd", "adamw_8bit")),
        _option("optimizer", "adamw_8bit"),
    )
    yield Move("optimizer", 0.01, 0, states, "8-bit states: a quarter of their memory")
    paged = _only_if(lambda o: not o.optimizer.startswith(("paged", "sgd")), _option("optimizer", "paged_adamw_8bit"))
    yield Move("optimizer", 0.02, 0, paged, "8-bit states in pageable memory, outside the allocator")
    chunks = _only_if(lambda o: o.loss == "full", _option("loss", "chunked", keep_logits=False))
    yield Move("loss", 0.03, 0, chunks, "logits of some tokens at a time, made again in the backward pass")
    bits = _only_if(lambda o: o.quant in ("none", "int8"), _option("quant", "nf4-dq"))
    yield Move("quantization", 0.08, 0, bits, "weights in 4 bits, turned to 16 for each product")
    again = _option("checkpointing", True, embeddings_require_grad=True)  # whatever switches one on, does the other
    yield Move("checkpointing", _RECOMPUTED, 0, again, "each layer's forward pass runs twice")
    for _ in range(6):
        yield Move("micro-batch", 0.05, 0, _smaller_batches, "half as many sequences at once, twice as often")
    half = _only_if(lambda o: o.prepare_kbit, _option("prepare_kbit", False))
    yield Move("precision", 0, 0.1, half, "hidden states, norms and head in 16 bits: less stable")
    for _ in range(3):
        yield Move("rank", 0, 0.2, _half_rank, "half as much is trained")
    yield Move("targets", 0, 0.3, _fewer_targets, "only attention's queries and values get adapters")
    for _ in range(8):
        yield Move("length", 0, 0.25, _shorter, "longer sequences are cut")


OPTIONS = tuple(dict.fromkeys(move.option for move in moves()))


class Search:
    """Looks for plans under the limit of ``run``. ``keep`` names options that must stay as they are."""

    def __init__(self, run: FitRun, keep: Sequence[str] = (), on_progress: Progress | None = None) -> None:
        assert run.config.limit_bytes is not None
        self.run, self.limit_bytes = run, run.config.limit_bytes
        self._safe = run.config.with_limit(int(run.config.limit_bytes * (1 - SAFETY_SHARE)))
        self._moves = [move for move in moves() if move.option not in keep]
        self._tried: dict[tuple[Any, ...], bool] = {}
        self._cells: dict[tuple[Any, ...], Cells] = {}
        self._on_progress = on_progress
        self._forecasts = 0

    @cached_property
    def as_is(self) -> Forecast:
        """The run unchanged."""
        return self._forecast(self.run)

    def _forecast(self, run: FitRun, steps: tuple[Step, ...] | None = None) -> Forecast:
        """Of the whole run, or of some of its steps. What is prepared for one is used for all with the same options."""
        plan = run.plan
        key = (plan.options, frozenset(batch for step in plan.steps for batch in step))
        if key not in self._cells:
            self._cells[key] = prepare(plan)
        return forecast(plan if steps is None else replace(plan, steps=steps), run.config, self._cells[key])

    def plans(self) -> tuple[FitPlan, ...]:
        """Plans that fit, cheapest first."""
        found: dict[tuple[int, ...], None] = {}
        single = [(i,) for i, _ in enumerate(self._moves) if self._fits((i,))]
        several = [self._together(skip) for skip in ("", "checkpointing", "micro-batch")]
        for chosen in (*single, *(chosen for chosen in several if chosen is not None)):
            found[chosen] = None
        plans = [plan for chosen in found if (plan := self._plan(chosen)) is not None]
        unlike = {plan.changes: plan for plan in sorted(plans, key=lambda plan: -plan.cost)}
        return tuple(sorted(unlike.values(), key=lambda plan: plan.cost))[:_MOST_PLANS]

    def _together(self, skip: str = "") -> tuple[int, ...] | None:
        """Changes in order of cost until they fit, then without those that are not needed, dearest first."""
        chosen: tuple[int, ...] = ()
        for i, move in enumerate(self._moves):
            if move.option == skip or self._changed((*chosen, i)) is None:
                continue
            chosen = (*chosen, i)
            if self._fits(chosen):
                break
        else:
            return None
        order = sorted(chosen, key=lambda i: (self._moves[i].alters, self._moves[i].time_share), reverse=True)
        for i in order:
            without = tuple(j for j in chosen if j != i)
            if without and self._fits(without):
                chosen = without
        return chosen

    def _changed(self, chosen: tuple[int, ...]) -> tuple[FitRun, tuple[FitChange, ...]] | None:
        """The run with those changes; None if one of them changes nothing."""
        run, changes = replace(self.run, config=self._safe), list[FitChange]()
        for i in chosen:
            made = self._moves[i].make(run)
            if made is None:
                return None
            run, was, now = made
            same = next((c for c in changes if c.option == self._moves[i].option), None)
            if same is not None:  # made again: one change, from where it began
                changes[changes.index(same)] = replace(same, now=now, why=self._moves[i].why)
            else:
                changes.append(FitChange(self._moves[i].option, was, now, self._moves[i].why))
        return run, tuple(changes)

    def _fits(self, chosen: tuple[int, ...]) -> bool:
        made = self._changed(chosen)
        if made is None:
            return False
        run, _ = made
        key = (run.plan.options, run.plan.steps, run.config)
        if key not in self._tried:
            self._forecasts += 1
            if self._on_progress is not None:
                self._on_progress(self._forecasts / (self._forecasts + len(self._moves)))
            self._tried[key] = self._survives(run)
        return self._tried[key]

    def _survives(self, run: FitRun) -> bool:
        """What is asked for in the longest batches comes first, since most changes that don't suffice die there."""
        if self._asks_too_much(run):
            return False
        worst = sorted(run.plan.steps, key=lambda step: -max(batch.tokens for batch in step))[:_WORST_STEPS]
        if len(run.plan.steps) > 2 * _WORST_STEPS and not self._forecast(run, tuple(worst)).fits:
            return False
        return self._forecast(run).fits

    def _asks_too_much(self, run: FitRun) -> bool:
        """Whether the batch with most tokens, or with the longest sequence, asks for more than the limit by itself."""
        source, batches = run.plan.source, [batch for step in run.plan.steps for batch in step]
        if not isinstance(source, ShapeSource):
            return False
        largest = {max(batches, key=lambda batch: batch.tokens), max(batches, key=lambda batch: batch.length)}
        device = kernels_of(run.plan.gpu).device
        return any(
            requested_peak(source, replace(run.plan.options, sequence=batch.length, batch=batch.rows), device)
            > (run.config.limit_bytes or 0)
            for batch in largest
        )

    def _plan(self, chosen: tuple[int, ...]) -> FitPlan | None:
        made = self._changed(chosen)
        if made is None:
            return None
        run, changes = made
        found = self._forecast(replace(run, config=run.config.with_limit(self.limit_bytes)))
        margin = self.limit_bytes - found.peak_reserved_bytes
        return FitPlan(changes, tuple(self._moves[i] for i in chosen), found, margin) if found.fits else None


# ---- what each option adds -------------------------------------------------------------------------------------------
_LEAST = RunOptions(
    sequence=128, batch=1, rank=8, targets=("q_proj", "v_proj"), optimizer="paged_adamw_8bit", loss="chunked",
    prepare_kbit=False, adapter_dtype="bf16",
)  # fmt: skip
# What is one thing to decide about: name -> the fields that it sets.
_THINGS: dict[str, tuple[str, ...]] = {
    "length": ("sequence",),
    "batch": ("batch",),
    "no checkpointing": ("checkpointing", "reentrant"),
    "attention": ("attention",),
    "whole logits": ("loss", "keep_logits", "chunk_tokens"),
    "optimizer": ("optimizer",),
    "quantization": ("quant",),
    "precision": ("prepare_kbit", "autocast"),
    "adapters": ("rank", "targets", "adapter_dtype", "dropout"),
}


@dataclass(frozen=True, slots=True)
class Rung:
    """What an option adds to the smallest configuration."""

    option: str
    adds_bytes: int


def ladder(
    source: ShapeSource, options: RunOptions, gpu: Any = None, on_progress: Progress | None = None
) -> tuple[Rung, ...]:
    """The smallest configuration of a model and each option's fair share of the rest; they sum to the requested peak.

    A share is the mean of what the option adds over all orders of adding the options one by one (Shapley), from exact
    estimates of every combination, rounded so that nothing is lost. Source: L. S. Shapley, A value for n-person games,
    1953.
    """
    smallest = replace(_LEAST, targets=_few_targets(source))
    least = {name: getattr(smallest, name) for names in _THINGS.values() for name in names}
    bottom = replace(options, **least, accumulation=1)
    things = [name for name, fields in _THINGS.items() if any(getattr(options, f) != least[f] for f in fields)]
    device = kernels_of(gpu).device
    peaks: dict[frozenset[str], int] = {}
    subsets = [frozenset(chosen) for count in range(len(things) + 1) for chosen in combinations(things, count)]
    for done, chosen in enumerate(subsets):
        fields = {field: getattr(options, field) for name in chosen for field in _THINGS[name]}
        peaks[chosen] = requested_peak(source, replace(bottom, **fields), device)
        if on_progress is not None:
            on_progress((done + 1) / len(subsets))
    count = len(things)
    whole = factorial(count)
    shares: dict[str, int] = dict.fromkeys(things, 0)  # times count!
    for chosen, peak in peaks.items():
        for name in things:
            if name not in chosen:
                weight = factorial(len(chosen)) * factorial(count - len(chosen) - 1)
                shares[name] += weight * (peaks[chosen | {name}] - peak)
    rungs = {name: share // whole for name, share in shares.items()}
    short = peaks[frozenset(things)] - peaks[frozenset()] - sum(rungs.values())
    for name in sorted(things, key=lambda name: -(shares[name] % whole))[:short]:
        rungs[name] += 1
    order = sorted(things, key=lambda name: -rungs[name])
    return (Rung("smallest configuration", peaks[frozenset()]), *(Rung(name, rungs[name]) for name in order))
