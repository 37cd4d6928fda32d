"""Lightning: an autoencoder with a validation loop, bf16-mixed precision and clipping."""

import tempfile

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Auto(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 64))
        self.decoder = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 784))

    def training_step(self, batch, _):
        x = batch[0].flatten(1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        x = batch[0].flatten(1)
        self.log("val", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = DataLoader(TensorDataset(torch.randn(2048, 1, 28, 28)), batch_size=512)
trainer = L.Trainer(
    max_epochs=2,
    accelerator="gpu",
    devices=1,
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    default_root_dir=tempfile.mkdtemp(),
)
trainer.fit(Auto(), data, data)
