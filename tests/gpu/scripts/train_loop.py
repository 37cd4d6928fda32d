"""A plain QLoRA training loop that knows nothing of memtrace.

Half-way through step ``--tighten`` it shrinks its own memory limit below the peak so far, which forces an
out-of-memory error. What was alive then is written to ``--truth`` as JSON.
"""

from __future__ import annotations

import argparse

import torch
from common import CUDA, DEVICE, make_lora, storages, tighten, write_truth
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--truth")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--tighten", type=int, default=-1)
parser.add_argument("--length", type=int, default=1024)
args = parser.parse_args()

quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(
    args.model, quantization_config=quantization, device_map={"": DEVICE}, dtype=torch.bfloat16
)
model = make_lora(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
model.train()
try:
    for step in range(args.steps):
        for micro in range(2):
            if (step, micro) == (args.tighten, 1):  # the first half's gradients are there
                tighten()
            ids = torch.randint(0, model.config.vocab_size, (1, args.length)).to(DEVICE)
            loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {loss.item():.3f}", flush=True)
        del loss
except torch.OutOfMemoryError:
    write_truth(args.truth, storages(model, [optimizer]))
    raise
if CUDA:
    print("peak bytes", torch.cuda.max_memory_allocated())
