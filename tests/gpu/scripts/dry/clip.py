"""CLIP from its config: images and captions, bf16 autocast, cosine schedule, logit scale clamped."""

import torch
from transformers import CLIPConfig, CLIPModel, get_cosine_schedule_with_warmup

device = "cuda" if torch.cuda.is_available() else "cpu"
config = CLIPConfig(
    text_config={"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4},
    vision_config={"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6,
                   "image_size": 224, "patch_size": 16},
    projection_dim=256,
)  # fmt: skip
model = CLIPModel(config).to(device)
model.train()
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}], lr=1e-4)
scheduler = get_cosine_schedule_with_warmup(optimizer, 1, 4)
for step in range(4):
    pixels = torch.randn(48, 3, 224, 224, device=device)
    tokens = torch.randint(5, 49000, (48, 77))
    tokens[:, -1] = 49407
    mask = torch.ones_like(tokens)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = model(input_ids=tokens.to(device), pixel_values=pixels, attention_mask=mask.to(device), return_loss=True)
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6052)
    top1 = (out.logits_per_image.argmax(dim=-1) == torch.arange(48, device=device)).float().mean()
    print(f"{step} {out.loss.item():.3f} {top1.item():.2f} {scheduler.get_last_lr()[0]:.2e}")
