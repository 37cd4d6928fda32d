"""Who re-enacts a run: the shape engine here, or a dry run of the real code (``dryrun/source.py``)."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Protocol

from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.stream import EMPTY_CACHE, Stream
from memtrace.estimate.terms import TERMS, term_name
from memtrace.frozen import dataclass

_EXTRAPOLATED = ("inputs", "optimizer", "zero_grad")  # one loop over all layers: only their highest point counts


class StreamSource(Protocol):
    """Where a stream of allocations comes from."""

    @property
    def basis(self) -> str:
        """``shape engine`` or ``dry run``."""

    @property
    def model(self) -> dict[str, Any]:
        """The model, for people and programs: at least ``name`` and ``parameters``."""

    @property
    def shallow_layers(self) -> int:
        """How many layers a model needs in which every kind of layer occurs."""

    def products(self, options: RunOptions) -> set[tuple[int, int]]:
        """(outputs, inputs) of 4-bit products, whose kernel depends on the rows; a dry run knows them once it ran."""

    def stream(self, options: RunOptions, device: KernelDevice, layers: int | None = None, steps: int = 2) -> Stream:
        """Loading and ``steps`` training steps; of a model with fewer ``layers`` where that is asked for."""

    def term(self, stream: Stream, index: int) -> tuple[str, str | None]:
        """Which term of the budget an allocation belongs to, and the term's formula (None: its tensors' sizes)."""

    def notes(self, options: RunOptions, stream: Stream) -> list[str]:
        """What this source rests on."""


@dataclass(frozen=True, slots=True)
class ShapeSource:
    """The shape engine on the numbers of a known family: milliseconds, without PyTorch."""

    shape: ModelShape
    basis: str = "shape engine"
    shallow_layers: int = 2

    def products(self, options: RunOptions) -> set[tuple[int, int]]:
        """Every linear layer's, where the weights are 4-bit."""
        quantized = options.quant.startswith("nf4")
        return {(outputs, inputs) for _, inputs, outputs, _ in self.shape.linears} if quantized else set()

    @property
    def model(self) -> dict[str, Any]:
        """The shape and its parameters."""
        return asdict(self.shape) | {"parameters": self.shape.parameters}

    def stream(self, options: RunOptions, device: KernelDevice, layers: int | None = None, steps: int = 2) -> Stream:
        """Run the engine."""
        shape = self.shape if layers is None else replace(self.shape, layers=min(self.shape.layers, layers))
        return simulate_run(shape, options, device, steps)

    def requested_peak(self, options: RunOptions, device: KernelDevice) -> int:
        """Highest requested bytes of a training step, the second one (loading is left out), exactly, in little time.

        Between two models that differ only in depth, each point of the step in the first two layers, the last layer or
        outside the layers differs by a fixed number of bytes a layer, and a peak is never in a middle layer only: what
        is held grows or shrinks steadily with the layers. The second layer counts for itself: where the embeddings need
        no gradient, the first layer's backward passes none on, and the second is the last that holds one. So two
        shallow runs give the peak of any depth.
        """
        layers = self.shape.layers
        small = 4 if layers % 2 == 0 else 3  # keeps the parity of alternating layers
        if layers <= small + 2:
            return max(_points(self.stream(options, device), layers))
        low, high = (_points(self.stream(options, device, depth), depth) for depth in (small, small + 2))
        return max(a + (b - a) * (layers - small) // 2 for a, b in zip(low, high, strict=True))

    def term(self, stream: Stream, index: int) -> tuple[str, str | None]:
        """The closed formulas' terms."""
        label, op = stream.labels[index], stream.ops[index]
        name = term_name(label, op, stream.sites[index], stream.layers[index], self.shape.layers - 1)
        return name, TERMS[name]

    def notes(self, options: RunOptions, stream: Stream) -> list[str]:
        """What rests on source code only."""
        notes = []
        if stream.kernel == "flash":
            notes.append("buffers of flash attention are taken from its source, not measured")
        if options.loss == "chunked":
            notes.append(f"chunked loss: {options.chunk_tokens} tokens a chunk, each chunk checkpointed")
        window = self.shape.sliding_window
        if window is not None and options.sequence >= window and options.attention != "flash":
            notes.append(
                f"sequence as long as the sliding window of {window} or longer: the mask's cost is not measured"
            )
        return notes


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
