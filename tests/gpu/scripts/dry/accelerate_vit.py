"""Accelerate: a vision transformer in bf16, accumulation, gathered metrics, saved and loaded state."""

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification


class D(Dataset):
    def __len__(s):
        return 48

    def __getitem__(s, i):
        return {"pixel_values": torch.randn(3, 96, 96), "labels": i % 5}


def main():
    acc = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    m = ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=96,
            num_labels=5,
        )
    )
    o = torch.optim.AdamW(m.parameters(), 0.0001)
    dl = DataLoader(D(), 8, shuffle=True)
    s = torch.optim.lr_scheduler.LinearLR(o)
    m, o, dl, s = acc.prepare(m, o, dl, s)
    for ep in range(2):
        for b in dl:
            with acc.accumulate(m):
                out = m(**b)
                acc.backward(out.loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(m.parameters(), 1.0)
                o.step()
                s.step()
                o.zero_grad()
        p, r = acc.gather_for_metrics((out.logits.argmax(-1), b["labels"]))
        acc.print(ep, (p == r).float().mean().item())
    acc.wait_for_everyone()
    out = tempfile.mkdtemp()
    acc.unwrap_model(m).save_pretrained(out + "/model", save_function=acc.save)
    acc.save_state(out + "/state")
    acc.load_state(out + "/state")
    acc.end_training()


if __name__ == "__main__":
    main()
