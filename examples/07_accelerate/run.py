"""Compare the steps of a loop with accelerate, and log the figures to TensorBoard."""

import importlib.util
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

from shadowrun import sim

if not all(importlib.util.find_spec(name) for name in ("accelerate", "tensorboard")):
    print("skipped: pip install -c constraints.txt '.[accelerate,tensorboard]'")
    sys.exit()

from accelerate import Accelerator

from shadowrun.integrations.accelerate import compare

# With a real accelerator, leave this line out and write its name below.
sim.register(flaws=["relu-backward-leaks"])

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir="logs")
accelerator.init_trackers("example")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
batches = DataLoader(torch.randn(16, 8), batch_size=4)
model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), batches)

with compare(accelerator, "sim", every=1) as run:
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    run.pause()  # an evaluation is no step
    with torch.no_grad():
        model(next(iter(batches)))
accelerator.end_training()

run.write("-")
assert [step.step for step in run.steps()] == [0, 1]
assert [finding.op for finding in run.findings()] == ["aten::threshold_backward"]
