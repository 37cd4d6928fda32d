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
from memtrace.record.losses import loss_and_output

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
        self._reset()

    def enter(self, phase: str) -> None:
        """The program enters a phase."""
        phase = _PHASE_OF.get(phase, phase)
        if phase != self.phase:
            self.read()
            self.phase = phase
            self._reset()

    def read(self) -> None:
        """Take the peaks of the phase so far."""
        self.backend.synchronize()
        stats = self.backend.stats(self.device)
        found = self.phases.setdefault(self.phase, dict.fromkeys(_LEVELS, 0))
        for level in _LEVELS:
            found[level] = max(found[level], int(stats.get(f"{level}.all.peak", 0)))

    def _reset(self) -> None:
        reset = getattr(self.backend, "reset_peak", None)
        if reset is not None:
            reset()
        else:
            backend_module.import_torch().cuda.reset_peak_memory_stats(self.device)


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
    try:
        _run(trial, model, qlora.step_config(trial.options, steps, trial.eval_batches), device, meter)
    except torch.OutOfMemoryError as error:
        status, message = "oom", str(error).strip().splitlines()[0][:400]
    meter.read()
    return _outcome(trial, status, message, meter, time.monotonic() - start)


def _outcome(trial: Trial, status: str, message: str, meter: Meter, seconds: float) -> Outcome:
    peaks = {level: max(values[level] for values in meter.phases.values()) for level in _LEVELS}
    phase = max(meter.phases, key=lambda name: meter.phases[name]["allocated_bytes"])
    return Outcome(
        trial,
        status,
        message,
        peaks["requested_bytes"],
        peaks["allocated_bytes"],
        peaks["reserved_bytes"],
        phase,
        meter.phases,
        round(seconds, 2),
    )


def _run(trial: Trial, folder: str, cfg: qlora.StepConfig, device: str, meter: Meter) -> None:
    reference = qlora.load_base(folder, cfg, device).eval() if trial.reference else None
    model = qlora.add_adapters(qlora.load_base(folder, cfg, device), cfg)
    optimizer = qlora.make_optimizer(model, cfg)
    if not (trial.packed or trial.reference):
        qlora.run_loop(model, optimizer, cfg, device, meter.enter, lambda: None)
        return
    _loop(trial, model, reference, optimizer, cfg, device, meter)


def _loop(
    trial: Trial, model: Any, reference: Any, optimizer: Any, cfg: qlora.StepConfig, device: str, meter: Meter
) -> None:
    """The same steps with packed rows or a reference model, and evaluation as the plain loop does it."""
    torch = backend_module.import_torch()
    generator = torch.Generator().manual_seed(cfg.seed)
    vocabulary = qlora.vocabulary(model)
    positions = _positions(cfg, device) if trial.packed else None
    extra = {} if positions is None else {"position_ids": positions}
    model.train()
    for _ in range(cfg.steps):
        for _ in range(cfg.accumulate):
            ids = torch.randint(0, vocabulary, (cfg.batch, cfg.seq_len), generator=generator).to(device)
            meter.enter("forward")
            with _autocast(cfg, device):
                loss, held = _losses(model, reference, ids, extra, cfg)
            meter.enter("backward")
            (loss / cfg.accumulate).backward()
            del loss, held
        meter.enter("optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if cfg.eval_batches:
        meter.enter("evaluation")
        model.eval()
        with torch.no_grad(), _autocast(cfg, device):
            kept = [model(input_ids=ids, labels=ids, **extra).logits for _ in range(cfg.eval_batches)]
        del kept


def _losses(model: Any, reference: Any, ids: Any, extra: dict[str, Any], cfg: qlora.StepConfig) -> tuple[Any, Any]:
    """(loss, what the loop holds during backward): with a reference model, its log-probabilities enter the loss."""
    torch = backend_module.import_torch()
    if reference is None and not extra:
        return loss_and_output(model, ids, cfg.loss, cfg.chunk_tokens)
    output = model(input_ids=ids, labels=ids, **extra)
    loss = output.loss
    if reference is not None:
        with torch.no_grad():
            baseline = reference(input_ids=ids, labels=ids, **extra).loss
        loss = loss - baseline
    return loss, output if cfg.keep_logits else None


def _positions(cfg: qlora.StepConfig, device: str) -> Any:
    """Two documents a row: positions begin again in the middle."""
    torch = backend_module.import_torch()
    half = cfg.seq_len // 2
    row = torch.cat([torch.arange(half), torch.arange(cfg.seq_len - half)])
    return row.repeat(cfg.batch, 1).to(device)


def _autocast(cfg: qlora.StepConfig, device: str) -> Any:
    torch = backend_module.import_torch()
    return torch.autocast(device_type=torch.device(device).type, dtype=torch.bfloat16, enabled=cfg.autocast)


def main(task_file: str, outcome_file: str) -> None:
    """The child process."""
    task = json.loads(Path(task_file).read_text())
    outcome = measure(trial_from(task["trial"]), task["model"], task["steps"], task["limit_bytes"])
    Path(outcome_file).write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
