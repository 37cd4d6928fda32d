"""How many layers the trained model has: as the recording says, or as its parameters repeat."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memtrace.analysis import Analysis
from memtrace.attribution.categories import Purpose
from memtrace.explain.process_facts import layers_by_name
from memtrace.snapshot.model import I8, Snapshot

_MATRIX_BYTES = 16 << 10
_LEAST_LAYERS = 4
_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def layer_count(analysis: Analysis) -> int | None:
    """By the model's configuration or the names of parameters, where memtrace's recorder stored them; else by how often
    the stored matrices repeat in the order they were made. None where nothing repeats."""
    recorded = recorded_layers(analysis.timeline.snapshot)
    if recorded is not None:
        return recorded
    table, attribution = analysis.timeline.allocations, analysis.attribution
    # Blocks from before the trace stand in order of address, which says nothing of the order they were made in.
    made = (table.free_requested_event < 0) & (attribution.facts.born >= 0) & (table.requested_bytes >= _MATRIX_BYTES)
    for purposes in ((Purpose.PARAMS,), (Purpose.QUANTIZED, Purpose.UNQUANTIZED), (Purpose.QUANTIZED,)):
        found = repeats(table.requested_bytes[attribution.rows_of(*purposes) & made])
        if found is not None:
            return found
    return None


def recorded_layers(snapshot: Snapshot) -> int | None:
    """The number that the recorded configuration or labels give."""
    config = snapshot.memtrace.get("config")
    models = config.get("models") if isinstance(config, Mapping) else None
    for model in models if isinstance(models, list) else []:
        settings = model.get("config") if isinstance(model, Mapping) else None
        if isinstance(settings, Mapping):
            text = settings.get("text_config")
            for source in (settings, text if isinstance(text, Mapping) else {}):
                for key in _KEYS:
                    if isinstance(source.get(key), int) and source[key] > 0:
                        return int(source[key])
    labels = snapshot.memtrace.get("labels")
    names = (
        [str(row.get("name") or "") for row in labels if isinstance(row, Mapping)] if isinstance(labels, list) else []
    )
    return layers_by_name(names)


def repeats(sizes: I8) -> int | None:
    """How many times a pattern of several sizes stands in a row, in the longest such stretch; None below four times.

    One size over and over is not a pattern: it would be one a matrix, not one a layer.
    """
    best, times = 0, None
    for length in range(2, len(sizes) // _LEAST_LAYERS + 1):
        same = np.concatenate([[False], sizes[length:] == sizes[:-length], [False]])
        edges = np.flatnonzero(np.diff(same.astype(np.int8)))
        runs = edges[1::2] - edges[::2]
        if not len(runs):
            continue
        longest = int(runs.argmax())
        start, covered = int(edges[2 * longest]), int(runs[longest]) + length
        is_pattern = len(np.unique(sizes[start : start + length])) > 1
        if is_pattern and covered > best and covered // length >= _LEAST_LAYERS:
            best, times = covered, covered // length
    return times
