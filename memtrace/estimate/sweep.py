"""The add-one-thing-back experiment: which runs to measure, what each thing adds, and the affine model through them.
Results are kept as JSON lines, so that an interrupted sweep goes on.

The smallest configuration comes first; every other run is the smallest plus one thing, so an increment is that thing's
alone. The last run has everything that was asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.errors import MemtraceError, UsageError
from memtrace.estimate.estimate import estimate
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import GpuPreset
from memtrace.estimate.shapes import ModelShape
from memtrace.frozen import dataclass
from memtrace.units import format_bytes, format_delta

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
        text = json.dumps([model, steps, asdict(self) | {"name": "", "thing": ""}], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    """One run's measured peak beside the fitted model's; ``residual_bytes`` is the difference."""

    name: str
    tokens: int
    measured_bytes: int
    fitted_bytes: int
    residual_bytes: int


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
    lengths = (
        sorted({*lengths, target.sequence})
        if lengths
        else sorted({max(target.sequence >> shift, 2) for shift in range(4)})
    )
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
    kind = target.attention if target.attention != "sdpa" else "eager"
    optimizer = target.optimizer if target.optimizer != smallest.optimizer else "adamw_torch"
    # Checkpointing that was never switched on has not made the embedding output require a gradient either.
    without = {"checkpointing": False, "embeddings_require_grad": False}

    def trial(name: str, **changed: Any) -> Trial:
        return Trial(name, thing, replace(smallest, **changed))

    adds = {
        "length": [trial(f"length {n}", sequence=n) for n in lengths],
        "batch": [trial(f"batch {n}", batch=n) for n in batches],
        "attention": [trial(f"{kind} attention", attention=kind)],
        "checkpointing": [trial("no checkpointing", **without)],
        "optimizer": [trial(f"optimizer {optimizer}", optimizer=optimizer)],
        "prepare-kbit": [trial("fp32 hidden states", prepare_kbit=True)],
        "keep-logits": [trial("kept logits", keep_logits=True)],
        "evaluation": [replace(trial("evaluation"), eval_batches=2)],
        "packing": [replace(trial("packing"), packed=True)],
        "reference": [replace(trial("reference model"), reference=True)],
    }
    return adds[thing]


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
            Residual(
                o.trial.name,
                o.trial.options.tokens,
                o.peak_requested_bytes,
                int(value),
                o.peak_requested_bytes - int(value),
            )
            for o, value in zip(found, fitted, strict=True)
        ),
    )


def _solve(columns: Sequence[Any], values: Any) -> Any:
    """Least squares, columns scaled to the same size first."""
    matrix = np.array(columns).T
    scale = np.abs(matrix).max(axis=0)
    return np.linalg.lstsq(matrix / scale, values, rcond=None)[0] / scale


# ---- results on disk -------------------------------------------------------------------------------------------------
_KEPT = ("ok", "oom")  # a run that failed for another reason is tried again


class Store:
    """``results.jsonl`` in the sweep's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        self._found: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # cut off in the middle of a write
                if isinstance(entry, dict) and "key" in entry and entry.get("status") in _KEPT:
                    self._found[str(entry["key"])] = entry

    def get(self, key: str, trial: Trial) -> Outcome | None:
        """The outcome measured before under this key."""
        entry = self._found.get(key)
        if entry is None:
            return None
        names = {item.name for item in fields(Outcome)} - {"trial"}
        return Outcome(trial=trial, **{name: value for name, value in entry.items() if name in names})

    def add(self, key: str, outcome: Outcome) -> None:
        """Append an outcome. Raises UsageError if the file can't be written."""
        entry = {"key": key, **asdict(outcome)}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise UsageError(f"can't write {self.path}: {error.strerror}") from None
        self._found[key] = entry


# ---- for people and programs ----------------------------------------------------------------------------------------
def predicted(shape: ModelShape | None, trial: Trial, gpu: GpuPreset | None) -> int | None:
    """The estimate's allocated peak of a trial; None where the estimate doesn't cover it."""
    if shape is None or trial.packed or trial.reference or trial.eval_batches:
        return None
    try:
        return estimate(shape, trial.options, gpu).peak_allocated_bytes
    except MemtraceError:
        return None


def as_json(outcomes: Sequence[Outcome], estimates: Sequence[int | None]) -> dict[str, Any]:
    """Rows with the contract's keys, and the fitted model."""
    added = increments(outcomes)
    rows = []
    for outcome, guess in zip(outcomes, estimates, strict=True):
        row = asdict(outcome) | {"name": outcome.trial.name, "increment_bytes": added[outcome.trial.name]}
        row["against"] = None
        if guess is not None and outcome.status == "ok" and outcome.peak_allocated_bytes:
            error = guess - outcome.peak_allocated_bytes
            percent = round(100 * error / outcome.peak_allocated_bytes, 4)
            row["against"] = {"signed_error_bytes": error, "signed_error_percent": percent}
        rows.append(row)
    found = fit(outcomes)
    return {"rows": rows, "affine": asdict(found) if found is not None else None}


def _percent(guess: int, measured: int) -> str:
    """The signed error in percent; one that rounds to nothing has no sign."""
    shown = f"{100 * (guess / max(measured, 1) - 1):+.2f}"
    return "0.00" if shown in ("+0.00", "-0.00") else shown


def render(outcomes: Sequence[Outcome], estimates: Sequence[int | None]) -> Iterator[str]:
    """The table of increments and the fitted model, at most 80 columns."""
    added = increments(outcomes)
    yield f"{'run':<25}{'peak':>11}{'reserved':>11}{'adds':>13}{'estimate':>9}  where"
    for outcome, guess in zip(outcomes, estimates, strict=True):
        name = outcome.trial.name if outcome.trial.thing in ("", "everything") else f"+ {outcome.trial.name}"
        name = name if len(name) < 25 else f"{name[:23]}…"
        if outcome.status == "failed":
            yield f"{name:<25}failed: {outcome.message}"[:80]
            continue
        size = format_bytes(outcome.peak_allocated_bytes)
        if outcome.status == "oom":
            yield f"{name:<25}{'> ' + size:>11}{format_bytes(outcome.peak_reserved_bytes):>11}  out of memory"
            continue
        change = added[outcome.trial.name]
        shown = "" if change is None or outcome.trial.thing == "" else format_delta(change)
        off = "" if guess is None else f"{_percent(guess, outcome.peak_allocated_bytes)} %"
        reserved = format_bytes(outcome.peak_reserved_bytes)
        yield f"{name:<25}{size:>11}{reserved:>11}{shown:>13}{off:>9}  {outcome.peak_phase}"
    found = fit(outcomes)
    if found is None:
        return
    squared = f" + {found.per_token_squared_bytes:,.3f} B · b·s²" if found.per_token_squared_bytes else ""
    yield ""
    yield f"requested peak = {format_bytes(found.constant_bytes)} + {found.per_token_bytes:,.0f} B · t{squared}"
    for residual in found.residuals:
        share = residual.residual_bytes / max(residual.measured_bytes, 1)
        size = format_bytes(residual.measured_bytes)
        off = format_delta(residual.residual_bytes)
        yield f"  {residual.name:<24}{residual.tokens:>8} tokens{size:>12}{off:>13}{share:>+9.3%}"
