"""Whether two snapshots say the same. Stacks and contexts are numbered as they are met, so numbers may differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from memtrace.snapshot.model import Snapshot
from memtrace.snapshot.stacks import StackTable


def _stack_numbers(left: StackTable, right: StackTable) -> np.ndarray[Any, Any]:
    """For each stack of ``left`` its number in ``right``; -1 stays -1 (the last entry)."""
    assert len(left) == len(right)
    assert set(left.frames) == set(right.frames)
    fx = [{table.frames[i]: dict(keys) for i, keys in table.fx.items()} for table in (left, right)]
    assert fx[0] == fx[1]
    number = {right.stack(i): i for i in range(len(right))}
    assert len(number) == len(right)
    return np.array([*(number[left.stack(i)] for i in range(len(left))), -1])


def _same_contexts(left: Any, right: Any) -> bool:
    if not np.array_equal(left < 0, right < 0):
        return False
    pairs = np.unique(np.stack([left, right]), axis=1)
    return len(np.unique(pairs[0])) == len(np.unique(pairs[1])) == pairs.shape[1]


def assert_same(left: Snapshot, right: Snapshot) -> None:
    """Every field of every column."""
    number = _stack_numbers(left.stacks, right.stacks)
    for item in dataclasses.fields(Snapshot):
        if item.name not in ("devices", "stacks", "source"):
            assert repr(getattr(left, item.name)) == repr(getattr(right, item.name)), item.name  # NaN equals NaN
    assert [device.device for device in left.devices] == [device.device for device in right.devices]
    for mine, other in zip(left.devices, right.devices, strict=True):
        for part in ("trace", "segments", "blocks"):
            one, two = getattr(mine, part), getattr(other, part)
            for item in dataclasses.fields(one):
                a, b = getattr(one, item.name), getattr(two, item.name)
                where = f"device {mine.device}: {part}.{item.name}"
                if item.name == "stack":
                    a = number[a].astype(a.dtype)
                if item.name == "context":
                    assert _same_contexts(a, b), where
                elif isinstance(b, np.ndarray):
                    assert a.dtype == b.dtype, where
                    assert np.array_equal(a, b), where
                else:
                    assert a == b, where
