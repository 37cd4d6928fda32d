"""Recordings and their programs for allocator tests, loaded once a process."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import support

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
def _workload(name: str) -> Snapshot:
    return load(ROOT / "truth" / "fuzz" / f"{name}.pickle.xz")


def recording(name: str) -> Snapshot:
    """A recording by name, from the allocator workloads or the sample traces."""
    return _workload(name) if name.startswith("fuzz_") else support.snapshot(name)


def device(name: str) -> Device:
    """The device of a recording that did something."""
    return next(dev for dev in recording(name).devices if len(dev.trace))


@cache
def _replayed(name: str) -> Replay:
    return replay_device(device(name), recording(name).settings)


def replayed(name: str) -> Replay:
    """The recording, replayed under its own settings."""
    return _replayed(name) if name.startswith("fuzz_") else support.timeline(name).replay


@lru_cache(maxsize=3)
def program(name: str) -> Program:
    """The program behind a recording."""
    return extract(gather(device(name), from_snapshot(recording(name).settings)))
