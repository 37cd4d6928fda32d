"""How many layers the trained model has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.attribution.categories import Purpose

I8 = NDArray[np.int64]
_MATRIX_BYTES = 16 << 10
_LEAST_LAYERS = 4


def layer_count(analysis: Analysis) -> int | None:
    """Number of repeated layers of the trained model, from how often each size occurs among its parameters.

    Adapters decide where there are any, since a reference model has none; else the stored weights. None if no number
    of at least four divides (nearly) all occurrences.
    """
    attribution, table = analysis.attribution, analysis.timeline.allocations
    stays = table.free_requested_event < 0
    for purposes in ((Purpose.PARAMS,), (Purpose.QUANTIZED, Purpose.UNQUANTIZED)):
        rows = attribution.rows_of(*purposes) & stays & (table.requested_bytes >= _MATRIX_BYTES)
        sizes, counts = np.unique(table.requested_bytes[rows], return_counts=True)
        often = counts >= _LEAST_LAYERS
        sizes, counts = sizes[often], counts[often]
        if not len(sizes):
            continue
        weight = sizes * counts
        for layers in range(int(counts.min()), _LEAST_LAYERS - 1, -1):
            if weight[counts % layers == 0].sum() >= 0.9 * weight.sum():
                return layers
    return None
