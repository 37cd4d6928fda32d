"""Predicted peaks against peaks measured on an H200: every row, every phase, both steps."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tools.formulas import backward_peak, forward_peak, optimizer_peak, symbols

from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.options import RunOptions
from memtrace.estimate.placement import Placement, place
from memtrace.estimate.presets import gpu_preset, model_preset
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.stream import Stream

TRUTH = Path(__file__).parent.parent / "truth" / "measured"
DEVICE = gpu_preset("h200").device
FILES = sorted(path.stem for path in TRUTH.glob("*_r[0-9]*.json"))
PHASES = ("forward", "backward", "optimizer")
_OF_MARK = {"inputs": "forward", "loss": "forward", "recompute": "backward", "zero_grad": "optimizer"}


def rows(file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((TRUTH / f"{file}.json").read_text())["rows"]
    return found


def options(row: dict[str, Any]) -> RunOptions:
    return RunOptions(
        sequence=row["L"],
        batch=row["B"],
        rank=row["rank"],
        dropout=row["dropout"],
        optimizer=row["optim"],
        attention=row["attn"],
        checkpointing=row["ckpt"],
        prepare_kbit=row["prepare"],
        embeddings_require_grad=row["ckpt"],
    )


def phase_peaks(stream: Stream, placement: Placement) -> dict[str, tuple[int, int, int]]:
    """Requested, allocated, reserved by ``step{k}_{phase}``, phases as they were measured."""
    peaks: dict[str, tuple[int, int, int]] = {}
    ends = [mark.event for mark in stream.marks[1:]] + [len(stream.events)]
    for mark, end in zip(stream.marks, ends, strict=True):
        low = max(mark.event - 1, 0)
        if mark.step < 0 or end <= low:
            continue
        key = f"step{mark.step}_{_OF_MARK.get(mark.name, mark.name)}"
        here = tuple(
            int(curve[low:end].max()) for curve in (placement.requested, placement.allocated, placement.reserved)
        )
        old = peaks.get(key, (0, 0, 0))
        peaks[key] = (max(old[0], here[0]), max(old[1], here[1]), max(old[2], here[2]))
    return peaks


def shape_of(row: dict[str, Any]) -> ModelShape:
    """The measured model; the measured Mistral had no sliding window."""
    return replace(model_preset(row["arch"]), sliding_window=None)


@cache
def predicted(file: str) -> tuple[dict[str, tuple[int, int, int]], ...]:
    found = []
    for row in rows(file):
        stream = simulate_run(shape_of(row), options(row), DEVICE)
        found.append(phase_peaks(stream, place(stream)))
    return tuple(found)


@pytest.mark.parametrize("file", FILES)
def test_requested_peak_of_every_phase_is_exact(file: str) -> None:
    for row, peaks in zip(rows(file), predicted(file), strict=True):
        for key in (f"step{step}_{phase}" for step in (0, 1) for phase in PHASES):
            assert peaks[key][0] == row[key]["requested"], (row["L"], row["B"], row["ckpt"], row["attn"], key)


def test_allocated_and_reserved_peaks() -> None:
    """Each of the 38 ran in a process of its own: reserved memory is exact in all but one, which is 0.011 % off."""
    off: dict[str, list[float]] = {"alloc": [], "reserved": []}
    for file in FILES:
        for row, peaks in zip(rows(file), predicted(file), strict=True):
            for level, (name, errors) in enumerate(off.items(), 1):
                measured = max(row[f"step1_{phase}"][name] for phase in PHASES)
                mine = max(peaks[f"step1_{phase}"][level] for phase in PHASES)
                errors.append(abs(mine / measured - 1))
    assert (sum(map(bool, off["alloc"])), sum(map(bool, off["reserved"]))) == (1, 1)
    assert max(off["alloc"]) < 0.00002 and max(off["reserved"]) < 0.00012


@pytest.mark.parametrize("file", FILES)
def test_closed_formulas_give_the_same_peaks(file: str) -> None:
    for row in rows(file):
        if not row["ckpt"]:
            continue  # the formulas let the embedding output need a gradient, as checkpointing does
        x = symbols(shape_of(row), options(row), DEVICE)
        assert forward_peak(x) == row["step1_forward"]["requested"]
        assert backward_peak(x) == row["step1_backward"]["requested"]
        assert optimizer_peak(x) == row["step1_optimizer"]["requested"]
