"""Weights that are not there: files with the true header and no data for a model of which only the config is known.

The loader then runs as it is, so its order, its warm-up and its quantisation are the run's own. What a program saves is
written if it is small; a large checkpoint of invented values has its true size and structure, and holds no data.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.record.launcher import after_import

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32",
          "int8": "I8", "uint8": "U8", "bool": "BOOL", "int16": "I16", "uint16": "U16", "uint32": "U32",
          "uint64": "U64", "complex64": "C64",
          "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}  # fmt: skip
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
_WRITTEN_BYTES = 256 << 20
_HOLLOW = "large files that the program saves hold no data (zeros, if it loads them)"


def stand_in(assumed: Assumptions) -> None:
    """Let programs load models by their config and save what they like, once the libraries are imported."""
    after_import("transformers.modeling_utils", lambda: _load_by_config(assumed))
    after_import("safetensors.torch", lambda: _save_safetensors(assumed))
    _save_checkpoints(assumed)


def _load_by_config(assumed: Assumptions) -> None:
    from transformers.modeling_utils import PreTrainedModel

    original = PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = _local(name) if name is not None and not kwargs.get("state_dict") else None
        if folder is None or not (folder / "config.json").is_file() or _has_weights(folder):
            return original(cls, name, *args, **kwargs)
        assumed.note(f"weights of {name}", f"the weights of {name} are as its config.json says")
        with tempfile.TemporaryDirectory(prefix="memtrace-") as made:
            for file in folder.iterdir():
                if file.is_file():
                    shutil.copy(file, made)
            write_empty(Path(made) / "model.safetensors", _shapes(cls, folder))
            return original(cls, made, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _local(name: Any) -> Path | None:
    folder = Path(str(name))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except Exception:  # not in the cache, no name of a model: the library says what is wrong
        return None


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS)


def _shapes(cls: Any, folder: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Type, shape and bytes of every tensor that the checkpoint of a model of class ``cls`` would hold."""
    import torch

    config = cls.config_class.from_pretrained(folder)
    dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = cls(config)
    model.tie_weights()
    found = {}
    kept = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in kept:
            found[name] = _of(tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return found


def write_empty(
    path: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]], metadata: dict[str, str] | None = None
) -> None:
    """A safetensors file of zeros that takes no room on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} if metadata is None else metadata}
    end = 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _of(tensor: Any) -> tuple[str, tuple[int, ...], int]:
    return _TYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), tensor.nbytes


def _save_checkpoints(assumed: Assumptions) -> None:
    """``torch.save`` of much skips the data; ``torch.load`` maps such a file, so that its zeros take no memory."""
    import torch
    from torch.serialization import skip_data
    from torch.utils import _pytree

    original, load, hollow = torch.save, torch.load, set()

    @functools.wraps(original)
    def save(what: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = [leaf.nbytes for leaf in _pytree.tree_leaves(what) if isinstance(leaf, torch.Tensor)]
        if sum(sizes) <= _WRITTEN_BYTES or not isinstance(target, str | Path):
            return original(what, target, *args, **kwargs)
        assumed.note("saved", _HOLLOW)
        hollow.add(os.path.realpath(target))
        with skip_data():
            return original(what, target, *args, **kwargs)

    @functools.wraps(load)
    def load_mapped(source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, str | Path) and os.path.realpath(source) in hollow:
            kwargs["mmap"] = True
        return load(source, *args, **kwargs)

    torch.save, torch.load = save, load_mapped


def _save_safetensors(assumed: Assumptions) -> None:
    import safetensors.torch as library

    original = library.save_file

    @functools.wraps(original)
    def save_file(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
        if sum(tensor.nbytes for tensor in tensors.values()) <= _WRITTEN_BYTES:
            return original(tensors, filename, metadata)
        assumed.note("saved", _HOLLOW)
        return write_empty(Path(filename), {name: _of(tensor) for name, tensor in tensors.items()}, metadata or {})

    library.save_file = save_file
