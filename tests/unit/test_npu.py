"""Recordings of torch_npu: found by block sizes or by name, sized by its rule, advised in its words."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from allocator_recordings import device, program, recording, replayed

from memtrace.allocator.export import as_snapshot
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.whatif.program import extract
from memtrace.allocator.whatif.selfcheck import recorded_limit
from memtrace.allocator.whatif.whatif import simulate
from memtrace.analysis import Analysis, analyse
from memtrace.answers.report import report
from memtrace.answers.simulate import Question, answer
from memtrace.explain.case import Case
from memtrace.explain.explain import explain_snapshot
from memtrace.history.refusals import refusals
from memtrace.history.timeline import build, choose_event
from memtrace.render.report_text import render_report
from memtrace.snapshot.devices import device_name
from memtrace.snapshot.load import from_raw

NAMES = ["tiny-llama_3-steps", "fuzz_default_0", "llama2-7b_oom-first-step"]
FRAME = {"filename": "/usr/lib/python3/site-packages/torch_npu/npu/__init__.py", "line": 1, "name": "empty"}


@cache
def made(name: str, conf_expands: bool = False) -> dict[str, Any]:
    """A recorded program as torch_npu would have run it: every request 32 bytes longer before it is rounded."""
    padded = replace(program(name).evidence.config, padding_bytes=32)
    limit = recorded_limit(replayed(name)).size_bytes
    config = replace(padded, expandable_segments=conf_expands, limit_bytes=limit)
    raw = as_snapshot(recording(name), simulate(extract(gather(device(name), padded)), config))
    raw["allocator_settings"].pop("PYTORCH_CUDA_ALLOC_CONF")
    raw["allocator_settings"]["PYTORCH_NPU_ALLOC_CONF"] = f"expandable_segments:{conf_expands}"
    return raw


def analysed(name: str, raw: dict[str, Any]) -> Analysis:
    snapshot = from_raw(raw, "npu")
    return analyse(build(snapshot, snapshot.device(device(name).device)))


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_exact(name: str, expands: bool) -> None:
    analysis = analysed(name, made(name, expands))
    timeline, replay = analysis.timeline, analysis.timeline.replay
    assert replay.exact, replay.why
    assert replay.padding_bytes == timeline.config.padding_bytes == 32
    table, last = timeline.allocations, len(timeline) - 1
    assert (table.block_bytes >= -(-(table.requested_bytes + 32) // 512) * 512).all()
    small = table.is_small & (table.alloc_event >= 0)
    assert (table.block_bytes == -(-(table.requested_bytes + 32) // 512) * 512)[small].all()
    end = report(analysis, choose_event(timeline, "end"))
    held = timeline.device.blocks.size[timeline.device.blocks.state == 1]
    assert end.allocated_bytes == int(held.sum())
    assert sum(end.categories.values()) == end.reserved_bytes
    rows = timeline.live_rows(last)
    rows = rows[~timeline.pending(rows, last)]
    rounded = -(-(table.requested_bytes[rows] + 32) // 512) * 512
    assert end.fragmentation.rounding_bytes == int((rounded - table.requested_bytes[rows]).sum())
    assert any("torch_npu" in line for line in end.warnings)


def test_block_sizes_outweigh_a_name() -> None:
    """Somebody's CUDA run with torch_npu on its stacks and in its settings is sized as what it is."""
    code = program("fuzz_default_0")
    raw = as_snapshot(recording("fuzz_default_0"), simulate(code, code.evidence.config))
    raw["allocator_settings"]["PYTORCH_NPU_ALLOC_CONF"] = "max_split_size_mb:64"
    for event in raw["device_traces"][0]:
        event["frames"] = [*event["frames"], FRAME]
    replay = analysed("fuzz_default_0", raw).timeline.replay
    assert replay.exact
    assert replay.padding_bytes == 0


@pytest.mark.parametrize("by", ["frame", "setting"])
def test_a_name_counts_where_no_size_tells(by: str) -> None:
    raw = dict(made("fuzz_default_0"), segments=[])
    raw["allocator_settings"] = dict(raw["allocator_settings"])
    if by == "frame":
        del raw["allocator_settings"]["PYTORCH_NPU_ALLOC_CONF"]
        raw["device_traces"] = [[{**event, "frames": [FRAME]} for event in raw["device_traces"][0]]]
    assert analysed("fuzz_default_0", raw).timeline.replay.padding_bytes == 32
    del raw["allocator_settings"]
    nameless = [[{**event, "frames": []} for event in raw["device_traces"][0]]]
    assert analysed("fuzz_default_0", {**raw, "device_traces": nameless}).timeline.replay.padding_bytes == 0


def test_block_sizes_alone_name_the_back_end() -> None:
    """Without a setting or a frame of torch_npu, as in files whose stacks begin in the user's code."""
    raw = dict(made("llama2-7b_oom-first-step"))
    raw["allocator_settings"] = {}
    analysis = analysed("llama2-7b_oom-first-step", raw)
    timeline = analysis.timeline
    at = choose_event(timeline, None)
    assert at.kind == "oom"
    setting = Case.setting.func(Case(analysis, at, None, None))  # type: ignore[attr-defined, arg-type]
    assert (setting.backend, setting.variable, setting.card_tool) == ("npu", "PYTORCH_NPU_ALLOC_CONF", "npu-smi info")
    explanation = explain_snapshot(analysis, at)
    assert explanation.oom is not None
    assert explanation.oom["backend"] == "npu"
    asked = int(timeline.trace.size[at.event])
    assert refusals(timeline)[-1].asked_bytes == -(-(asked + 32) // 512) * 512
    assert not any("CUDA_ALLOC_CONF" in change.change for found in explanation.findings for change in found.advice)


def test_simulations_keep_the_rounding() -> None:
    raw = dict(made("fuzz_default_0"), segments=[])
    timeline = analysed("fuzz_default_0", raw).timeline
    found = answer(timeline, Question(confs=("max_split_size_mb:512",), addresses=False))
    assert {run.program.evidence.config.padding_bytes for run in found.simulations} == {32}
    assert all(np.asarray(run.config.padding_bytes) == 32 for run in found.simulations)


def test_heads_name_the_device_by_its_back_end() -> None:
    analysis = analysed(NAMES[0], made(NAMES[0]))
    budget = report(analysis, choose_event(analysis.timeline, "peak"))
    head = next(iter(render_report(budget))).plain
    assert budget.device_name == f"NPU {budget.device}"
    assert f" · NPU {budget.device} · " in head
    assert "GPU" not in head


@pytest.mark.parametrize(
    ("file", "settings", "name"),
    [
        ("/site-packages/torch_npu/npu/memory.py", {}, "NPU 3"),
        ("C:\\site-packages\\torch_musa\\core\\memory.py", {}, "MUSA 3"),
        ("/site-packages/torch/xpu/memory.py", {}, "XPU 3"),
        ("/home/me/torch_npu.py", {}, "GPU 3"),
        ("/site-packages/torch/cuda/memory.py", {}, "GPU 3"),
        ("a.py", {"PYTORCH_MLU_ALLOC_CONF": "expandable_segments:True"}, "MLU 3"),
        ("a.py", {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True", "PYTORCH_NPU_ALLOC_CONF": ""}, "GPU 3"),
    ],
)
def test_back_ends(file: str, settings: dict[str, str], name: str) -> None:
    event = {"action": "alloc", "addr": 1024, "size": 512, "stream": 0, "time_us": 1,
             "frames": [{"filename": file, "line": 1, "name": "f"}]}  # fmt: skip
    snapshot = from_raw({"segments": [], "device_traces": [[event]], "allocator_settings": settings}, "a.pickle")
    assert device_name(snapshot, 3) == name
    assert device_name(snapshot, 3, is_npu=True) == "NPU 3"
