"""The add-one-thing-back experiment: which runs to measure, what each thing adds, and the affine model through them.

The smallest configuration comes first; every other run is the smallest plus one thing, so an increment is that thing's
alone. The last run has everything that was asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from memtrace.errors import UsageError
from memtrace.estimate.options import RunOptions

THINGS = (
    "length", "batch", "evaluation", "packing", "reference", "attention", "checkpointing", "optimizer", "prepare-kbit",
    "keep-logits",
)  # fmt: skip
_ENOUGH_FOR_SQUARE = 4  # points needed before a term in tokens squared is tried
_LINEAR_ENOUGH = 0.001  # largest residual, as a share of the peak, that needs no such term


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. ``thing`` is what it adds to the smallest configuration ("" for that one, "everything" for the last).

    ``eval_batches`` batches are evaluated after training; ``packed`` rows hold two documents each; ``reference`` keeps
    a frozen second copy of the base and runs it on every batch.
    """

    name: str
    thing: str
    options: RunOptions
    eval_batches: int = 0
    packed: bool = False
    reference: bool = False

    def key(self, model: str, steps: int) -> str:
        """What makes a run the same run: results under the same key are not measured again."""
        text = json.dumps([model, steps, self.as_dict() | {"name": "", "thing": ""}], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Builtin containers only."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measured trial. ``status`` is ``ok``, ``oom`` or ``failed``; ``message`` says why. Peaks are bytes.

    After an out-of-memory error the peaks are those up to it.
    """

    trial: Trial
    status: str
    message: str = ""
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_phase: str = ""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Residual:
    """One run's measured peak beside the fitted model's."""

    name: str
    tokens: int
    measured_bytes: int
    fitted_bytes: int

    @property
    def residual_bytes(self) -> int:
        """Measured minus fitted."""
        return self.measured_bytes - self.fitted_bytes


@dataclass(frozen=True, slots=True)
class AffineFit:
    """peak = constant + per_token·t + per_token_squared·b·s², t = b·s tokens of a micro-batch; least squares.

    ``per_token_squared_bytes`` is 0 unless the straight line missed a run by more than 0.1 % and there are enough runs.
    """

    constant_bytes: int
    per_token_bytes: float
    per_token_squared_bytes: float
    residuals: tuple[Residual, ...]


def plan(
    target: RunOptions,
    lengths: Sequence[int] = (),
    batches: Sequence[int] = (),
    things: Iterable[str] = THINGS,
) -> list[Trial]:
    """The trials, smallest first. ``target`` is the configuration that is wanted; unknown things raise UsageError."""
    wanted = list(things)
    unknown = [thing for thing in wanted if thing not in THINGS]
    if unknown:
        raise UsageError(f"no such thing to add: {unknown[0]!r} (things: {', '.join(THINGS)})")
    lengths = sorted({*lengths, target.sequence}) if lengths else _doubling(target.sequence)
    batches = sorted({*batches, target.batch} - {1}) if batches or target.batch > 1 else [2]
    smallest = replace(
        target,
        sequence=lengths[0],
        batch=1,
        attention="sdpa",
        checkpointing=True,
        optimizer="paged_adamw_8bit",
        prepare_kbit=False,
        embeddings_require_grad=True,
        keep_logits=False,
        accumulation=1,
    )
    trials = [Trial("smallest", "", smallest)]
    for thing in wanted:
        trials += _with(thing, smallest, target, lengths[1:], batches)
    everything = Trial(
        "everything",
        "everything",
        replace(target, embeddings_require_grad=target.checkpointing),
        eval_batches=2 if "evaluation" in wanted else 0,
        packed="packing" in wanted,
        reference="reference" in wanted,
    )
    return [*trials, everything]


def _with(
    thing: str, smallest: RunOptions, target: RunOptions, lengths: Sequence[int], batches: Sequence[int]
) -> list[Trial]:
    """The smallest configuration plus one thing (several runs for lengths and batches)."""
    if thing == "length":
        return [Trial(f"length {n}", thing, replace(smallest, sequence=n)) for n in lengths]
    if thing == "batch":
        return [Trial(f"batch {n}", thing, replace(smallest, batch=n)) for n in batches]
    if thing == "evaluation":
        return [Trial("evaluation", thing, smallest, eval_batches=2)]
    if thing == "packing":
        return [Trial("packing", thing, smallest, packed=True)]
    if thing == "reference":
        return [Trial("reference model", thing, smallest, reference=True)]
    if thing == "attention":
        kind = target.attention if target.attention != "sdpa" else "eager"
        return [Trial(f"{kind} attention", thing, replace(smallest, attention=kind))]
    if thing == "checkpointing":
        # Checkpointing that was never switched on has not made the embedding output require a gradient either.
        return [Trial("no checkpointing", thing, replace(smallest, checkpointing=False, embeddings_require_grad=False))]
    if thing == "optimizer":
        name = target.optimizer if target.optimizer != smallest.optimizer else "adamw_torch"
        return [Trial(f"optimizer {name}", thing, replace(smallest, optimizer=name))]
    if thing == "prepare-kbit":
        return [Trial("fp32 hidden states", thing, replace(smallest, prepare_kbit=True))]
    return [Trial("kept logits", thing, replace(smallest, keep_logits=True))]


def _doubling(longest: int) -> list[int]:
    """Four lengths, each twice the one before, up to ``longest``."""
    return sorted({max(longest >> shift, 2) for shift in range(4)})


def increments(outcomes: Sequence[Outcome]) -> dict[str, int | None]:
    """What each run adds to the smallest's allocated peak, by name; None where either did not finish."""
    base = next((o for o in outcomes if o.trial.thing == "" and o.status == "ok"), None)
    return {
        o.trial.name: o.peak_allocated_bytes - base.peak_allocated_bytes if base and o.status == "ok" else None
        for o in outcomes
    }


def fit(outcomes: Sequence[Outcome]) -> AffineFit | None:
    """The affine model through the runs that differ in length and batch only. None with fewer than two of them."""
    found = [o for o in outcomes if o.status == "ok" and o.trial.thing in ("", "length", "batch")]
    tokens = np.array([o.trial.options.tokens for o in found], dtype=np.float64)
    if len(set(tokens.tolist())) < 2:
        return None
    squares = np.array([o.trial.options.batch * o.trial.options.sequence**2 for o in found], dtype=np.float64)
    peaks = np.array([o.peak_requested_bytes for o in found], dtype=np.float64)
    columns = [np.ones_like(tokens), tokens]
    solution = _solve(columns, peaks)
    missed = np.max(np.abs(peaks - solution @ np.array(columns)) / peaks)
    if missed > _LINEAR_ENOUGH and len(found) >= _ENOUGH_FOR_SQUARE:
        columns.append(squares)
        solution = _solve(columns, peaks)
    fitted = np.round(solution @ np.array(columns)).astype(np.int64)
    return AffineFit(
        constant_bytes=round(float(solution[0])),
        per_token_bytes=float(solution[1]),
        per_token_squared_bytes=float(solution[2]) if len(solution) > 2 else 0.0,
        residuals=tuple(
            Residual(o.trial.name, o.trial.options.tokens, o.peak_requested_bytes, int(value))
            for o, value in zip(found, fitted, strict=True)
        ),
    )


def _solve(columns: Sequence[Any], values: Any) -> Any:
    """Least squares, columns scaled to the same size first."""
    matrix = np.array(columns).T
    scale = np.abs(matrix).max(axis=0)
    return np.linalg.lstsq(matrix / scale, values, rcond=None)[0] / scale
