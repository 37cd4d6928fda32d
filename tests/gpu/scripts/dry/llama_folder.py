"""Full fine-tuning of a Llama in a local folder, bf16 weights, plain loop, AdamW, length growing with the step."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).to("cuda")
model.gradient_checkpointing_enable()
model.config.use_cache = False
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
for step in range(4):
    ids = torch.randint(0, model.config.vocab_size, (4, 256 + 128 * step), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"{step}: {loss.item():.3f}, {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
