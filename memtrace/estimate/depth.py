"""The peak of a deep model from two shallow ones."""

from __future__ import annotations

from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.options import RunOptions
from memtrace.estimate.source import ShapeSource
from memtrace.estimate.stream import EMPTY_CACHE, Stream

_EXTRAPOLATED = ("inputs", "optimizer", "zero_grad")  # one loop over all layers: only their highest point counts


def requested_peak(source: ShapeSource, options: RunOptions, device: KernelDevice) -> int:
    """Highest requested bytes of a training step, the second one (loading is left out), exactly, in little time.

    Between two models that differ only in depth, each point of the step in the first two layers, the last layer or
    outside the layers differs by a fixed number of bytes a layer, and a peak is never in a middle layer only: what is
    held grows or shrinks steadily with the layers. The second layer counts for itself: where the embeddings need no
    gradient, the first layer's backward passes none on, and the second is the last that holds one. So two shallow runs
    give the peak of any depth.
    """
    shape = source.shape
    small = 4 if shape.layers % 2 == 0 else 3  # keeps the parity of alternating layers
    large = small + 2
    if shape.layers <= large:
        return max(_points(source.stream(options, device), shape.layers))
    runs = [source.stream(options, device, layers=layers) for layers in (small, large)]
    low, high = _points(runs[0], small), _points(runs[1], large)
    extra = shape.layers - small
    return max(a + (b - a) * extra // (large - small) for a, b in zip(low, high, strict=True))


def _points(stream: Stream, layers: int) -> list[int]:
    """Live bytes after each allocation of the last step outside middle layers; one maximum for some phases."""
    last_step = max(mark.step for mark in stream.marks)
    marks = {mark.event: mark for mark in stream.marks}
    current, counting, single = 0, False, False
    points: list[int] = []
    best = 0
    sizes, where = stream.sizes, stream.layers
    for event, entry in enumerate(stream.events):
        mark = marks.get(event)
        if mark is not None:
            if single:
                points.append(best)
            counting = mark.step == last_step and mark.name != "end"
            single, best = counting and mark.name in _EXTRAPOLATED, 0
        if entry < 0:
            current -= sizes[~entry]
        elif entry < EMPTY_CACHE:
            current += sizes[entry]
            if single:
                best = max(best, current)
            elif counting and where[entry] in (-1, 0, 1, layers - 1):
                points.append(current)
    return points
