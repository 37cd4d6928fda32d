"""Marks that tell nothing new are left out before the phases are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memtrace.attribution import phases
from memtrace.attribution.blind_phases import Lives
from memtrace.attribution.phases import _ERROR, Mark, _Cutter, _marks, _updates, _whole_backward
from memtrace.attribution.stack_facts import Kind


def cut(marks: list[Mark]) -> list[tuple[int, int, int]]:
    cutter = _Cutter(seen_forward=False)
    for event, kind in _whole_backward(marks):
        cutter.allocated_by(kind, event)
    return [(event, int(phase), step) for event, phase, step in cutter.spans]


def test_the_same_phases_come_of_fewer_marks() -> None:
    random = np.random.default_rng(5)
    codes = [_ERROR, *range(Kind.STRAY)]
    for length in (0, 1, 3, 40, 400):
        for _ in range(40):
            kinds = random.choice(codes, length, p=[0.02, 0.3, 0.08, 0.1, 0.3, 0.02, 0.08, 0.1]).astype(np.int8)
            marks = _marks(np.arange(length), kinds)
            everything = [(event, None if kind == _ERROR else Kind(kind)) for event, kind in enumerate(kinds.tolist())]
            assert cut(marks) == cut(everything)
            assert length < 100 or len(marks) < length


class _Trace(list[int]):
    stack: Any


def test_passes_without_an_optimizer_step_are_each_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, each, looked_at = 50, 20, 0
    among = phases.among

    def counted(values: Any, wanted: Any) -> Any:
        nonlocal looked_at
        looked_at += len(values)
        return among(values, wanted)

    monkeypatch.setattr(phases, "among", counted)
    marks: list[Mark] = []
    for start in range(0, steps * each, each):
        marks += [(start, Kind.FORWARD), (start, Kind.BACKWARD), (start + each - 1, Kind.OTHER)]
    born = np.arange(steps * each)
    lives = Lives(born, born + 1, np.full(len(born), 1 << 20))
    trace: Any = _Trace(born)
    trace.stack = np.zeros(len(born), dtype=np.int64)
    stacks: Any = SimpleNamespace(kind=np.array([int(Kind.BACKWARD)]))
    assert list(_updates(marks, trace, stacks, lives)) == marks
    assert looked_at <= 2 * len(born)
