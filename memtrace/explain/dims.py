"""Dimensions that sizes give away: tokens of a pass, bytes a token of the residual stream, layers of the model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memtrace.analysis import Analysis
from memtrace.arrays import distinct
from memtrace.attribution.categories import Purpose
from memtrace.explain.process_facts import layers_by_name
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I8, Snapshot

_VECTOR_BYTES = 64 << 10
_MATRIX_BYTES = 16 << 10
_LEAST_LAYERS = 4
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


@dataclass(frozen=True, slots=True)
class Dims:
    """What a pass worked on. ``hidden_bytes``: the residual stream, all tokens. ``element_bytes``: of the stream, where
    the sizes of head, logits and stream leave no choice."""

    tokens: int
    hidden_bytes: int
    element_bytes: int | None
    logits_bytes: int | None
    head_bytes: int | None


def dims_of(analysis: Analysis, low: int, high: int) -> Dims | None:
    """Dimensions of the pass between two events; None where its embedding output or the norms can't be found.

    The stream is the embedding's output, ``tokens x width`` elements; norm weights, the small vectors with most
    bytes among the stored weights, have ``width`` elements of (nearly always) the same type: their ratio is the tokens.
    """
    attribution, table = analysis.attribution, analysis.timeline.allocations
    facts = attribution.facts
    inside = (facts.born >= low) & (facts.born < high)
    embedded = table.requested_bytes[inside & attribution.serving("embedding")]
    stored = (Purpose.UNQUANTIZED,) if attribution.trains_adapters else (Purpose.UNQUANTIZED, Purpose.PARAMS)
    weights = table.requested_bytes[attribution.rows_of(*stored) & facts.stays]
    vectors, counts = np.unique(weights[weights <= _VECTOR_BYTES], return_counts=True)
    if not len(embedded) or not len(vectors):
        return None
    hidden = int(embedded.max())
    by_bytes = [int(vectors[i]) for i in np.argsort(-vectors * counts, kind="stable")]
    candidates = [vector for vector in by_bytes if vector >= 64 and hidden % vector == 0]
    if not candidates:
        return None
    tokens = hidden // candidates[0]
    logits = table.requested_bytes[inside & attribution.rows_of(Purpose.LOGITS) & attribution.serving("head")]
    if not len(logits):
        return Dims(tokens, hidden, None, None, None)
    largest = int(logits.max())
    for vector in candidates:
        element, head = _element(largest, hidden, hidden // vector, weights)
        if element is not None:
            return Dims(hidden // vector, hidden, element, largest, head)
    return Dims(tokens, hidden, None, largest, None)


def _element(logits_bytes: int, hidden_bytes: int, tokens: int, weights: I8) -> tuple[int | None, int | None]:
    """(bytes an element, bytes of the head's weight): tokens^2 = logits x stream / (head x element)."""
    fits = set()
    for head in distinct(weights[weights > _VECTOR_BYTES]).tolist():
        for element in (2, 4):
            square, rest = divmod(logits_bytes * hidden_bytes, head * element)
            if rest == 0 and square == tokens * tokens:
                fits.add((element, head))
    return fits.pop() if len(fits) == 1 else (None, None)


def layer_count(analysis: Analysis) -> int | None:
    """By the model's configuration or the names of parameters, where memtrace's recorder stored them; else by how often
    the stored matrices repeat in the order they were made. None where nothing repeats."""
    if (recorded := _recorded_layers(analysis.timeline.snapshot)) is not None:
        return recorded
    table, attribution = analysis.timeline.allocations, analysis.attribution
    # Blocks from before the trace stand in order of address, which says nothing of the order they were made in.
    made = (table.free_requested_event < 0) & (attribution.facts.born >= 0) & (table.requested_bytes >= _MATRIX_BYTES)
    for purposes in ((Purpose.PARAMS,), (Purpose.QUANTIZED, Purpose.UNQUANTIZED), (Purpose.QUANTIZED,)):
        if (found := _repeats(table.requested_bytes[attribution.rows_of(*purposes) & made])) is not None:
            return found
    return None


def _recorded_layers(snapshot: Snapshot) -> int | None:
    """The number that the recorded configuration or labels give."""
    models = snapshot.config.get("models")
    for model in models if isinstance(models, list) else []:
        settings = model.get("config") if isinstance(model, Mapping) else None
        if isinstance(settings, Mapping):
            text = settings.get("text_config")
            for source in (settings, text if isinstance(text, Mapping) else {}):
                for key in _LAYER_KEYS:
                    if isinstance(source.get(key), int) and source[key] > 0:
                        return int(source[key])
    return layers_by_name([str(row.get("name") or "") for row in snapshot.labels])


def _repeats(sizes: I8) -> int | None:
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
        is_pattern = len(distinct(sizes[start : start + length])) > 1
        if is_pattern and covered > best and covered // length >= _LEAST_LAYERS:
            best, times = covered, covered // length
    return times
