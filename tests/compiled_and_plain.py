"""What the compiled parts of the allocator make of something, and their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import numpy as np

from memtrace.allocator import state
from memtrace.allocator.replay import lifetimes
from memtrace.allocator.replay.replay import Allocations


def twice(make: Callable[[], Any]) -> tuple[Any, Any]:
    """What the compiled parts make of something, and the plain ones."""
    ours = make()
    with patch.object(state, "_COMPILED", None), patch.object(lifetimes, "_COMPILED", None):
        return ours, make()


def assert_same_replay(ours: Any, plain: Any) -> None:
    """Every field of a replay or of a what-if run."""
    for name in (field.name for field in fields(ours)):
        mine, other = getattr(ours, name), getattr(plain, name)
        if isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(mine, other, name)
        elif isinstance(mine, Allocations):
            assert_same_replay(mine, other)
        elif isinstance(mine, (int, str, tuple, type(None))):
            assert mine == other, name
