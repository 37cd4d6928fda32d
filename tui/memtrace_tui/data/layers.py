"""Which layer of the model an allocation belongs to, where the recording tells it: by the name of the parameter that
memtrace's recorder stored with it, or by the order of calls in a pass."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

import numpy as np

from memtrace.attribution.categories import Category
from memtrace.attribution.labels import labelled_rows
from memtrace.attribution.phases import Phase
from memtrace.explain.dims import layer_count
from memtrace.snapshot.model import I8
from memtrace_tui.provider import Provider

_LEAST_LAYERS, _LEAST_SITES = 4, 6  # that must have the same rhythm
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")  # of model.layers.31.mlp.up_proj.weight


@lru_cache(4)
def layer_of_rows(provider: Provider) -> I8:
    """Layer of each row of the allocation table, from 0; -1 where nothing tells it.

    In a forward pass a call site of the layers' code is reached as often as there are layers, or a multiple of that,
    so its n-th allocation says the layer. A backward pass that runs layers again goes from the last to the first.
    Where the call sites don't agree on one order (an encoder beside a decoder), or a pass may have begun before the
    recording did, no layer is told.
    """
    timeline, phases = provider.timeline, provider.analysis.attribution.facts.phases
    born, stack = timeline.allocations.alloc_event, timeline.allocations.stack.astype(np.int64)
    order = np.argsort(born, kind="stable")
    edges = np.searchsorted(born[order], phases.start)
    passes = []
    for i, phase in enumerate(phases.phase.tolist()):
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            rows = order[edges[i] : edges[i + 1]]
            rows = rows[stack[rows] >= 0]
            passes.append((phase == Phase.FORWARD, rows, *_by_order(stack[rows])))
    forward = [layers for is_forward, _, layers, _ in passes if is_forward][int((born < 0).any()) :]
    known = layer_count(provider.analysis) or max(Counter(forward).items(), key=lambda item: item[1], default=(0, 0))[0]
    found = np.full(len(born), -1, dtype=np.int64)
    for number, (is_forward, rows, layers, told) in enumerate(passes):
        is_last = not any(later for later, *_ in passes[number + 1 :])
        if layers == known > 0 or (0 < layers < known and is_forward and is_last):  # the last may have been cut short
            found[rows] = told if is_forward else np.where(told < 0, -1, known - 1 - told)
    found[provider.analysis.attribution.rows_of(Category.RUNTIME)] = -1  # workspaces serve all layers
    for label, _, rows in labelled_rows(timeline):
        name = _NUMBER.search(str(label.get("name")))
        if name is not None:
            found[rows] = int(name[1])
    return found


def _by_order(sites: I8) -> tuple[int, I8]:
    """(how many layers a pass ran, which of them each of its allocations is of, in the order of the pass, -1 for none),
    from the call sites of its allocations; 0 layers where no order is told."""
    told = np.full(len(sites), -1, dtype=np.int64)
    order = np.argsort(sites, kind="stable")
    places = np.split(order, np.flatnonzero(np.diff(sites[order])) + 1)
    rhythms = [_rhythm(place) for place in places]
    often = Counter(rhythm for rhythm in rhythms if rhythm[0] >= _LEAST_LAYERS)
    (layers, gap), alike = max(often.items(), key=lambda item: item[1], default=((0, 0.0), 0))
    if alike < _LEAST_SITES:
        return 0, told
    for place, rhythm in zip(places, rhythms, strict=True):  # what each layer does once
        if rhythm == (layers, gap):
            told[place] = np.arange(layers)
    before, after = _around(told, layers)
    if (before > after).any():
        return 0, told
    # A pass that ended within its last layer did not get to all of it.
    is_cut = len(sites) - int(np.flatnonzero(told == layers - 1)[0]) < gap
    for place in places:  # what each layer does several times
        times = next((len(place) // n for n in (layers, layers - is_cut) if len(place) % n == 0), 0)
        number = np.arange(len(place)) // max(times, 1)
        if times and ((number >= before[place]) & (number <= after[place])).all():
            told[place] = number
    before, after = _around(told, layers)
    return layers, np.where((told < 0) & (before == after), before, told)


def _rhythm(place: I8) -> tuple[int, float]:
    """How often a site was reached, and the median gap between; numpy's median takes ten times as long for so few."""
    gaps = sorted(np.diff(place).tolist()) or [0]
    return len(place), (gaps[(len(gaps) - 1) // 2] + gaps[len(gaps) // 2]) / 2


def _around(told: I8, layers: int) -> tuple[I8, I8]:
    """The nearest layer that is told before each place (-1: none), and after it."""
    after = np.minimum.accumulate(np.where(told < 0, layers, told)[::-1])[::-1]
    return np.maximum.accumulate(told), after
