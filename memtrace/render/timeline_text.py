"""The curves as a short table for a terminal: the highest moment of each part of the recording."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from memtrace.analysis import Analysis
from memtrace.answers.curves import Curves
from memtrace.attribution.phases import Phase
from memtrace.render.text import Text, columns, heading
from memtrace.render.words import STYLE, bar
from memtrace.units import format_bytes, format_count

_ROWS = 40


def render_timeline(analysis: Analysis, curves: Curves, width: int = 80) -> Iterator[Text]:
    """At most 40 rows, each the event with most allocated memory of an equal share of the events."""
    edges = np.unique(np.linspace(0, len(curves), min(_ROWS, len(curves)) + 1).astype(np.int64)).tolist()
    places = [low + int(curves.allocated_bytes[low:high].argmax()) for low, high in pairwise(edges)]
    phases = analysis.attribution.facts.phases
    spans = phases.span_of(np.array(places, dtype=np.int64) + curves.first).tolist()
    rows = [["event", "step", "phase", "allocated", "reserved"]]
    for place, span in zip(places, spans, strict=True):
        step = int(phases.step[span]) if span >= 0 else -1
        phase = Phase(int(phases.phase[span])).label if span >= 0 else ""
        sizes = (int(curves.allocated_bytes[place]), int(curves.reserved_bytes[place]))
        event = format_count(curves.first + place)
        rows.append([event, str(step) if step >= 0 else "", phase, *map(format_bytes, sizes)])
    head, *lines = columns(rows, (True, True, False, True, True))
    room = max(width - max(map(len, lines)) - 4, 8)
    highest = max(int(curves.allocated_bytes.max()), 1)
    peak = int(curves.allocated_bytes.argmax())
    yield heading(head)
    for place, line in zip(places, lines, strict=True):
        share = int(curves.allocated_bytes[place]) / highest
        yield Text.assemble(f"{line}  ", (bar(share, room), STYLE["activations"]), " ←" if place == peak else "")
    yield Text()
    yield Text(f"each row is the highest moment of its part of {format_count(len(curves))} events; by category:")
    yield Text("--format csv prints all of them, --points N fewer, --plot OUT.svg draws them")
