"""Measured trials on disk (one JSON line each, so that an interrupted sweep goes on) and as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from memtrace.errors import MemtraceError, UsageError
from memtrace.estimate.estimate import estimate
from memtrace.estimate.presets import GpuPreset
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.sweep import AffineFit, Outcome, Trial, fit, increments
from memtrace.units import format_bytes, format_delta

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
    return {"rows": rows, "affine": _affine_json(fit(outcomes))}


def _affine_json(found: AffineFit | None) -> dict[str, Any] | None:
    if found is None:
        return None
    values = asdict(found)
    for entry, residual in zip(values["residuals"], found.residuals, strict=True):
        entry["residual_bytes"] = residual.residual_bytes
    return values


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
