"""Train a small network on a simulated accelerator with two flaws; the report lists both."""

import torch
from torch import nn

import shadowrun
from shadowrun import sim

# With a real accelerator, leave this line out and write its name below.
sim.enable(flaws=["relu-backward-leaks", "missing-lerp"])
device = "sim"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters())
inputs, labels = torch.randn(64, 16).to(device), torch.randint(4, (64,)).to(device)

with shadowrun.compare(device, ref="cpu") as run:
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step()

run.write("-")
run.write("report.html")
for finding in run.findings():
    print(finding.kind, finding.op, finding.sites[0] if finding.sites else "")

assert {finding.kind for finding in run.findings()} == {"mismatch", "unsupported"}
