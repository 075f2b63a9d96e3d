"""Compare the training steps of Lightning's Trainer."""

import importlib.util
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

from shadowrun import sim

if not importlib.util.find_spec("lightning"):
    print("skipped: pip install -c constraints.txt '.[lightning]'")
    sys.exit()

import lightning.pytorch as pl

from shadowrun.integrations.lightning import Callback

# With a real accelerator, leave this line out and write its name below.
sim.register(flaws=["relu-backward-leaks"])


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch, _):
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.log("loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


torch.manual_seed(0)
rows = [(torch.randn(8), torch.randn(1)) for _ in range(16)]
callback = Callback("sim")  # options of shadowrun.compare may follow: steps=[0, 100], budget=1.2, ...
trainer = pl.Trainer(
    max_epochs=1,
    accumulate_grad_batches=2,
    accelerator="cpu",
    callbacks=[callback],
    logger=False,  # with a logger, it gets shadowrun's figures as well
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Regression(), DataLoader(rows, batch_size=4), DataLoader(rows[:4], batch_size=2))

callback.run.write("-")
assert [step.step for step in callback.run.steps()] == [0, 1]
assert [finding.op for finding in callback.run.findings()] == ["aten::threshold_backward"]
