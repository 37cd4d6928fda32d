"""Record a run that memtrace builds itself: load, adapters, steps, evaluation; optionally with truth labels.

For the truth the same run is repeated in a process of its own under the operator stamps
(``python -m memtrace.record.qlora_run PLAN.json``), and both recordings are aligned.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import pickle
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memtrace.errors import NoAnswerError
from memtrace.record import backend as backend_module
from memtrace.record import messages, phases, qlora, stamps
from memtrace.record.api import record
from memtrace.record.truth import FROM_IDENTITY, Run, truth

# What the truth's rules call the phases.
_TRUTH_PHASES = {phases.BETWEEN: "zero_grad", phases.EVALUATION: "eval"}
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

    def as_json(self) -> str:
        """For the repetition's process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of :meth:`as_json`."""
        values = json.loads(text)
        step = values.pop("step")
        for key in ("targets", "lengths"):
            step[key] = tuple(step[key]) if step[key] is not None else None
        return Plan(step=qlora.StepConfig(**step), **values)


def record_plan(plan: Plan, path: Path, stamped: bool = False) -> tuple[Path, dict[str, Any] | None, dict[int, int]]:
    """Run the plan and write its snapshot. Returns (file, operator log, requested bytes by address at the beginning).

    An out-of-memory error ends the run, not memtrace: its state is what the file then holds. Raises NoAnswerError where
    no file could be written.
    """
    import torch

    torch.manual_seed(plan.step.seed)
    backend = backend_module.get()
    device = "cpu" if backend.device_type == "cpu" else f"cuda:{backend.current_device()}"
    if plan.cap_bytes is not None:
        backend.limit(plan.cap_bytes)
    before: dict[int, int] = {}
    packed: set[int] = set()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(stamps.stamping(lambda: packed)) if stamped else None
        model = _build(plan, device) if plan.late else None
        if plan.late:
            backend.synchronize()
        options: dict[str, Any] = {"stacks": plan.stacks, "max_entries": plan.max_entries, "force": plan.force}
        with contextlib.suppress(torch.OutOfMemoryError), record(path, deep=plan.deep, required=True, **options) as run:
            assert run.recorder is not None
            book = run.recorder
            run.count_steps_by_hand()
            if plan.late:
                before = live_blocks(backend.snapshot())
            model = model if model is not None else _build(plan, device)
            packed |= {parameter.data_ptr() for parameter in model.parameters() if not parameter.is_floating_point()}
            optimizer = qlora.make_optimizer(model, plan.step)
            book.log.enter(phases.BETWEEN)
            qlora.run_loop(
                model,
                optimizer,
                plan.step,
                device,
                lambda name: book.log.enter(_MARK_PHASES.get(name, name)),
                run.step,
            )
    if run.file is None:
        raise NoAnswerError(f"nothing was recorded to {path}")
    return run.file, log.as_dict() if log is not None else None, before


def _build(plan: Plan, device: str) -> Any:
    import torch

    base = qlora.load_base(plan.model, plan.step, device)
    torch.manual_seed(plan.step.seed + 1)
    return qlora.add_adapters(base, plan.step)


def live_blocks(snapshot: dict[str, Any]) -> dict[int, int]:
    """Requested bytes by address of every active block."""
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    return {block["address"]: block["requested_size"] for block in blocks if block["state"] != "inactive"}


# truth
def record_truth(plan: Plan, clean_file: Path, before: dict[int, int], labels_file: Path) -> dict[str, Any]:
    """Repeat the plan under the operator stamps and write the labels of ``clean_file``. Raises NoAnswerError."""
    with tempfile.TemporaryDirectory() as scratch:
        plan_file = Path(scratch) / "plan.json"
        plan_file.write_text(plan.as_json())
        command = [sys.executable, "-m", "memtrace.record.qlora_run", str(plan_file)]
        done = subprocess.run(command, capture_output=True, text=True)
        log_file = Path(scratch) / "log.json"
        if done.returncode or not log_file.exists():
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise NoAnswerError(f"the repetition for the truth labels failed: {reason}")
        document = json.loads(log_file.read_text())
        stamped = run_of(_read(Path(document["file"])))
    labels = truth(run_of(_read(clean_file)), stamped, document["log"], document["vocabulary"], before)
    labels_file.write_bytes(lzma.compress(json.dumps(labels).encode()))
    return labels


def run_of(snapshot: dict[str, Any]) -> Run:
    """What the truth needs of a snapshot that memtrace recorded."""
    extra = snapshot["memtrace"]
    trace = snapshot["device_traces"][extra["device"]]
    last_us = trace[-1].get("time_us", 0) if trace else 0
    seen: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for row in extra["labels"]:
        if not row.get("outside"):
            at = last_us if row["until_time_us"] is None else row["until_time_us"]
            seen[at].append((row["address"], FROM_IDENTITY[row["category"], row["subcategory"]]))
    marks = [(row["time_us"], _TRUTH_PHASES.get(row["name"], row["name"])) for row in extra["phases"]]
    return Run(trace, marks, sorted(seen.items()))


def _read(path: Path) -> dict[str, Any]:
    """A file that this process or its child has just written."""
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def repeat(plan_file: Path) -> None:
    """The repetition's process: leaves ``log.json`` beside the plan."""
    plan = Plan.from_json(plan_file.read_text())
    file, log, _ = record_plan(plan, plan_file.with_name("stamped.pickle"), stamped=True)
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(plan.model).get_text_config().vocab_size
    document = {"file": str(file), "log": log, "vocabulary": vocabulary}
    plan_file.with_name("log.json").write_text(json.dumps(document))


if __name__ == "__main__":
    with messages.guarded("repeating the run"):
        repeat(Path(sys.argv[1]))
