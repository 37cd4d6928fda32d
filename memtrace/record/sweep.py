"""Runs a sweep: every trial in a fresh process, out-of-memory errors and crashes survived, results kept on disk.

``python -m memtrace.record.sweep TASK OUTCOME`` is that process (both files are pickles). No history is recorded in it:
only PyTorch's own statistics are read, so that nothing slows the run or changes its memory.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memtrace.estimate.sweep import Outcome, Store, Trial
from memtrace.record import backend as backend_module
from memtrace.record import qlora

_LEVELS = ("requested_bytes", "allocated_bytes", "reserved_bytes")
_PHASE_OF = {"zero_grad": "optimizer", "end": "optimizer"}

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
    """Measures a trial in a process of its own."""

    def measure(trial: Trial) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="memtrace-") as scratch:
            task, result = Path(scratch) / "task", Path(scratch) / "outcome"
            task.write_bytes(pickle.dumps((trial, model, steps, limit_bytes)))
            command = [sys.executable, "-P", "-m", "memtrace.record.sweep", str(task), str(result)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return Outcome(trial, "failed", f"no result within {timeout_s:.0f} s")
            if result.exists():
                outcome: Outcome = pickle.loads(result.read_bytes())
                return outcome
            return Outcome(trial, "failed", _reason(done))

    return measure


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"killed by signal {-done.returncode} (host memory?)"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:400]


# the process of a trial
class Meter:
    """Highest requested, allocated and reserved bytes by phase, from the backend's statistics."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.device = backend.current_device()
        self.phase = "load"
        self.phases: dict[str, dict[str, int]] = {}
        self.backend.reset_peaks(self.device)

    def enter(self, phase: str) -> None:
        """The program enters a phase."""
        phase = _PHASE_OF.get(phase, phase)
        if phase != self.phase:
            self.read()
            self.phase = phase
            self.backend.reset_peaks(self.device)

    def read(self) -> None:
        """Take the peaks of the phase so far."""
        self.backend.synchronize()
        stats = self.backend.stats(self.device)
        found = self.phases.setdefault(self.phase, dict.fromkeys(_LEVELS, 0))
        for level in _LEVELS:
            found[level] = max(found[level], int(stats.get(f"{level}.all.peak", 0)))


def measure(trial: Trial, model: str, steps: int, limit_bytes: int | None = None) -> Outcome:
    """Run a trial in this process. An out-of-memory error is an outcome; other errors are raised."""
    torch = backend_module.import_torch()
    backend = backend_module.get()
    backend.require()
    torch.manual_seed(0)
    if limit_bytes is not None:
        backend.limit(limit_bytes)
    device = "cpu" if backend.device_type == "cpu" else f"cuda:{backend.current_device()}"
    start = time.monotonic()
    meter = Meter(backend)
    status, message = "ok", ""
    cfg = qlora.step_config(trial.options, steps, trial.eval_batches, trial.packed)
    try:
        reference = qlora.load_base(model, cfg, device).eval() if trial.reference else None
        net = qlora.add_adapters(qlora.load_base(model, cfg, device), cfg)
        qlora.run_loop(net, qlora.make_optimizer(net, cfg), cfg, device, meter.enter, reference=reference)
    except torch.OutOfMemoryError as error:
        status, message = "oom", str(error).strip().splitlines()[0][:400]
    meter.read()
    peaks = {level: max(values[level] for values in meter.phases.values()) for level in _LEVELS}
    return Outcome(
        trial,
        status,
        message,
        **{f"peak_{level}": peak for level, peak in peaks.items()},
        peak_phase=max(meter.phases, key=lambda name: meter.phases[name]["allocated_bytes"]),
        phases=meter.phases,
        seconds=round(time.monotonic() - start, 2),
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps(measure(*pickle.loads(Path(sys.argv[1]).read_bytes()))))
