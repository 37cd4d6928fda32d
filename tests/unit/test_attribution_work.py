"""What attribution does for each event of a long recording, counted: calls, and bytes of columns that numpy reads.

The bounds stand a third above what it takes. A rule that needs more of them is one to look at again: on millions of
events a sort of all rows is a second.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support import timeline

from memtrace.attribution.classify import attribute

LONG = [
    "ddp_rank0", "llama2-7b_kept-graphs", "llama2-7b_recorded-after-load", "llama2-7b_reference-model",
    "llama2-7b_variable-length", "qwen2-7b_large-vocabulary",
]  # fmt: skip
MOST_CALLS = 100_000  # however many events there are
SORTED_BYTES, READ_BYTES = 4, 190  # an event


@pytest.mark.parametrize("name", LONG)
def test_attribution_looks_at_a_long_recording_a_column_at_a_time(name: str) -> None:
    recorded = timeline(name)
    attribute(recorded)  # expressions that are compiled once, stacks that are seen once
    calls, read_bytes = 0, Counter[str]()

    def count(frame: FrameType, what: str, called: Any) -> None:
        nonlocal calls
        calls += what in ("call", "c_call")
        array = getattr(called, "__self__", None) if what == "c_call" else None
        if isinstance(array, np.ndarray):
            read_bytes[called.__name__] += array.nbytes

    sys.setprofile(count)
    try:
        attribute(recorded)
    finally:
        sys.setprofile(None)
    del read_bytes["searchsorted"]  # looks at a few of them
    assert calls < MOST_CALLS
    assert read_bytes["sort"] + read_bytes["argsort"] < SORTED_BYTES * len(recorded)
    assert 0 < read_bytes.total() < READ_BYTES * len(recorded)
