"""Sizes of published models: what a request for a whole model may have been."""

from __future__ import annotations

from memtrace.estimate.presets import model_names, model_preset


def published_model(low_bytes: float, high_bytes: float) -> tuple[str, int] | None:
    """(preset, bits) of a model whose weights have a size in that range: 16 or 32 bits throughout, or 4 bits an element
    of the linear layers and 16 of the rest, as a loader counts them. None if no model or several do."""
    found = set()
    for name in model_names():
        shape = model_preset(name)
        linear = shape.linear_parameters
        four = linear // 2 + 2 * (shape.parameters - linear)
        for bits, expected in ((16, 2 * shape.parameters), (32, 4 * shape.parameters), (4, four)):
            if low_bytes <= expected <= high_bytes:
                found.add((name, bits))
    return found.pop() if len(found) == 1 else None
