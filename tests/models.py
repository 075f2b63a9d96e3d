"""The programs that the tests train: ordinary user code."""

import torch
from torch import nn
from torch.nn import functional as F


class DigitsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1)
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        return self.head(self.dropout(F.relu(self.features(x)).flatten(1)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


def digits(device="cpu"):
    """Model, optimizer, and a function that makes one training step."""
    model = DigitsNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(12, 1, 8, 8).to(device), torch.randint(0, 10, (12,)).to(device)
    return model, optimizer, lambda: F.cross_entropy(model(x), y)


def tokens(device="cpu"):
    model = Tokens().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randint(0, 50, (4, 12)).to(device)
    return model, optimizer, lambda: F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def train(make, device="cpu", steps=20, run=None):
    """Train, and give everything that must not change: losses, weights, buffers, optimizer states, random streams."""
    torch.manual_seed(0)
    model, optimizer, loss_of = make(device)
    losses = []
    if run is not None:
        run.start()
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if run is not None:
                run.step()
    finally:
        if run is not None:
            run.stop()
    state = {f"weights.{k}": v.cpu() for k, v in model.state_dict().items()}
    for i, s in enumerate(optimizer.state.values()):
        state |= {f"optimizer.{i}.{k}": v.cpu() for k, v in s.items() if isinstance(v, torch.Tensor)}
    state["grads"] = torch.cat([p.grad.cpu().flatten() for p in model.parameters()])
    state["rng"] = torch.get_rng_state()
    if device != "cpu":
        state["rng of the device"] = getattr(torch, torch.device(device).type).get_rng_state()
    state["losses"] = torch.tensor(losses, dtype=torch.float64)
    return state


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        same = actual[name].shape == value.shape and actual[name].numpy().tobytes() == value.numpy().tobytes()
        assert same, f"{name} changed"
