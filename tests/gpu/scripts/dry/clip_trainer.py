import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import CLIPConfig, CLIPModel

cfg = CLIPConfig(
    text_config={"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4},
    vision_config={
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 112,
        "patch_size": 16,
    },
    projection_dim=128,
)
m = CLIPModel(cfg).cuda()
opt = torch.optim.AdamW(m.parameters(), 1e-4, betas=(0.9, 0.98))
s = LambdaLR(opt, lambda e: min(1, (e + 1) / 5))
m = torch.compile(m)
for i in range(4):
    out = m(
        pixel_values=torch.randn(16, 3, 112, 112).cuda(),
        input_ids=torch.randint(0, 49000, (16, 40)).cuda(),
        attention_mask=torch.ones(16, 40, dtype=torch.long).cuda(),
        return_loss=True,
    )
    out.loss.backward()
    opt.step()
    s.step()
    opt.zero_grad()
    m.logit_scale.data.clamp_(0, 4.6)
    acc = (out.logits_per_image.argmax(1) == torch.arange(16).cuda()).sum().item() / 16
    print(i, f"{out.loss:.3f} {acc:.2%}")
