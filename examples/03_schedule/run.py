"""Compare two of ten steps, chosen by the schedule that torch.profiler takes."""

import torch
from torch import nn

import shadowrun

torch.manual_seed(0)
model = nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.profiler.schedule(wait=3, warmup=1, active=1, repeat=2)

with shadowrun.compare("cpu[mkldnn=off]", ref="cpu", schedule=schedule) as run:
    for _ in range(10):
        loss = model(torch.randn(16, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step()

steps = {record.call.step for record in run.records()}
print(f"compared steps: {sorted(steps)}")
assert steps == {4, 9}
