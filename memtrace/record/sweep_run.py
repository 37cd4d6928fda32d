"""Measures one trial of a sweep: ``python -m memtrace.record.sweep_run TRIAL.json OUTCOME.json``, a fresh process.

No history is recorded, only PyTorch's own statistics are read, so that nothing slows the run or changes its memory.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memtrace.estimate.options import RunOptions
from memtrace.estimate.sweep import Outcome, Trial
from memtrace.record import backend as backend_module
from memtrace.record import qlora

_LEVELS = ("requested_bytes", "allocated_bytes", "reserved_bytes")
_PHASE_OF = {"zero_grad": "optimizer", "end": "optimizer"}


def trial_from(values: dict[str, Any]) -> Trial:
    """The inverse of ``Trial.as_dict``."""
    options = dict(values["options"])
    options["targets"] = tuple(options["targets"])
    return Trial(**(values | {"options": RunOptions(**options)}))


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
        _run(trial, model, cfg, device, meter)
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


def _run(trial: Trial, folder: str, cfg: qlora.StepConfig, device: str, meter: Meter) -> None:
    reference = qlora.load_base(folder, cfg, device).eval() if trial.reference else None
    model = qlora.add_adapters(qlora.load_base(folder, cfg, device), cfg)
    qlora.run_loop(model, qlora.make_optimizer(model, cfg), cfg, device, meter.enter, reference=reference)


def main(task_file: str, outcome_file: str) -> None:
    """The child process."""
    task = json.loads(Path(task_file).read_text())
    outcome = measure(trial_from(task["trial"]), task["model"], task["steps"], task["limit_bytes"])
    Path(outcome_file).write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
