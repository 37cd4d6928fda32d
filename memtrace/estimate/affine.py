"""The affine form of the peak: a constant, bytes per token and per token squared, batch size fixed.

The live set of the peak is the same at neighbouring lengths, so each live tensor's size is a polynomial in the
sequence length. The polynomials come from the engine at one, two and three times the length with two layers, whose
tensors are those of any other layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memtrace.estimate.engine.kernels import Device
from memtrace.estimate.engine.step import Stream, simulate_run
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape

Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Affine:
    """requested peak = ``constant_bytes`` + ``per_token_bytes``·t + ``per_token_squared_bytes``·t².

    t counts the tokens of a micro-batch at the estimate's batch size. It holds while the same point of the step stays
    the peak. The parts are exact at the estimate's own t.
    """

    constant_bytes: int
    per_token_bytes: float
    per_token_squared_bytes: float

    def at(self, tokens: int) -> float:
        """Requested bytes at ``tokens`` tokens."""
        return self.constant_bytes + self.per_token_bytes * tokens + self.per_token_squared_bytes * tokens * tokens


def affine_form(shape: ModelShape, options: RunOptions, device: Device, stream: Stream, live: list[int]) -> Affine:
    """The affine form of the live set ``live`` of ``stream``."""
    small = replace(shape, layers=min(shape.layers, 2))
    fixed = replace(device, product_rows=options.tokens)
    runs = [
        simulate_run(small, replace(options, sequence=times * options.sequence), fixed) for times in (1, 2, 3)
    ]  # fmt: skip
    return affine_of(stream, live, runs, options.tokens)


def affine_of(stream: Stream, live: list[int], runs: Sequence[Stream], tokens: int) -> Affine:
    """The affine form of ``live``, from shallow ``runs`` at one, two and three times the length of ``stream``."""
    known: dict[Key, tuple[float, float]] = {}
    same = len({len(run.sizes) for run in runs}) == 1
    if same:
        for index, (one, two, three) in enumerate(zip(*(run.sizes for run in runs), strict=True)):
            square = (three - 2 * two + one) / 2
            known[_key(runs[0], index)] = (two - one - 3 * square, square)
    constant, linear, square = 0.0, 0.0, 0.0
    for index in live:
        size = stream.sizes[index]
        first, second = known.get(_key(stream, index), (0.0, 0.0))
        constant += size - first - second
        linear += first
        square += second
    return Affine(round(constant), linear / tokens, square / tokens**2)


def _key(stream: Stream, index: int) -> Key:
    return stream.ops[index], stream.sites[index], stream.labels[index], stream.sizes[index]
