"""Recordings and their programs for allocator tests, loaded once a process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from memtrace.allocator.config import from_snapshot
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.replay.replay import Replay, replay_device
from memtrace.allocator.whatif.program import Program, extract
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Device, Snapshot

ROOT = Path(__file__).parent
FUZZ = sorted(path.name.removesuffix(".pickle.xz") for path in (ROOT / "truth" / "fuzz").glob("*.pickle.xz"))
SAMPLES = ROOT.parent / "sample_traces"
GIB = 1 << 30


def fuzz_truth(name: str) -> dict[str, Any]:
    """What the process said about itself: settings string, cap in GiB, caught OOMs, memory statistics."""
    truth: dict[str, Any] = json.loads((ROOT / "truth" / "fuzz" / f"{name}.json").read_text())
    return truth


def manifest() -> dict[str, dict[str, Any]]:
    """Sample recordings by name, with their expected peaks."""
    return {entry["name"]: entry for entry in json.loads((SAMPLES / "manifest.json").read_text())["traces"]}


@cache
def recording(name: str) -> Snapshot:
    """A recording by name, from the allocator workloads or the sample traces."""
    folder = ROOT / "truth" / "fuzz" if name.startswith("fuzz_") else SAMPLES
    return load(folder / f"{name}.pickle.xz")


def device(name: str) -> Device:
    """The device of a recording that did something."""
    return next(dev for dev in recording(name).devices if len(dev.trace))


@cache
def replayed(name: str) -> Replay:
    """The recording, replayed under its own settings."""
    return replay_device(device(name), recording(name).settings)


@cache
def program(name: str) -> Program:
    """The program behind a recording."""
    return extract(gather(device(name), from_snapshot(recording(name).settings)))
