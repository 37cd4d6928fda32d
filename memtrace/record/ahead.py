"""One line before step 0: the run that begins will fit, or the step in which it will die and the change that helps.

Model, adapter and optimizer are looked at as the recorder does; the lengths are those of the data loader's data set, in
the order of its sampler where that can be told beforehand. Where anything of that is not there, the line says so.
"""

from __future__ import annotations

import copy
import dis
import functools
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from memtrace.errors import MemtraceError
from memtrace.record import backend as backend_module
from memtrace.record import messages
from memtrace.record.facts import process_facts, run_config
from memtrace.record.labels import contents
from memtrace.units import counted, format_bytes

_MOST_STEPS = 200  # looked at, so that the line costs seconds at most
_SAMPLERS = ("SequentialSampler", "RandomSampler", "SeedableRandomSampler", "SubsetRandomSampler")
"""Asked for their order beforehand: they draw from PyTorch's generators alone, which are put back."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """Random numbers on the host, by which samplers draw and data sets change their rows: PyTorch's, a loader's own
    generators among them, Python's and NumPy's."""

    common: Any
    python: Any
    numpy: Any
    own: tuple[tuple[Any, Any], ...]

    @classmethod
    def of(cls, loader: Any) -> RandomState:
        """As it is now."""
        held = (getattr(loader, "generator", None), getattr(getattr(loader, "sampler", None), "generator", None))
        own = tuple((generator, generator.get_state()) for generator in held if generator is not None)
        common = backend_module.import_torch().get_rng_state()
        numpy = sys.modules.get("numpy")  # rows draw by it only where the program has it
        return cls(common, random.getstate(), numpy.random.get_state() if numpy is not None else None, own)

    def restore(self) -> None:
        """Put it back."""
        backend_module.import_torch().set_rng_state(self.common)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for generator, state in self.own:
            generator.set_state(state)


@dataclass(frozen=True, slots=True)
class Loop:
    """What calls the model: the loader's random state when its pass began (None: it begins next); how a program's own
    loop goes on with the result."""

    random: RandomState | None = None
    autocast: bool = False
    keep_logits: bool = False


def watch() -> None:
    """Say the line when a model is first called in training."""
    torch = backend_module.import_torch()
    from torch.nn.modules import module as modules
    from torch.utils.data import DataLoader

    plain, begun = DataLoader.__iter__, list[tuple[Any, RandomState]]()

    @functools.wraps(plain)
    def iterate(loader: Any) -> Any:
        with messages.guarded("looking at the data loader"):
            begun[:] = [(loader, RandomState.of(loader))]
        return plain(loader)

    def first_call(module: Any, inputs: Any) -> None:
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return
        handle.remove()
        if DataLoader.__iter__ is iterate:
            DataLoader.__iter__ = plain
        with messages.guarded("forecasting the run"):
            found = list(_locals())
            trainer = next((one for one in found if hasattr(one, "get_train_dataloader")), None)
            optimizer = getattr(trainer, "optimizer", None)
            optimizer = optimizer or next((one for one in found if isinstance(one, torch.optim.Optimizer)), None)
            loader, state = begun[0] if begun else (None, None)
            mixed = any(getattr(one, "mixed_precision", None) in ("fp16", "bf16") for one in found)
            caller = _caller()
            keeps = trainer is None and caller is not None and _keeps_result(caller.f_code, caller.f_lasti)
            loop = Loop(state, bool(torch.is_autocast_enabled()) or mixed, keeps)
            say_forecast(module, optimizer, getattr(trainer, "args", None), loader, loop)

    DataLoader.__iter__ = iterate
    handle = modules.register_module_forward_pre_hook(first_call)


def _locals() -> Iterator[Any]:
    """What the callers hold, the nearest first."""
    frame = sys._getframe(2)
    while frame is not None:
        yield from list(frame.f_locals.values())
        frame = frame.f_back  # type: ignore[assignment]


def _caller() -> FrameType | None:
    """The frame of the program that called the module whose hook asks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "/torch/" in frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.f_back
    return frame


def _keeps_result(code: CodeType, at: int) -> bool:
    """Whether the function that called at this instruction gives the result a name that lives until its backward."""
    following = (entry for entry in dis.get_instructions(code) if entry.offset > at and entry.opname != "CACHE")
    stored = next(following, None)
    if stored is None or not stored.opname.startswith("STORE_") or "backward" not in code.co_names:
        return False
    deleted = {entry.argval for entry in dis.get_instructions(code) if entry.opname.startswith("DELETE_")}
    return stored.argval not in deleted


def say_forecast(model: Any, optimizer: Any, args: Any, loader: Any, loop: Loop = Loop()) -> None:
    """Print the line for what is about to be trained; ``args`` are a Trainer's, ``loader`` a data loader (or None)."""
    found = backend_module.get()
    facts = process_facts(found, found.current_device())
    messages.say(f"forecast: {forecast_line(model, optimizer, args, loader, facts, loop)}")


def forecast_line(
    model: Any, optimizer: Any, args: Any, loader: Any, facts: Mapping[str, Any], loop: Loop = Loop()
) -> str:
    """The line; ``facts`` are those of the process, its limit and card among them."""
    from memtrace.allocator.conf_text import parse_conf
    from memtrace.allocator.config import conf_string
    from memtrace.estimate.fit import Search
    from memtrace.estimate.forecast import ONE_STEP, RunPlan
    from memtrace.estimate.moves import FitRun
    from memtrace.estimate.options import RunOptions
    from memtrace.estimate.recorded import recorded_gpu, told_by_objects
    from memtrace.estimate.source import ShapeSource

    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    config = run_config([contents(model)], [optimizer] if optimizer is not None else [])
    if not (config["models"] and config["models"][0].get("peft")):
        return "not known, since the model has no adapters"
    batch = int(getattr(args, "per_device_train_batch_size", 0) or getattr(loader, "batch_size", 0) or 1)
    try:
        shape, values = told_by_objects(config["models"][0], config)
        told = {"autocast": loop.autocast, "keep_logits": loop.keep_logits} | _of_tensors(model) | _of_arguments(args)
        options = RunOptions(**values | told, sequence=2, batch=batch)
    except MemtraceError as error:
        return f"not known ({error})"
    wanted = int(getattr(args, "max_steps", 0) or 0)
    most = min(_MOST_STEPS, wanted) if wanted > 0 else _MOST_STEPS
    steps, order = _steps(loader, batch, options.accumulation, most, loop.random)
    if not steps:
        return "not known, since the data set does not tell its lengths"
    gpu, total = recorded_gpu(facts), int(facts.get("device_total_bytes") or 0)
    free, held = facts.get("device_free_bytes"), facts.get("stats", {}).get("reserved_bytes.all.current", 0)
    limit = min(int(facts.get("limit_bytes") or total), total if free is None else int(free) + int(held))
    allocator = parse_conf(conf_string(os.environ), device_total_bytes=total or None)
    run = FitRun(RunPlan(ShapeSource(shape), options, steps, gpu), allocator)
    search = Search(replace(run, config=run.config.with_limit(limit)))
    as_is = search.as_is
    over = f"{counted(len(steps), 'step')} in {order}, limit {format_bytes(limit)}"
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


def _steps(
    loader: Any, batch: int, accumulation: int, most: int, began: RandomState | None
) -> tuple[tuple[Any, ...], str]:
    """(the next steps, in whose order); none where the rows don't tell their lengths."""
    rows: Any = getattr(loader, "dataset", None)
    most *= accumulation
    order = "the data set's order"
    now = RandomState.of(loader)
    try:
        groups = _sampled(loader, most, began)
        if groups is not None:
            order = "the sampler's order"
        else:
            firsts = range(0, min(len(rows), most * batch), batch)
            groups = [list(range(first, min(first + batch, len(rows)))) for first in firsts]
        padding = _padding(getattr(loader, "collate_fn", None))
        micro = [padding.batch([_length(rows[i]) for i in group]) for group in groups]
    except (TypeError, KeyError, IndexError, AttributeError):
        return (), order
    finally:
        now.restore()
    return tuple(tuple(micro[at : at + accumulation]) for at in range(0, len(micro), accumulation)), order


def _sampled(loader: Any, most: int, began: RandomState | None) -> list[list[int]] | None:
    """The rows of the next micro-batches, as the loader will give them, without moving its sampler on."""
    batches: Any = getattr(loader, "batch_sampler", None)
    rows = getattr(batches, "sampler", None)
    if type(batches).__name__ != "BatchSampler" or type(rows).__name__ not in _SAMPLERS:
        return None
    torch = backend_module.import_torch()
    batches = copy.copy(batches)
    batches.sampler = copy.copy(rows)
    if began is not None:
        began.restore()
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed of its workers comes first
    return list(islice(batches, most))


def _length(row: Any) -> int:
    """Tokens of a row: by a column "length", its ``input_ids``, or the first of its tensors."""
    if isinstance(row, Mapping):
        if "length" in row:
            return int(row["length"])
        row = row["input_ids"]
    elif isinstance(row, tuple):
        row = row[0]
    shape = getattr(row, "shape", None)
    if shape is None and not isinstance(row, list):
        raise TypeError("neither tokens nor a tensor")
    return int(shape[-1]) if shape is not None else len(row)


def _padding(collate: Any) -> Any:
    """What the collator does with rows of different length."""
    from memtrace.estimate.schedule import Padding

    inner = getattr(collate, "data_collator", collate)  # the Trainer wraps it
    if getattr(inner, "padding_free", False) or type(inner).__name__ == "DataCollatorWithFlattening":
        return Padding("none")
    if getattr(inner, "padding", None) == "max_length" and getattr(inner, "max_length", None):
        return Padding("max", int(inner.max_length))
    multiple = getattr(inner, "pad_to_multiple_of", None)
    return Padding("multiple", int(multiple)) if multiple else Padding()


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

    if args is None:
        return {}
    name = str(getattr(getattr(args, "optim", ""), "value", getattr(args, "optim", "")))
    optimizer = {"optimizer": OPTIMIZER_NAMES[name]} if name in OPTIMIZER_NAMES else {}
    return optimizer | {
        "autocast": bool(getattr(args, "bf16", False) or getattr(args, "fp16", False)),
        "accumulation": int(getattr(args, "gradient_accumulation_steps", 1) or 1),
        "clips": bool(getattr(args, "max_grad_norm", 0)),
    }
