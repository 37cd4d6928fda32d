"""The mirrored families against real modules: the storages that forward and loss save, counted by size."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memtrace.budget.estimate import live_at
from memtrace.budget.options import RunOptions
from memtrace.budget.presets import gpu_preset
from memtrace.budget.shapes import FAMILIES, shape_from_config
from memtrace.budget.step import simulate_run
from memtrace.budget.tape import EMPTY_CACHE

TRUTH = json.loads((Path(__file__).parent.parent / "truth" / "measured" / "saved_tensors.json").read_text())
RUNS: list[dict[str, Any]] = TRUTH["runs"]


def test_every_family_is_there() -> None:
    assert {run["config"]["model_type"] for run in RUNS} == set(FAMILIES)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['config']['model_type']}-{run['batch']}")
def test_saved_storages_equal_those_of_the_real_modules(run: dict[str, Any]) -> None:
    shape = shape_from_config(run["config"], "real")
    options = RunOptions(
        TRUTH["sequence"],
        run["batch"],
        TRUTH["rank"],
        dropout=0.0,
        checkpointing=False,
        quant="none",
        attention="eager",
    )
    stream = simulate_run(shape, options, gpu_preset("h200").device, steps=1)
    at = {mark.name: mark.event for mark in stream.marks}
    first = sum(0 <= entry < EMPTY_CACHE for entry in stream.events[: at["forward"]])
    found = Counter(
        stream.sizes[i]
        for i in live_at(stream, at["backward"] - 1)
        if i >= first and stream.sizes[i] > 512 and not stream.labels[i].startswith(("base_weights", "runtime"))
    )
    assert found == {int(size): count for size, count in run["saved"].items()}
