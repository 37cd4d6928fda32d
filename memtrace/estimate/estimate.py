"""The budget before the run, from the shape engine: a prediction with terms, the affine form and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.attribution.categories import Purpose
from memtrace.estimate.affine import Affine, affine_form
from memtrace.estimate.bounds import check_options, check_rank
from memtrace.estimate.engine.step import Stream, simulate_run
from memtrace.estimate.options import RunOptions
from memtrace.estimate.prediction import PHASES, Prediction, Term, general_warnings, kernels_of, predict
from memtrace.estimate.presets import GpuPreset
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.terms import TERMS, term_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Prediction):
    """A predicted run. ``terms`` sum to the requested bytes at the peak. ``margin_over_next_bytes``: by how much the
    phase of the peak wins over the next highest.
    """

    shape: ModelShape
    next_phase: str
    margin_over_next_bytes: int
    terms: tuple[Term, ...]
    affine: Affine
    warnings: tuple[str, ...]


def estimate(
    shape: ModelShape, options: RunOptions, gpu: GpuPreset | None = None, capacity_bytes: int | None = None
) -> Estimate:
    """Predict the run of ``shape`` under ``options`` on ``gpu`` (default: kernels of an H200, capacity 24 GiB).

    Raises UsageError for numbers that no real run reaches.
    """
    check_options(options)
    check_rank(options, shape)
    device = kernels_of(gpu).device
    stream = simulate_run(shape, options, device)
    found = predict(stream, options, gpu, capacity_bytes)
    order = sorted(found.phases.keys() & set(PHASES), key=lambda name: -found.phases[name].allocated_bytes)
    runner_up = order[min(1, len(order) - 1)]
    live = found.live()
    return Estimate(
        **found.parts(),
        shape=shape,
        next_phase=runner_up,
        margin_over_next_bytes=found.phases[order[0]].allocated_bytes - found.phases[runner_up].allocated_bytes,
        terms=_terms(stream, live, shape.layers - 1),
        affine=affine_form(shape, options, device, stream, live),
        warnings=_warnings(shape, options, gpu, stream),
    )


def _terms(stream: Stream, live: list[int], last_layer: int) -> tuple[Term, ...]:
    """Live bytes by term and category, largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for index in live:
        label = stream.labels[index]
        name = term_name(label, stream.ops[index], stream.sites[index], stream.layers[index], last_layer)
        if label == Purpose.RECOMPUTE:
            name = f"recomputed layer: {name}"
        entry = found.setdefault((name, label.partition("/")[0]), [0, 0])
        entry[0] += stream.sizes[index]
        entry[1] += 1
    terms = [
        Term(name, size, TERMS[name.removeprefix("recomputed layer: ")], category, count)
        for (name, category), (size, count) in found.items()
    ]
    return tuple(sorted(terms, key=lambda term: (-term.bytes, term.name)))


def _warnings(shape: ModelShape, options: RunOptions, gpu: GpuPreset | None, stream: Stream) -> tuple[str, ...]:
    """What in this estimate rests on source code only, or on an assumption."""
    notes, outside = general_warnings(options, gpu, stream)
    if stream.kernel == "flash":
        notes.append("buffers of flash attention are taken from its source, not measured")
    if options.loss == "chunked":
        notes.append(f"chunked loss: {options.chunk_tokens} tokens a chunk, each chunk checkpointed")
    window = shape.sliding_window
    if window is not None and options.sequence >= window and options.attention != "flash":
        notes.append(f"sequence as long as the sliding window of {window} or longer: the mask's cost is not measured")
    return (*notes, *outside)
