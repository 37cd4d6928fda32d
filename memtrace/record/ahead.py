"""One line before step 0: the run that begins will fit, or the step in which it will die and the change that helps.

Model, adapter and optimizer are looked at as the recorder does; the lengths are those of the data loader's data set, in
its order, where rows tell them. Where anything of that is not there, the line says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from memtrace.errors import MemtraceError
from memtrace.record import backend as backend_module
from memtrace.record import messages
from memtrace.record.facts import process_facts, run_config
from memtrace.record.labels import contents
from memtrace.units import counted, format_bytes

_MOST_STEPS = 200  # looked at, so that the line costs seconds at most


def watch() -> None:
    """Say the line when the first model is called."""
    torch = backend_module.import_torch()
    modules = torch.nn.modules.module

    def first_call(module: Any, inputs: Any) -> None:
        handle.remove()
        with messages.guarded("forecasting the run"):
            trainer = next((found for found in _locals() if hasattr(found, "get_train_dataloader")), None)
            loader = next((found for found in _locals() if isinstance(found, torch.utils.data.DataLoader)), None)
            say_forecast(module, getattr(trainer, "optimizer", None), getattr(trainer, "args", None), loader)

    handle = modules.register_module_forward_pre_hook(first_call)


def _locals() -> Iterator[Any]:
    """What the callers hold, the nearest first."""
    frame = sys._getframe(2)
    while frame is not None:
        yield from list(frame.f_locals.values())
        frame = frame.f_back  # type: ignore[assignment]


def say_forecast(model: Any, optimizer: Any, args: Any, loader: Any) -> None:
    """Print the line for what is about to be trained; ``args`` are a Trainer's, ``loader`` a data loader (or None)."""
    found = backend_module.get()
    facts = process_facts(found, found.current_device())
    messages.say(f"forecast: {forecast_line(model, optimizer, args, loader, facts)}")


def forecast_line(model: Any, optimizer: Any, args: Any, loader: Any, facts: Mapping[str, Any]) -> str:
    """The line; ``facts`` are those of the process, its limit and card among them."""
    from memtrace.allocator.conf_text import parse_conf
    from memtrace.allocator.config import conf_string
    from memtrace.estimate.fit import Search
    from memtrace.estimate.forecast import ONE_STEP, RunPlan
    from memtrace.estimate.moves import FitRun
    from memtrace.estimate.options import RunOptions
    from memtrace.estimate.recorded import recorded_gpu, told_by_objects
    from memtrace.estimate.schedule import steps_of
    from memtrace.estimate.source import ShapeSource

    config = run_config([contents(model)], [optimizer] if optimizer is not None else [])
    lengths = _lengths(getattr(loader, "dataset", None))
    if not lengths:
        return "not known, since the data set does not tell its lengths"
    if not (config["models"] and config["models"][0].get("peft")):
        return "not known, since the model has no adapters"
    batch = int(getattr(args, "per_device_train_batch_size", 0) or getattr(loader, "batch_size", 0) or 1)
    try:
        shape, values = told_by_objects(config["models"][0], config)
        options = RunOptions(**values | _of_tensors(model) | _of_arguments(args), sequence=2, batch=batch)
    except MemtraceError as error:
        return f"not known ({error})"
    wanted = int(getattr(args, "max_steps", 0) or 0)
    most = min(_MOST_STEPS, wanted) if wanted > 0 else _MOST_STEPS
    steps = steps_of(lengths, batch=batch, accumulation=options.accumulation)[:most]
    gpu, total = recorded_gpu(facts), int(facts.get("device_total_bytes") or 0)
    limit = int(facts.get("limit_bytes") or total)
    allocator = parse_conf(conf_string(os.environ), device_total_bytes=total or None)
    run = FitRun(RunPlan(ShapeSource(shape), options, steps, gpu), allocator)
    search = Search(replace(run, config=run.config.with_limit(limit)))
    as_is = search.as_is
    over = f"{counted(len(steps), 'step')} in the data set's order, limit {format_bytes(limit)}"
    over += f"; {ONE_STEP}" if len(steps) == 1 else ""
    if as_is.oom is None:
        spare = format_bytes(limit - as_is.peak_reserved_bytes)
        return f"fits, {spare} to spare ({over})"
    plan = search.single()
    helps = "no single change helps"
    if plan is not None:
        helps = "; ".join(f"{change.option} {change.was} → {change.now} helps" for change in plan.changes)
    asked = format_bytes(as_is.oom.requested_bytes)
    return f"dies in step {as_is.oom.step}, {as_is.oom.phase}: {asked} refused ({over}); {helps}"


def _lengths(rows: Any) -> list[int]:
    """Tokens of the rows, as many as the steps looked at can need at most; empty where they don't tell."""
    found = []
    most = _MOST_STEPS * 512
    columns = getattr(rows, "column_names", None) or ()
    if "length" in columns:
        return [int(length) for length in rows[:most]["length"]]
    try:
        for row in islice((rows[i] for i in range(len(rows))), most):
            found.append(len(row["input_ids"]))
    except (TypeError, KeyError, IndexError, AttributeError):
        return []
    return found


def _of_tensors(model: Any) -> dict[str, Any]:
    """Widths that only the live model tells."""
    trained = [p.element_size() for p in model.parameters() if p.requires_grad]
    table = model.get_input_embeddings().weight
    return {
        "prepare_kbit": table.element_size() == 4,
        "adapter_dtype": "bf16" if trained and max(trained) == 2 else "fp32",
    }


def _of_arguments(args: Any) -> dict[str, Any]:
    """What a Trainer does; a plain loop does none of it."""
    from memtrace.estimate.options import OPTIMIZER_NAMES

    name = str(getattr(getattr(args, "optim", ""), "value", getattr(args, "optim", "")))
    optimizer = {"optimizer": OPTIMIZER_NAMES[name]} if name in OPTIMIZER_NAMES else {}
    return optimizer | {
        "autocast": bool(getattr(args, "bf16", False) or getattr(args, "fp16", False)),
        "accumulation": int(getattr(args, "gradient_accumulation_steps", 1) or 1),
        "clips": bool(getattr(args, "max_grad_norm", 0)),
    }
