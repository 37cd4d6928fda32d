"""DoRA on a small Llama in bf16: accumulation, checkpointing, adapters saved and merged."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

m = (
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=8000,
        )
    )
    .to(torch.bfloat16)
    .cuda()
)
m = get_peft_model(
    m, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM")
)
m.print_trainable_parameters()
m.gradient_checkpointing_enable()
m.enable_input_require_grads()
opt = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.0001)
for step in range(4):
    for _micro in range(2):
        ids = torch.randint(0, 8000, (4, 256)).cuda()
        loss = m(input_ids=ids, labels=ids).loss / 2
        loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item() * 2)
m.save_pretrained(tempfile.mkdtemp())
merged = m.merge_and_unload()
print(sum(p.numel() for p in merged.parameters()))
