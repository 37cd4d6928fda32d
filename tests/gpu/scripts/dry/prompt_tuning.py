"""Prompt tuning of a GPT-2, a schedule, sampled text at the end."""

import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

m = GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=4, n_head=8)).to("cuda")
m = get_peft_model(m, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=20))
opt = torch.optim.AdamW(m.parameters(), 0.03)
sch = get_cosine_schedule_with_warmup(opt, 2, 10)
for step in range(5):
    ids = torch.randint(0, 50000, (8, 200), device="cuda")
    out = m(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    out.loss.backward()
    opt.step()
    sch.step()
    opt.zero_grad()
    print(step, out.loss.detach().float().item(), sch.get_last_lr())
m.eval()
g = m.generate(
    input_ids=ids[:2, :10],
    attention_mask=torch.ones_like(ids[:2, :10]),
    max_new_tokens=16,
    do_sample=True,
    top_p=0.9,
    pad_token_id=0,
)
print(g.shape)
