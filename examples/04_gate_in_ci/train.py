"""A program without any call of shadowrun."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained")
