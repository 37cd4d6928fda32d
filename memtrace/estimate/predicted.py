"""A predicted run as a snapshot in PyTorch's format, of builtin containers only, marked as predicted.

Every reader of snapshots opens it. What no recording could hold stands in the extra key ``memtrace``: the mark
``predicted``, the configuration, phase marks, and a label for every allocation.
"""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memtrace._version import __version__
from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.export import segments_of, settings_of
from memtrace.allocator.rounding import round_size, segment_size
from memtrace.allocator.whatif.addresses import SegmentEvent
from memtrace.errors import UsageError
from memtrace.estimate.cells import Cells
from memtrace.estimate.estimate import Estimate, kernels_of
from memtrace.estimate.forecast import RunPlan, whole_stream
from memtrace.estimate.placement import Placement, place
from memtrace.estimate.presets import GpuPreset
from memtrace.estimate.source import ShapeSource
from memtrace.estimate.stream import EMPTY_CACHE, Stream, StreamMark, live_at
from memtrace.writing import whole_file

START_US = 1_700_000_000_000_000  # an arbitrary moment: a predicted run has no clock, its events are 1 µs apart
Frames = list[dict[str, Any]]
_FILES = (
    ("embed_tokens", "torch/nn/functional.py", "embedding"),
    ("lm_head", "torch/nn/modules/linear.py", "forward"),
    ("loss", "transformers/loss/loss_utils.py", "ForCausalLMLoss"),
    ("from_pretrained", "transformers/modeling_utils.py", "caching_allocator_warmup"),
)


def write_document(written: dict[str, Any], path: Path) -> None:
    """Write a snapshot to ``path`` (a pickle). Raises UsageError if the file can't be written."""
    with whole_file(path) as file:
        pickle.dump(written, file, protocol=4)


def snapshot(estimate: Estimate) -> dict[str, Any]:
    """The predicted run as PyTorch's ``_snapshot()`` would return it."""
    assert isinstance(estimate.source, ShapeSource)
    shape = estimate.source.shape
    writer = SnapshotWriter(estimate.stream, estimate.placement, shape.family)
    config = {"model": asdict(shape), "options": plain(asdict(estimate.options))}
    return document(writer, estimate.gpu, config)


def forecast_snapshot(plan: RunPlan, settings: AllocatorConfig, cells: Cells) -> dict[str, Any]:
    """The forecast run as ``_snapshot()`` would return it at its end, or at the refusal. Raises UsageError."""
    if settings.expandable_segments:
        raise UsageError("--trace writes runs without expandable segments")
    stream = whole_stream(plan, cells)
    model = plan.source.model
    writer = SnapshotWriter(stream, place(stream, settings), str(model.get("family") or model.get("model_type") or ""))
    config = {"model": model, "options": plain(asdict(plan.options))}
    return document(writer, kernels_of(plan.gpu), config)


def document(writer: SnapshotWriter, gpu: GpuPreset, config: dict[str, Any]) -> dict[str, Any]:
    """The run that ``writer`` writes, in PyTorch's format, with memtrace's extra key."""
    trace, placement = writer.trace(), writer.placement
    if placement.refused_event is not None:
        trace[-1]["device_free"] = gpu.total_bytes - gpu.outside_bytes - int(placement.reserved[-1])
    return {
        "segments": writer.segments(),
        "device_traces": [trace],
        "allocator_settings": settings_of(placement.config),
        "external_annotations": writer.annotations,
        "memtrace": {
            "version": 1,
            "predicted": True,
            "by": f"memtrace {__version__}",
            "gpu": gpu.name,
            "capability": list(gpu.device.capability),
            "device_total_bytes": gpu.total_bytes,
            "limit_bytes": placement.config.limit_bytes,
            "phases": writer.phases,
            "labels": writer.labels,
            "oom": None,
            "stats": {
                f"{name}_bytes.all.peak": int(getattr(placement, name).max())
                for name in ("requested", "allocated", "reserved")
            },
            "config": config,
        },
    }


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """The same with lists instead of tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


class SnapshotWriter:
    """Turns stream events into trace entries; collects labels and phase marks on the way."""

    def __init__(self, stream: Stream, placement: Placement, family: str) -> None:
        self.stream = stream
        self.placement = placement
        self.module = f"transformers/models/{family}/modeling_{family}.py"
        self.entries: list[dict[str, Any]] = []
        self.labels: list[dict[str, Any]] = []
        self.phases: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self._frames: dict[tuple[str, str, int, str], Frames] = {}
        self._open: dict[int, dict[str, Any]] = {}

    def trace(self) -> list[dict[str, Any]]:
        """All entries of the device's trace, oldest first."""
        stream, placement = self.stream, self.placement
        marks: dict[int, list[StreamMark]] = {}
        for mark in stream.marks:
            marks.setdefault(mark.event, []).append(mark)
        growth: dict[int, list[SegmentEvent]] = {}
        for change in placement.segments:
            growth.setdefault(change.event, []).append(change)
        phase = "load"
        for event, entry in enumerate(stream.events):
            for mark in marks.get(event, ()):
                self._phase(mark, phase)
                phase = mark.name
            index = entry if entry >= 0 else ~entry
            frames = [] if entry >= EMPTY_CACHE else self.stack(index, phase)
            for segment in growth.get(event, ()):
                self._add(segment.action.name.lower(), segment.address, segment.size, frames)
            if event == placement.refused_event:
                rounded = round_size(stream.sizes[index], placement.config)
                self._add("oom", 0, segment_size(rounded, placement.config), frames)
                return self.entries
            if entry >= EMPTY_CACHE:
                continue
            address, size = placement.address[index], stream.sizes[index]
            if entry >= 0:
                self._label(index, address)
                self._add("alloc", address, size, frames, self.stream.where(index))
            else:
                self._open.pop(index)["until_time_us"] = self._now()
                self._add("free_requested", address, size, frames)
                self._add("free_completed", address, size, frames)
        return self.entries

    def _phase(self, mark: StreamMark, before: str) -> None:
        """A phase mark; optimizer steps also as the ranges that PyTorch annotates."""
        self.phases.append({"time_us": self._now(), "name": mark.name, "step": mark.step})
        if (mark.name == "optimizer") != (before == "optimizer"):
            stage = "START" if mark.name == "optimizer" else "END"
            self.annotations.append(
                {"stage": stage, "name": "Optimizer.step#predicted.step", "device": 0, "time_us": self._now()}
            )

    def _now(self) -> int:
        return START_US + len(self.entries)

    def _add(self, action: str, address: int, size: int, frames: Frames, metadata: str = "") -> None:
        self.entries.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": self._now(),
                "compile_context": "N/A",
                "user_metadata": metadata,
                "frames": frames,
            }
        )

    def _label(self, index: int, address: int) -> None:
        category, _, subcategory = self.stream.labels[index].partition("/")
        label = {
            "address": address,
            "bytes": self.stream.sizes[index],
            "category": category,
            "subcategory": subcategory,
            "name": self.stream.where(index),
            "from_time_us": self._now(),
            "until_time_us": None,
        }
        self.labels.append(label)
        self._open[index] = label

    def stack(self, index: int, phase: str) -> Frames:
        """A stack like the one a recording would show: none on autograd's thread, else module code, no line numbers."""
        stream = self.stream
        key = (phase, stream.sites[index], stream.layers[index], stream.ops[index])
        frames = self._frames.get(key)
        if frames is None:
            frames = self._frames[key] = self._make_stack(*key)
        return frames

    def _make_stack(self, phase: str, site: str, layer: int, op: str) -> Frames:
        if phase in ("backward",):
            return []
        if phase in ("optimizer", "zero_grad"):
            return [_frame("torch/optim/optimizer.py", "step" if phase == "optimizer" else "zero_grad")]
        frames = [_frame(file, name) for start, file, name in _FILES if site == start]
        if phase == "load" and site.endswith(".lora"):
            return [_frame("peft/tuners/lora/layer.py", "update_layer")]
        if phase == "load":
            return [*frames, _frame("transformers/modeling_utils.py", "from_pretrained")]
        if site.endswith(".lora"):
            frames.append(_frame("peft/tuners/lora/bnb.py", f"forward [{site.removesuffix('.lora')}]"))
        elif "_proj" in site:
            frames.append(_frame("bitsandbytes/nn/modules.py", f"forward [{site}]"))
        elif site:
            frames.append(_frame(self.module, f"forward [{site}: {op}]"))
        if layer >= 0:
            frames.append(_frame(self.module, f"forward [layers.{layer}]"))
        call = _frame("torch/nn/modules/module.py", "_call_impl")
        if phase == "recompute":
            return [*frames, call, _frame("torch/utils/checkpoint.py", "recompute_fn")]
        return [*frames, _frame(self.module, "forward"), call]

    def segments(self) -> list[dict[str, Any]]:
        """The final segments with their blocks."""
        stream, placed = self.stream, self.placement
        live = live_at(stream, len(placed.requested) - 1)
        blocks = (
            (placed.address[i], placed.block_bytes[i], stream.sizes[i], "active_allocated", self.stack(i, "end"))
            for i in live
        )
        return segments_of(placed.state, blocks)


def _frame(filename: str, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": 0, "name": name}
