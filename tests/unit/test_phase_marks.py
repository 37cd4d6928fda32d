"""Marks that tell nothing new are left out before the phases are cut."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.phases import _ERROR, Mark, _Cutter, _marks, _whole_backward
from memtrace.attribution.stack_facts import Kind


def cut(marks: list[Mark]) -> list[tuple[int, int, int]]:
    cutter = _Cutter(seen_forward=False)
    for event, kind in _whole_backward(marks):
        cutter.allocated_by(kind, event)
    return [(event, int(phase), step) for event, phase, step in cutter.spans]


def test_the_same_phases_come_of_fewer_marks() -> None:
    random = np.random.default_rng(5)
    codes = [_ERROR, *map(int, Kind)]
    for length in (0, 1, 3, 40, 400):
        for _ in range(40):
            kinds = random.choice(codes, length, p=[0.02, 0.3, 0.08, 0.1, 0.3, 0.02, 0.08, 0.1]).astype(np.int8)
            marks = _marks(np.arange(length), kinds)
            everything = [(event, None if kind == _ERROR else Kind(kind)) for event, kind in enumerate(kinds.tolist())]
            assert cut(marks) == cut(everything)
            assert length < 100 or len(marks) < length
