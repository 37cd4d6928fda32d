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
from memtrace.estimate.presets import named_config

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

    ``layers`` overrides the number of layers of a model with random weights. Raises UsageError, and SnapshotError for
    a configuration that can't be read.
    """
    path = Path(model)
    has_weights = any(any(path.glob(pattern)) for pattern in _WEIGHTS)
    if has_weights or ("/" in model and not path.exists() and path.suffix != ".json"):  # here, or at the hub
        if layers is not None:
            raise UsageError(f"--layers works with random weights only, and {model} has weights of its own")
        return model
    _, architecture, where = named_config(model)
    if "model_type" not in architecture:
        raise UsageError(f"{where}: not a model configuration: it has no model_type")
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


if __name__ == "__main__":
    write_checkpoint(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3])
