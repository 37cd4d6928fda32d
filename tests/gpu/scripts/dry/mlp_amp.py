"""A classifier in fp16 with a gradient scaler, two loader workers, clipping and an evaluation each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = TensorDataset(torch.randn(2048, 784), torch.randint(0, 10, (2048,)))
    train, test = torch.utils.data.random_split(data, [1536, 512])
    loader = DataLoader(train, batch_size=256, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
    held_out = DataLoader(test, batch_size=512)
    model = nn.Sequential(
        nn.Linear(784, 4096),
        nn.BatchNorm1d(4096),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(4096, 4096),
        nn.GELU(),
        nn.Linear(4096, 10),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    best = 0.0
    for epoch in range(2):
        model.train()
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in held_out:
                right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
        best = max(best, right / len(test))
        print(f"epoch {epoch} loss {loss.item():.4f} best {best:.3f}")


if __name__ == "__main__":
    main()
