"""Frees move where phases begin: inside the phase before, and only where anything was allocated."""

from __future__ import annotations

from typing import Any

from made_programs import AUTOGRAD, FORWARD, KIB, MAIN, STEP, ZERO_GRAD, Program

from memtrace.analysis import Analysis, analyse
from memtrace.attribution.phases import Phase
from memtrace.history.timeline import build
from memtrace.snapshot.load import from_raw


def analysed(raw: dict[str, Any]) -> Analysis:
    snapshot = from_raw(raw, "x")
    return analyse(build(snapshot, snapshot.devices[0]))


def test_a_second_optimizers_step_may_ask_for_nothing() -> None:
    program, notes = Program(), []

    def note(stage: str) -> None:
        notes.append({"stage": stage, "name": "Optimizer.step#X.step", "device": 0, "time_us": len(program.events)})

    for number in range(3):
        for name in ("first", "second"):
            program.alloc(f"{name}{number}", 64 * KIB, FORWARD)
            program.alloc(f"{name} gradient{number}", 64 * KIB, AUTOGRAD)
            program.free(f"{name}{number}", AUTOGRAD)
        note("START")
        program.alloc(f"update{number}", 32 * KIB, STEP)
        note("END")
        program.events.append(program.events[-1] | {"action": "snapshot", "time_us": len(program.events)})
        program.free(f"first gradient{number}", (*MAIN,))
        note("START")
        program.free(f"update{number}", STEP)
        note("END")
        program.events.append(program.events[-1] | {"action": "snapshot", "time_us": len(program.events)})
        program.free(f"second gradient{number}", ZERO_GRAD)
    phases = analysed(program.snapshot() | {"external_annotations": notes}).attribution.facts.phases
    assert (phases.start[1:] >= phases.start[:-1]).all()
    assert (phases.phase == Phase.OPTIMIZER).sum() == 6


def test_a_trace_of_refused_requests_alone() -> None:
    events = []
    for number, texts in enumerate((FORWARD, MAIN, STEP, MAIN)):
        event = {"action": "oom", "addr": 0, "size": 1 << 30, "stream": 0, "time_us": 2 * number}
        frames = [{"filename": text.split(":")[0], "line": 1, "name": text.split(":")[1]} for text in texts]
        freed = event | {"action": "free_requested", "addr": 1 << 20, "size": 512, "time_us": 2 * number + 1}
        events += [event | {"frames": frames}, freed | {"frames": []}]
    raw = Program().snapshot() | {"device_traces": [events]}
    assert not len(analysed(raw).timeline.allocations.alloc_event[1:])
