"""Compare a CPU with one thread to the CPU as it is: which operators depend on the number of threads?"""

import torch
from torch import nn

import shadowrun

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10))
images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
    nn.functional.cross_entropy(model(images), labels).backward()

for row in run.summary():
    print(f"{row.op:<50} {row.n_calls} calls, greatest relative difference {row.max_rel:.2g}")

# Another summation order is not a fault, so there is no finding.
assert run.findings() == []
