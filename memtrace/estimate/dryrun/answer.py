"""A dry run's answer: peaks by phase, categories, terms, fits or not; as data, JSON, text and snapshot."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memtrace.attribution.categories import Purpose
from memtrace.estimate.affine import Affine, affine_of
from memtrace.estimate.against import Against
from memtrace.estimate.answer import against_json, prediction_json
from memtrace.estimate.bounds import check_options
from memtrace.estimate.dryrun.build import with_layers
from memtrace.estimate.dryrun.run import Recorded, dry_run
from memtrace.estimate.dryrun.stacks import Frames
from memtrace.estimate.engine.step import Stream
from memtrace.estimate.options import RunOptions
from memtrace.estimate.predicted import SnapshotWriter, document, plain
from memtrace.estimate.prediction import Prediction, Term, general_warnings, kernels_of, predict
from memtrace.estimate.presets import GpuPreset
from memtrace.estimate.text import WIDTH, category_lines, phase_lines
from memtrace.units import format_bytes

_SHALLOW_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(Prediction):
    """What a dry run found."""

    model: str
    architecture: dict[str, Any]
    parameters: int
    trainable: int
    terms: tuple[Term, ...]
    affine: Affine
    warnings: tuple[str, ...]
    recorded: Recorded = field(repr=False)


def examine(
    model: str,
    architecture: dict[str, Any],
    options: RunOptions,
    gpu: GpuPreset | None = None,
    capacity_bytes: int | None = None,
) -> DryRun:
    """Dry-run ``architecture`` and read the result. Raises UsageError, NoAnswerError as :func:`dry_run` does."""
    check_options(options)
    card = kernels_of(gpu)
    recorded = dry_run(architecture, options, card.device)
    found = predict(recorded.stream, options, gpu, capacity_bytes)
    live = found.live()
    return DryRun(
        **found.parts(),
        model=model,
        architecture=architecture,
        parameters=recorded.parameters,
        trainable=recorded.trainable,
        terms=_terms(recorded.stream, live),
        affine=_affine(architecture, options, card, recorded.stream, live),
        warnings=_warnings(options, gpu, recorded.stream),
        recorded=recorded,
    )


def _terms(stream: Stream, live: list[int]) -> tuple[Term, ...]:
    """Live bytes by module, operator and category; the formula is the number and size of the tensors."""
    found: dict[tuple[str, str], list[int]] = {}
    for index in live:
        name = f"{stream.sites[index] or 'model'}: {stream.ops[index]}"
        if stream.labels[index] == Purpose.RECOMPUTE:
            name = f"recomputed layer: {name}"
        found.setdefault((name, stream.labels[index].partition("/")[0]), []).append(stream.sizes[index])
    terms = [
        Term(name, sum(sizes), _sizes_text(sizes), category, len(sizes)) for (name, category), sizes in found.items()
    ]
    return tuple(sorted(terms, key=lambda term: (-term.bytes, term.name)))


def _sizes_text(sizes: list[int]) -> str:
    if len(set(sizes)) == 1:
        return f"{len(sizes)} × {sizes[0]:,} B"
    return f"{len(sizes)} tensors of {min(sizes):,} to {max(sizes):,} B"


def _affine(
    architecture: dict[str, Any], options: RunOptions, card: GpuPreset, stream: Stream, live: list[int]
) -> Affine:
    small = with_layers(architecture, _SHALLOW_LAYERS)
    fixed = replace(card.device, product_rows=options.tokens)
    runs = [
        dry_run(small, replace(options, sequence=times * options.sequence), fixed).stream for times in (1, 2, 3)
    ]  # fmt: skip
    return affine_of(stream, live, runs, options.tokens)


def _warnings(options: RunOptions, gpu: GpuPreset | None, stream: Stream) -> tuple[str, ...]:
    card, outside = general_warnings(options, gpu, stream)
    what = "a dry run: the real model code on tensors without data; CUDA's own buffers are imitated"
    return (what, *card, *outside)


def as_json(found: DryRun, against: Against | None) -> dict[str, Any]:
    """The keys of ``memtrace estimate --json``."""
    model = {"name": found.model, "model_type": found.architecture.get("model_type")}
    return {
        "model": model | {"parameters": found.parameters, "trainable_parameters": found.trainable},
        **prediction_json(found),
        "terms": [asdict(term) for term in found.terms],
        "affine": asdict(found.affine),
        "against": against_json(against),
        "warnings": list(found.warnings),
    }


def render(found: DryRun) -> Iterator[str]:
    """Lines of at most 80 columns."""
    fit = found.fit
    yield f"{found.model}, {found.parameters / 1e9:.2f} billion parameters, dry run of the real code"
    room = f"{format_bytes(fit.device_bytes)} of {format_bytes(fit.capacity_bytes)}"
    if fit.fits:
        yield f"FITS: needs {room}, {format_bytes(fit.margin_bytes)} to spare."
    elif fit.fits_when_flushed:
        yield f"FITS, BARELY: left alone it would reserve {room}; cached segments are given back."
    else:
        yield f"DOES NOT FIT: needs {room}, {format_bytes(-fit.margin_bytes)} too much."
    yield from textwrap.wrap(f"The peak is in the {found.peak_phase} ({found.peak_site}).", WIDTH)
    yield ""
    yield from phase_lines(found)
    yield ""
    yield from category_lines(found)
    yield ""
    yield "largest terms"
    for term in found.terms[:12]:
        yield f"  {format_bytes(term.bytes):>10}  {term.name[:38]:<38}  {term.formula}"[:WIDTH]
    for note in found.warnings:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")


class _Writer(SnapshotWriter):
    """A snapshot with the stacks that were seen."""

    def __init__(self, found: DryRun) -> None:
        super().__init__(found.stream, found.placement, str(found.architecture.get("model_type", "")))
        self._found = found.recorded
        self._loader: dict[int, Frames] = {}

    def stack(self, index: int, phase: str) -> Frames:
        """The real stack; loading has the loader's function below it."""
        number = self._found.stack_of[index]
        if phase != "load":
            return self._found.stacks[number]
        known = self._loader.get(number)
        if known is None:
            root = {"filename": "transformers/modeling_utils.py", "line": 0, "name": "from_pretrained"}
            known = self._loader[number] = [*self._found.stacks[number], root]
        return known


def snapshot(found: DryRun) -> dict[str, Any]:
    """The dry run as PyTorch's ``_snapshot()`` would return it, marked as predicted."""
    config = {"model": plain(found.architecture), "options": plain(asdict(found.options)), "dry_run": True}
    return document(_Writer(found), found, found.gpu, config)
