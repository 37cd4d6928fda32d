"""The mirrored families against real modules: the storages that forward and loss save, counted by size."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import gpu_preset
from memtrace.estimate.shapes import FAMILIES, shape_from_config
from memtrace.estimate.stream import EMPTY_CACHE, live_at

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


# What CUDA does and a CPU does not, and boolean temporaries of the mask, which differ by attention window.
_NOT_ON_CPU = {"cumsum", "causal_mask"}


@pytest.mark.parametrize(
    "run", [run for run in RUNS if "forward" in run], ids=lambda run: str(run["config"]["model_type"])
)
def test_allocations_of_forward_and_backward_equal_those_of_the_real_modules(run: dict[str, Any]) -> None:
    shape = shape_from_config(run["config"], "real")
    options = RunOptions(
        TRUTH["sequence"], 1, TRUTH["rank"], dropout=0.0, checkpointing=False, quant="none", attention="eager"
    )  # fmt: skip
    stream = simulate_run(shape, options, gpu_preset("h200").device, steps=1)
    at = {mark.name: mark.event for mark in stream.marks}
    for phase, begin, end in (("forward", "forward", "backward"), ("backward", "backward", "optimizer")):
        made = [e for e in stream.events[at[begin] : at[end]] if 0 <= e < EMPTY_CACHE and stream.sizes[e] > 800]
        made = [e for e in made if stream.ops[e] not in _NOT_ON_CPU and not stream.labels[e].startswith("runtime")]
        softmax = [e for e in made if stream.ops[e] == "softmax_backward"]
        on_cpu = set(made) - set(softmax[1::2])  # CUDA's softmax backward needs a temporary
        assert Counter(stream.sizes[e] for e in on_cpu) == {int(size): n for size, n in run[phase].items()}
