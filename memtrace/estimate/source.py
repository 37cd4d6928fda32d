"""Who re-enacts a run: the shape engine here, or a dry run of the real code (``dryrun/source.py``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.stream import Stream
from memtrace.estimate.terms import TERMS, term_name


class StreamSource(Protocol):
    """Where a stream of allocations comes from."""

    @property
    def basis(self) -> str:
        """``shape engine`` or ``dry run``."""
        ...

    @property
    def model(self) -> dict[str, Any]:
        """The model, for people and programs: at least ``name`` and ``parameters``."""
        ...

    @property
    def shallow_layers(self) -> int:
        """How many layers a model needs in which every kind of layer occurs."""
        ...

    def products(self, options: RunOptions) -> set[tuple[int, int]]:
        """(outputs, inputs) of 4-bit products, whose kernel depends on the rows; a dry run knows them once it ran."""
        ...

    def stream(self, options: RunOptions, device: KernelDevice, layers: int | None = None, steps: int = 2) -> Stream:
        """Loading and ``steps`` training steps; of a model with fewer ``layers`` where that is asked for."""
        ...

    def term(self, stream: Stream, index: int) -> tuple[str, str | None]:
        """Which term of the budget an allocation belongs to, and the term's formula (None: its tensors' sizes)."""
        ...

    def notes(self, options: RunOptions, stream: Stream) -> list[str]:
        """What this source rests on."""
        ...


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
