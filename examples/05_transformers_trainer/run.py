"""Compare the training steps of transformers' Trainer, and log the figures with the losses."""

import importlib.util
import sys

import torch
from torch import nn

from shadowrun import sim

if not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")):
    print("skipped: pip install -c constraints.txt '.[transformers]'")
    sys.exit()

from transformers import Trainer, TrainingArguments

from shadowrun.integrations.transformers import TrainerCallback

# With a real accelerator, leave this line out and write its name below.
sim.register(flaws=["relu-backward-leaks"])


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x, labels):
        output = self.net(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


torch.manual_seed(0)
rows = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(16)]
callback = TrainerCallback("sim", every=1)  # options of shadowrun.compare may follow: steps=[0, 100], budget=1.2, ...
trainer = Trainer(
    model=Regression(),
    args=TrainingArguments(
        output_dir="out",
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=rows,
    eval_dataset=rows[:4],
    callbacks=[callback],
)
callback.log_to(trainer)
trainer.train()

callback.run.write("-")
assert [step.step for step in callback.run.steps()] == [0, 1, 2]
assert [finding.op for finding in callback.run.findings()] == ["aten::threshold_backward"]
assert any(row.get("shadowrun/findings") == 1 for row in trainer.state.log_history)
