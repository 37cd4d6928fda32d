"""The storages that a real model's forward and loss save, for ``tests/truth/measured/saved_tensors.json``.

    python tests/tools/saved_storages.py CONFIG.json…   # prints a run for each; needs PyTorch, Transformers and PEFT

CONFIG is a small configuration of the family (a few layers, a hidden size of 64). LoRA on all linear layers, no
dropout, eager attention, 32 bits, on the CPU: what is counted are distinct storages that are no weights, by bytes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

TRUTH = Path(__file__).parents[1] / "truth" / "measured" / "saved_tensors.json"


def saved(config: dict[str, Any], batch: int, sequence: int, rank: int) -> dict[str, int]:
    """Bytes of a saved storage -> how many there are of that size, the largest sizes last."""
    given = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], attn_implementation="eager", use_cache=False, **given)
    model = AutoModelForCausalLM.from_config(made)
    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0)).train()
    model.enable_input_require_grads()
    weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(3, config["vocab_size"], (batch, sequence))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    found = Counter(storage.nbytes() for storage in kept.values() if storage.nbytes() > 512)
    return {str(size): found[size] for size in sorted(found)}


if __name__ == "__main__":
    truth = json.loads(TRUTH.read_text())
    for name in sys.argv[1:]:
        config = json.loads(Path(name).read_text())
        for batch in (1, 2):
            counts = saved(config, batch, truth["sequence"], truth["rank"])
            print(json.dumps({"config": config, "batch": batch, "saved": counts}))
