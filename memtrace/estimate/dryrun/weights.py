"""Weights that are not there: files with the true header and no data for a model of which only the config is known.

The loader then runs as it is, so its order, its warm-up and its quantisation are the run's own. What a program saves is
written if it is small; a large checkpoint of invented values is left empty.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.record.launcher import after_import

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32",
          "int8": "I8", "uint8": "U8", "bool": "BOOL"}  # fmt: skip
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
_WRITTEN_BYTES = 256 << 20


def stand_in(assumed: Assumptions) -> None:
    """Let programs load models by their config and save what they like, once the libraries are imported."""
    after_import("transformers.modeling_utils", lambda: _load_by_config(assumed))
    after_import("safetensors.torch", lambda: _save_little(assumed, "safetensors.torch", "save_file"))
    _save_little(assumed, "torch", "save")


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
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            size = tensor.numel() * torch.empty((), dtype=kind).element_size()
            found[name] = _TYPES[str(kind).removeprefix("torch.")], tuple(tensor.shape), size
    return found


def write_empty(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
    """A safetensors file of zeros that takes no room on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _save_little(assumed: Assumptions, module: str, name: str) -> None:
    import importlib

    import torch
    from torch.utils import _pytree

    owner = importlib.import_module(module)
    original = getattr(owner, name)

    @functools.wraps(original)
    def save(what: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = [leaf.nbytes for leaf in _pytree.tree_leaves(what) if isinstance(leaf, torch.Tensor)]
        if sum(sizes) <= _WRITTEN_BYTES or not isinstance(target, str | Path):
            return original(what, target, *args, **kwargs)
        assumed.note("saved", "large files that the program saves are left empty")
        return Path(target).touch()

    setattr(owner, name, save)
