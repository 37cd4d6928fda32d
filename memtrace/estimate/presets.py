"""Published models and GPUs by name: ``presets.json`` holds public numbers of model cards, ``config.json`` files and
data sheets; a GPU's memory is in GiB as PyTorch's messages show it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from memtrace.errors import UsageError
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.shapes import ModelShape, read_keys, shape_from_config
from memtrace.frozen import dataclass
from memtrace.units import GIB, MIB

DEFAULT_CAPACITY_BYTES = 24 * GIB
_OUTSIDE_BYTES = 771 * MIB


@cache
def _presets() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    return found


@dataclass(frozen=True, slots=True)
class GpuPreset:
    """A GPU: memory as PyTorch sees it, kernels, and what a training process holds outside PyTorch's allocator.

    ``outside_bytes``: CUDA context, kernels, library handles after a training step. Measured on an H200 (751–771
    MiB); for the other cards that figure is assumed.
    """

    name: str
    total_bytes: int
    device: KernelDevice
    outside_bytes: int
    outside_measured: bool


def model_names() -> tuple[str, ...]:
    """Names of the model presets."""
    return tuple(_presets()["models"])


def gpu_names() -> tuple[str, ...]:
    """Names of the GPU presets."""
    return tuple(_presets()["gpus"])


def letters(text: str) -> str:
    """Letters and digits of a name, in lower case: what is left of it however it is spelled."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _meant(name: str, known: Iterable[str]) -> str:
    """The presets that somebody may have meant by ``name``: same letters and digits (``meta-llama/Llama-2-7b-hf``), a
    part of a name (``4090``), or a likeness. All presets where none is."""
    from difflib import get_close_matches

    names = list(known)
    asked = letters(name.rsplit("/", 1)[-1])
    found = [preset for preset in names if asked and asked in letters(preset)]
    if not found:
        found = sorted((preset for preset in names if letters(preset) in asked), key=len)[-1:]
    if not found:
        by_plain = {letters(preset): preset for preset in names}
        found = [by_plain[match] for match in get_close_matches(asked, by_plain, n=3, cutoff=0.6)]
    return f"did you mean {' or '.join(found[:3])}?" if found else f"presets: {', '.join(names)}"


def preset_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a preset, as far as memory depends on it. Raises UsageError for an unknown one."""
    known = _presets()["models"]
    if name.lower() not in known:
        raise UsageError(f"no model preset {name!r} (a config.json is taken, too); {_meant(name, known)}")
    return known[name.lower()] | {"max_position_embeddings": 32768}


def model_preset(name: str) -> ModelShape:
    """The shape of a published model. Raises UsageError for an unknown name."""
    return shape_from_config(preset_config(name), name.lower())


def gpu_preset(name: str) -> GpuPreset:
    """A GPU by name. Raises UsageError for an unknown one."""
    row = _presets()["gpus"].get(name.lower())
    if row is None:
        raise UsageError(f"no GPU preset {name!r}; {_meant(name, gpu_names())}")
    device = KernelDevice(tuple(row["capability"]), row["multiprocessors"])
    return GpuPreset(name.lower(), round(row["total_gib"] * GIB), device, _OUTSIDE_BYTES, name.lower() == "h200")


def named_config(model: str) -> tuple[str, dict[str, Any], str]:
    """Name and ``config.json`` keys of a preset, of such a file, or of the folder that holds it; and what to call it in
    an error. Raises UsageError for an unknown name, SnapshotError for a file that can't be read."""
    if not model:
        raise UsageError("no model is named: --model takes a config.json or a preset")
    path = Path(model)
    if model.lower() in model_names() or not (path.exists() or path.suffix == ".json"):
        return model.lower(), preset_config(model), model
    path = path / "config.json" if path.is_dir() else path
    keys = read_keys(path)
    return str(keys.get("_name_or_path") or path.parent.name or path.stem), keys, str(path)


def model_shape(model: str) -> ModelShape:
    """A preset by name, or the shape in a ``config.json``. Raises UsageError for what the shape engine doesn't cover,
    and as :func:`named_config` does."""
    name, keys, where = named_config(model)
    if isinstance(keys.get("text_config"), dict):
        raise UsageError(f"{where}: a multimodal model is not covered by the estimate")
    return shape_from_config(keys, name, where)
