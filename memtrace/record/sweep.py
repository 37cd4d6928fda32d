"""Runs a sweep: every trial in a fresh process, out-of-memory errors and crashes survived, results kept on disk."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from memtrace.estimate.sweep import Outcome, Trial
from memtrace.estimate.sweep_results import Store

Measure = Callable[[Trial], Outcome]
Progress = Callable[[int, int, Trial, Outcome | None], None]
"""Called with (number from 1, how many, trial, None at its beginning or the outcome at its end)."""


def sweep(
    trials: Sequence[Trial], store: Store, key: Callable[[Trial], str], measure: Measure, progress: Progress
) -> list[Outcome]:
    """All outcomes, in order; what the store already holds is not measured again."""
    outcomes = []
    for number, trial in enumerate(trials, 1):
        known = store.get(key(trial), trial)
        if known is None:
            progress(number, len(trials), trial, None)
            known = measure(trial)
            store.add(key(trial), known)
        progress(number, len(trials), trial, known)
        outcomes.append(known)
    return outcomes


def in_fresh_process(model: str, steps: int, limit_bytes: int | None, timeout_s: float) -> Measure:
    """Measures a trial with :mod:`memtrace.record.sweep_run` in a process of its own."""

    def measure(trial: Trial) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="memtrace-") as scratch:
            task, result = Path(scratch) / "task.json", Path(scratch) / "outcome.json"
            contents = {"trial": trial.as_dict(), "model": model, "steps": steps, "limit_bytes": limit_bytes}
            task.write_text(json.dumps(contents))
            command = [sys.executable, "-P", "-m", "memtrace.record.sweep_run", str(task), str(result)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return Outcome(trial, "failed", f"no result within {timeout_s:.0f} s")
            if result.exists():
                return outcome_from(json.loads(result.read_text()), trial)
            return Outcome(trial, "failed", _reason(done))

    return measure


def outcome_from(values: dict[str, Any], trial: Trial) -> Outcome:
    """The outcome that a child process wrote."""
    names = {item.name for item in fields(Outcome)} - {"trial"}
    return Outcome(trial=trial, **{name: value for name, value in values.items() if name in names})


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"killed by signal {-done.returncode} (host memory?)"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:400]
