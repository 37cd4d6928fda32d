"""Accuracy of the attribution on every labelled recording, whole and with one kind of evidence taken away.

    python benchmarks/attribution_accuracy.py [NAME …]              # prints a Markdown table
    python benchmarks/attribution_accuracy.py --wrapped [NAME …]    # each inside every wrapper, and dumped late
    python benchmarks/attribution_accuracy.py --thin [NAME …]       # with evidence taken away

Columns are shares of the peak's bytes (and of all allocated bytes) in the right category; with ``--wrapped`` also of
the peak's bytes with the right purpose, the lowest of all ways; how many allocations came out otherwise than plain, and
which ways cut phases or steps otherwise.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from scoring import score
from support import FIELD, LABELLED, STACKS, labels, snapshot, trace_path
from thinned import WAYS, Shares, bare, shares
from wrappers import WRAPPERS, cleaned_up, dumped_late, ended, with_allocation_stacks, wrapped

from memtrace.attribution.categories import Evidence
from memtrace.attribution.classify import Attribution, attribute
from memtrace.history.timeline import Timeline, build
from memtrace.snapshot.container import open_stream
from memtrace.snapshot.load import from_raw
from memtrace.snapshot.model import Action, Device, Snapshot


def changed(whole: Snapshot, device: Device, annotations: bool) -> Snapshot:
    return dataclasses.replace(whole, devices=(device,), annotations=whole.annotations if annotations else ())


def without_stacks(whole: Snapshot, annotations: bool) -> Snapshot:
    device = whole.devices[0]
    trace = dataclasses.replace(device.trace, stack=np.full_like(device.trace.stack, -1))
    blocks = dataclasses.replace(device.blocks, stack=np.full_like(device.blocks.stack, -1))
    return changed(whole, dataclasses.replace(device, trace=trace, blocks=blocks), annotations)


FRAMES_ONLY = (Evidence.LABEL, Evidence.FRAME)
VARIANTS: dict[str, Callable[[Snapshot], tuple[Snapshot, tuple[Evidence, ...]]]] = {
    "whole": lambda s: (s, tuple(Evidence)),
    "no optimizer marks": lambda s: (changed(s, s.devices[0], annotations=False), tuple(Evidence)),
    "frees without own stacks": lambda s: (with_allocation_stacks(build(s, s.devices[0])), tuple(Evidence)),
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


def _purposes(attribution: Attribution) -> np.ndarray:
    return np.array([str(rule.purpose) for rule in attribution.rules])[attribution.rule]


def wrapped_rows(names: list[str]) -> Iterator[list[str]]:
    """Per recording: the lowest shares of all wrappers and late dumps, and what differs from the plain recording."""
    for name in names:
        whole, truth = snapshot(name), labels(name)
        bare = dataclasses.replace(whole, memtrace={})
        plain = build(bare, bare.devices[0])
        before = attribute(plain)
        made = [(each, dataclasses.replace(plain, snapshot=wrapped(bare, fix))) for each, fix in WRAPPERS.items()]
        # A dump at the end of a program that handled its errors can't be made one that ends at the last of them.
        if plain.trace.action[-1] in (Action.OOM, Action.SNAPSHOT) and plain.oom_events:
            for way in (dumped_late, cleaned_up, ended):
                with open_stream(trace_path(name)) as opened:
                    raw = pickle.loads(opened.stream.read())
                raw.pop("memtrace", None)
                late = from_raw(way(raw), name)
                made.append((way.__name__.replace("_", " "), build(late, late.devices[0])))
        results = []
        cut: list[str] = []
        for way, timeline in made:
            after = attribute(timeline)
            ours, theirs = after.facts.phases, before.facts.phases
            pairs = (ours.start[:-1], theirs.start[:-1]), (ours.phase, theirs.phase), (ours.step, theirs.step)
            if not all(np.array_equal(*pair) for pair in pairs):
                cut.append(way)
            result = score(timeline, after, truth)
            changed = int((_purposes(before) != _purposes(after)).sum())
            results.append((result.at_peak, result.overall, result.purpose_at_peak, changed))
        lowest = [min(column) for column in list(zip(*results, strict=True))[:3]]
        yield [
            name,
            str(len(made)),
            *(f"{share:.2%}" for share in lowest),
            str(sum(row[3] for row in results)),
            ", ".join(cut),
        ]


def thin_rows(names: list[str]) -> Iterator[list[str]]:
    """Per way of taking evidence away: mean shares of the peaks' bytes, and the recording with most that is wrong."""
    found: dict[str, dict[str, Shares]] = {way: {} for way in WAYS}
    for name in names:
        whole, truth = bare(build(snapshot(name), snapshot(name).devices[0])), labels(name)
        for way, thin in WAYS.items():
            if (thinned := thin(whole)) is not None:
                found[way][name] = shares(thinned, attribute(thinned.timeline), whole, truth)
    for way, by_name in found.items():
        if by_name:
            means = np.mean(list(by_name.values()), axis=0)
            worst = max(by_name, key=lambda name: by_name[name].wrong)
            yield [way, str(len(by_name)), *(f"{m:.1%}" for m in means), f"{by_name[worst].wrong:.0%} ({worst})"]


def main() -> None:
    if "--help" in sys.argv:
        print(__doc__)
        return
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or [*LABELLED, *FIELD, *STACKS]
    if "--thin" in sys.argv:
        print("| what is taken away | recordings | right | unattributed | wrong | wrong at worst |")
        print("|---|---|---|---|---|---|")
        for cells in thin_rows(names):
            print("| " + " | ".join(cells) + " |", flush=True)
        return
    if "--wrapped" in sys.argv:
        print("| recording | ways | at the peak | of all bytes | purpose at the peak | changed | other phases |")
        print("|---|---|---|---|---|---|---|")
        for cells in wrapped_rows(names):
            print("| " + " | ".join(cells) + " |", flush=True)
        return
    print("| recording | " + " | ".join(VARIANTS) + " |")
    print("|---|" + "---|" * len(VARIANTS))
    for cells in rows(names):
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
