"""Dimensions that sizes give away: tokens of a pass, bytes a token of the residual stream, width of a logits row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.attribution.categories import Purpose

I8 = NDArray[np.int64]
_VECTOR_BYTES = 64 << 10


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
    facts, table = analysis.attribution.facts, analysis.timeline.allocations
    inside = (facts.born >= low) & (facts.born < high)
    module = np.array([*analysis.attribution.sites.module, ""], dtype=object)[table.stack]
    embedded = table.requested_bytes[inside & (module == "embedding")]
    weights = table.requested_bytes[analysis.attribution.rows_of(Purpose.UNQUANTIZED) & facts.stays]
    vectors, counts = np.unique(weights[weights <= _VECTOR_BYTES], return_counts=True)
    if not len(embedded) or not len(vectors):
        return None
    hidden = int(embedded.max())
    by_bytes = [int(vectors[i]) for i in np.argsort(-vectors * counts, kind="stable")]
    candidates = [vector for vector in by_bytes if vector >= 64 and hidden % vector == 0]
    if not candidates:
        return None
    tokens = hidden // candidates[0]
    logits = table.requested_bytes[inside & analysis.attribution.rows_of(Purpose.LOGITS) & (module == "head")]
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
    for head in np.unique(weights[weights > _VECTOR_BYTES]).tolist():
        for element in (2, 4):
            square, rest = divmod(logits_bytes * hidden_bytes, head * element)
            if rest == 0 and square == tokens * tokens:
                fits.add((element, head))
    return fits.pop() if len(fits) == 1 else (None, None)
