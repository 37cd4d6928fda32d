"""Where a model comes from: a folder with weights, a hub id, or random weights of a ``config.json`` or a preset.

``python -m memtrace.record.checkpoint CONFIG.json FOLDER DEVICE`` writes a checkpoint with random weights, in a
process of its own so that the recording process starts clean.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from memtrace.errors import NoAnswerError, UsageError
from memtrace.estimate.presets import preset_config

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def write_checkpoint(architecture: dict[str, Any], folder: Path, device: str, seed: int = 0) -> Path:
    """Save a bf16 checkpoint with random weights of ``architecture`` (keys of a Transformers ``config.json``)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(architecture)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def find_model(model: str, scratch: Path, layers: int | None, device: str) -> str:
    """A folder or hub id that ``from_pretrained`` takes; random weights are written under ``scratch`` where needed.

    ``layers`` overrides the number of layers of a model with random weights. Raises UsageError.
    """
    path = Path(model)
    if path.is_dir() and any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return _only_whole(str(path), layers)
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        try:
            architecture = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {file}: {error}") from None
        if not isinstance(architecture, dict) or "model_type" not in architecture:
            raise UsageError(f"{file} is not a model configuration: it has no model_type")
    elif "/" in model:
        return _only_whole(model, layers)
    else:
        architecture = preset_config(model)
    if layers is not None:
        architecture["num_hidden_layers"] = layers
        architecture.pop("layer_types", None)
    config = scratch / "architecture.json"
    config.write_text(json.dumps(architecture))
    folder = scratch / "checkpoint"
    command = [sys.executable, "-P", "-m", "memtrace.record.checkpoint", str(config), str(folder), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoAnswerError(f"cannot make a model with random weights of {model}: {reason}")
    return str(folder)


def _only_whole(model: str, layers: int | None) -> str:
    if layers is not None:
        raise UsageError(f"--layers works with random weights only, and {model} has weights of its own")
    return model


if __name__ == "__main__":
    write_checkpoint(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3])
