"""A dry run as a source of streams, and its run as a snapshot with real stacks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memtrace.errors import UsageError
from memtrace.estimate.dryrun.outcome import Recorded
from memtrace.estimate.dryrun.stacks import Frames
from memtrace.estimate.dryrun.worker import dry_run
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.estimate import Estimate
from memtrace.estimate.options import RunOptions
from memtrace.estimate.predicted import SnapshotWriter, document, plain
from memtrace.estimate.presets import named_config
from memtrace.estimate.shapes import refuse_absurd
from memtrace.estimate.stream import Stream

_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


class DryRunSource:
    """The real code of ``architecture`` (keys of a ``config.json``) on tensors without data. Streams take seconds."""

    basis = "dry run"

    def __init__(self, name: str, architecture: dict[str, Any]) -> None:
        self.name = name
        self.architecture = architecture
        self.recorded: Recorded | None = None  # of the model in full depth
        self._products: set[tuple[int, int]] = set()

    @property
    def model(self) -> dict[str, Any]:
        """Name, type and, once it has run, parameters."""
        found = {"name": self.name, "model_type": self.architecture.get("model_type")}
        if self.recorded is not None:
            found |= {"parameters": self.recorded.parameters, "trainable_parameters": self.recorded.trainable}
        return found

    @property
    def shallow_layers(self) -> int:
        """Two, or up to the first layer of the kind that comes last."""
        kinds: list[str] = next((value for key, value in self.architecture.items() if _tells_kinds(key, value)), [])
        return max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])

    def products(self, options: RunOptions) -> set[tuple[int, int]]:
        """Those that ran."""
        return self._products

    def stream(self, options: RunOptions, device: KernelDevice, layers: int | None = None, steps: int = 2) -> Stream:
        """Load and train. Raises UsageError, NoAnswerError as :func:`dry_run` does."""
        architecture = self.architecture if layers is None else with_layers(self.architecture, layers)
        found = dry_run(architecture, options, device, steps)
        self._products |= found.products
        if layers is None:
            self.recorded = found
        return found.stream

    def term(self, stream: Stream, index: int) -> tuple[str, str | None]:
        """Module and operator; the formula is the number and size of the tensors."""
        return f"{stream.sites[index] or 'model'}: {stream.ops[index]}", None

    def notes(self, options: RunOptions, stream: Stream) -> list[str]:
        """What a dry run is."""
        assumed = self.recorded.assumed if self.recorded is not None else []
        return [
            "a dry run: the real model code on tensors without data; CUDA's own buffers are imitated",
            *(f"assumed: {said}" for said in assumed),
        ]


class _Writer(SnapshotWriter):
    """A snapshot with the stacks that were seen."""

    def __init__(self, found: Estimate, recorded: Recorded) -> None:
        super().__init__(found.stream, found.placement, str(found.model["model_type"] or ""))
        self._found = recorded

    def stack(self, index: int, phase: str) -> Frames:
        """The real stack."""
        return self._found.stacks[self._found.stack_of[index]]


def snapshot(found: Estimate) -> dict[str, Any]:
    """The dry run as PyTorch's ``_snapshot()`` would return it, marked as predicted."""
    source = found.source
    assert isinstance(source, DryRunSource) and source.recorded is not None  # it was run for the estimate
    config = {"model": plain(source.architecture), "options": plain(asdict(found.options)), "dry_run": True}
    return document(_Writer(found, source.recorded), found.gpu, config)


def dry_source(model: str) -> DryRunSource:
    """The dry run of a preset, a ``config.json`` or the folder it lies in. Raises UsageError, and SnapshotError for
    what can't be read.
    """
    name, keys, where = named_config(model)
    if "model_type" not in keys:
        raise UsageError(f"{where}: not a model configuration: it has no model_type")
    refuse_absurd(keys, where)
    return DryRunSource(name, keys)


def with_layers(architecture: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same architecture with fewer layers."""
    fewer = {
        key: min(value, layers) for key, value in architecture.items() if key in _DEPTHS and isinstance(value, int)
    }
    kinds = {key: value[:layers] for key, value in architecture.items() if _tells_kinds(key, value)}
    return architecture | fewer | kinds


def _tells_kinds(key: str, value: object) -> bool:
    return key.endswith("layer_types") and isinstance(value, list)
