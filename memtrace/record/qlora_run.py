"""Record a run that memtrace builds itself: load, adapters, steps, evaluation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.errors import NoAnswerError
from memtrace.record import backend as backend_module
from memtrace.record import phases, qlora
from memtrace.record.api import record

_MARK_PHASES = {"zero_grad": phases.BETWEEN, "end": phases.BETWEEN, "eval": phases.EVALUATION}


@dataclass(frozen=True, slots=True)
class Plan:
    """One recording. ``model`` is a folder or hub id; ``cap_bytes`` limits reserved memory, as a smaller card would."""

    model: str
    step: qlora.StepConfig
    stacks: str = "python"
    max_entries: int = 2_000_000
    late: bool = False
    cap_bytes: int | None = None
    deep: bool = False
    force: bool = False


def record_plan(plan: Plan, path: Path) -> Path:
    """Run the plan and write its snapshot; returns the file.

    An out-of-memory error ends the run, not memtrace: its state is what the file then holds. Raises NoAnswerError where
    no file could be written.
    """
    import torch

    torch.manual_seed(plan.step.seed)
    backend = backend_module.get()
    device = "cpu" if backend.device_type == "cpu" else f"cuda:{backend.current_device()}"
    if plan.cap_bytes is not None:
        backend.limit(plan.cap_bytes)
    model = _build(plan, device) if plan.late else None
    options: dict[str, Any] = {"stacks": plan.stacks, "max_entries": plan.max_entries, "force": plan.force}
    with contextlib.suppress(torch.OutOfMemoryError), record(path, deep=plan.deep, required=True, **options) as run:
        assert run.recorder is not None
        log = run.recorder.log
        run.count_steps_by_hand()
        model = model if model is not None else _build(plan, device)
        optimizer = qlora.make_optimizer(model, plan.step)
        log.enter(phases.BETWEEN)
        qlora.run_loop(
            model, optimizer, plan.step, device, lambda name: log.enter(_MARK_PHASES.get(name, name)), run.step
        )
    if run.file is None:
        raise NoAnswerError(f"nothing was recorded to {path}")
    return run.file


def _build(plan: Plan, device: str) -> Any:
    import torch

    base = qlora.load_base(plan.model, plan.step, device)
    torch.manual_seed(plan.step.seed + 1)
    return qlora.add_adapters(base, plan.step)
