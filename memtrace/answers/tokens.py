"""How many tokens a stretch of a recording worked on, read off the embedding's output and the norms' weights."""

from __future__ import annotations

import numpy as np

from memtrace.analysis import Analysis
from memtrace.arrays import among
from memtrace.attribution.categories import Category

_VECTOR_BYTES, _LEAST_VECTORS = (512, 64 << 10), 4


def vector_bytes(analysis: Analysis, first_pass: int) -> list[int]:
    """Sizes of small vectors that were there before the first pass and stay, at least one a layer, those with most
    bytes first: the norms' weights, whatever they were taken for. Sizes that adapters have are left out if others are
    left."""
    facts, size = analysis.attribution.facts, analysis.timeline.allocations.requested_bytes
    small = (size >= _VECTOR_BYTES[0]) & (size <= _VECTOR_BYTES[1]) & facts.stays & (facts.born < first_pass)
    frozen = small & ~among(size, size[analysis.attribution.rows_of(Category.LORA)])
    vectors, counts = np.unique(size[frozen if frozen.any() else small], return_counts=True)
    vectors, counts = vectors[counts >= _LEAST_VECTORS], counts[counts >= _LEAST_VECTORS]
    return [int(vectors[i]) for i in np.argsort(-vectors * counts, kind="stable")]


def tokens_of(analysis: Analysis, low: int, high: int, vectors: list[int]) -> int | None:
    """Tokens of the largest pass between two events; None where nothing tells. See :func:`vector_bytes`."""
    facts, table = analysis.attribution.facts, analysis.timeline.allocations
    rows = np.flatnonzero((facts.born >= low) & (facts.born < high))
    module = np.array([*analysis.attribution.sites.module, ""], dtype=object)[table.stack[rows]]
    embedded = table.requested_bytes[rows[module == "embedding"]]
    if not len(embedded):
        return None
    largest = int(embedded.max())
    return next((largest // vector for vector in vectors if largest % vector == 0), None)
