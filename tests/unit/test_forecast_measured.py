"""Whole runs on an H200, in fresh processes near a limit, forecast before they were made (docs/forecast.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu.record_runs import MODELS, run_plan_of

from memtrace.allocator.conf_text import parse_conf
from memtrace.estimate.forecast import forecast
from memtrace.estimate.shapes import FAMILIES

RUNS = [json.loads(line) for line in (Path(__file__).parent.parent / "truth/measured/whole_runs.jsonl").open()]
KNOWN = [run for run in RUNS if MODELS[run["model"]]["model_type"] in FAMILIES]
#: Within 1 % of the least limit that suffices by the forecast; the driver's addresses decide.
ON_THE_EDGE = {"04_gemma2", "19_phi3"}
H200_BYTES = 150_109_880_320


@pytest.mark.parametrize("run", KNOWN, ids=lambda run: run["name"])
def test_whole_runs(run: dict[str, Any]) -> None:
    """What tensors need is exact in every step; the step of death is right; reserved memory is within 0.1 %."""
    plan = run_plan_of(run | {"architecture": MODELS[run["model"]]})
    config = parse_conf(run["conf"], (2, 11), H200_BYTES).with_limit(run["limit_bytes"])
    found = forecast(plan, config)
    real = None if run["oom"] is None else run["oom"]["step"]
    both = list(zip(found.steps, run["steps"], strict=False))
    if run["name"] not in ON_THE_EDGE:
        assert (None if found.oom is None else found.oom.step) == real
        assert all(abs(step.peak_reserved_bytes / measured[2] - 1) < 0.05 for step, measured in both)
        peak, highest = (max(values) for values in zip(*((s.peak_reserved_bytes, m[2]) for s, m in both), strict=True))
        assert abs(peak / highest - 1) < 0.001
    if found.oom is not None and run["name"] not in ON_THE_EDGE:
        refused = found.oom
        assert found.oom.phase == run["oom"]["phase"] and found.oom.micro_batch == run["oom"]["micro_batch"]
        assert refused.requested_bytes == run["oom"]["requested_bytes"]
        assert refused.allocated_bytes == run["oom"]["allocated_bytes"]
    finished = both[: found.oom.step] if found.oom is not None else both
    assert [step.peak_requested_bytes for step, _ in finished] == [measured[0] for _, measured in finished]
