"""Accuracy of the attribution on every labelled recording, whole and with one kind of evidence taken away.

    python benchmarks/attribution_accuracy.py [NAME …]      # prints a Markdown table

Columns are shares of the peak's bytes (and of all allocated bytes) in the right category.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from scoring import score
from support import LABELLED, labels, snapshot

from memtrace.attribution.categories import Evidence
from memtrace.attribution.classify import Attribution, attribute
from memtrace.history.timeline import Timeline, build
from memtrace.snapshot.model import Device, Snapshot


def changed(whole: Snapshot, device: Device, annotations: bool) -> Snapshot:
    return dataclasses.replace(whole, devices=(device,), annotations=whole.annotations if annotations else ())


def without_stacks(whole: Snapshot, annotations: bool) -> Snapshot:
    device = whole.devices[0]
    trace = dataclasses.replace(device.trace, stack=np.full_like(device.trace.stack, -1))
    blocks = dataclasses.replace(device.blocks, stack=np.full_like(device.blocks.stack, -1))
    return changed(whole, dataclasses.replace(device, trace=trace, blocks=blocks), annotations)


def with_allocation_stacks(whole: Snapshot) -> Snapshot:
    """As ``context="alloc"`` records: a free carries the stack of its allocation."""
    device = whole.devices[0]
    replay, stack = build(whole, device).replay, device.trace.stack.copy()
    for frees in (replay.free_requested_event, replay.free_completed_event):
        made = np.flatnonzero(frees >= 0)
        stack[frees[made]] = device.trace.stack[made]
    return changed(whole, dataclasses.replace(device, trace=dataclasses.replace(device.trace, stack=stack)), True)


FRAMES_ONLY = (Evidence.LABEL, Evidence.FRAME)
VARIANTS: dict[str, Callable[[Snapshot], tuple[Snapshot, tuple[Evidence, ...]]]] = {
    "whole": lambda s: (s, tuple(Evidence)),
    "no optimizer marks": lambda s: (changed(s, s.devices[0], annotations=False), tuple(Evidence)),
    "frees without own stacks": lambda s: (with_allocation_stacks(s), tuple(Evidence)),
    "stacks only (no lifetimes, shapes)": lambda s: (s, FRAMES_ONLY),
    "no stacks": lambda s: (without_stacks(s, annotations=True), tuple(Evidence)),
    "no stacks, no marks": lambda s: (without_stacks(s, annotations=False), tuple(Evidence)),
}


def rows(names: list[str]) -> Iterator[list[str]]:
    for name in names:
        cells = [name]
        for variant in VARIANTS.values():
            made, evidence = variant(snapshot(name))
            timeline: Timeline = build(made, made.devices[0])
            attribution: Attribution = attribute(timeline, allowed=evidence)
            result = score(timeline, attribution, labels(name))
            cells.append(f"{result.at_peak:.1%} ({result.overall:.1%})")
        yield cells


def main() -> None:
    print("| recording | " + " | ".join(VARIANTS) + " |")
    print("|---|" + "---|" * len(VARIANTS))
    for cells in rows(sys.argv[1:] or LABELLED):
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
