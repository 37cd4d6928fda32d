"""Qwen2-VL from its config with LoRA on the language model: image patches of two sizes spliced into the text."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

config = Qwen2VLConfig(
    text_config={"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8,
                 "num_key_value_heads": 4, "vocab_size": 4000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}},
    vision_config={"depth": 4, "embed_dim": 256, "hidden_size": 512, "num_heads": 4, "patch_size": 14},
    image_token_id=3990, video_token_id=3991, vision_start_token_id=3992, vision_end_token_id=3993,
)  # fmt: skip
model = Qwen2VLForConditionalGeneration(config).to("cuda", torch.bfloat16)
model.gradient_checkpointing_enable({"use_reentrant": False})
model.enable_input_require_grads()
names = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)"
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names))
model.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def sample(high, wide, words):
    images = high * wide // 4
    text = torch.randint(10, 3900, (words,))
    ids = torch.cat([torch.tensor([3992]), torch.full((images,), 3990), torch.tensor([3993]), text])
    labels = ids.clone()
    labels[: images + 2] = -100
    types = (ids == 3990).int()
    return ids[None], labels[None], types[None], torch.randn(high * wide, 1176), torch.tensor([[1, high, wide]])


for step in range(4):
    ids, labels, types, pixels, grid = (x.cuda() for x in sample(*((32, 32, 200), (48, 24, 300))[step % 2]))
    out = model(
        input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids), mm_token_type_ids=types,
        pixel_values=pixels.bfloat16(), image_grid_thw=grid,
    )  # fmt: skip
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, out.loss.item())
