"""Five small models that train: what the planted faults are put into."""

import torch
from torch import nn
from torch.nn import functional as F


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.norm(self.hidden(x))
        h = F.relu(h)
        h = self.drop(h)
        h = self.head(h)
        return h.log_softmax(-1)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = self.norm(self.conv(x))
        h = F.silu(h)
        h = F.max_pool2d(h, 2)
        h = h.mean((2, 3))
        return self.head(h)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        scaled = scores * 8**-0.5
        weights = scaled.softmax(-1)
        x = x + weights @ v
        return x + F.gelu(self.up(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.blocks(self.embed(tokens)).mean(1)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(5, 10)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x):
        state = torch.zeros_like(x[0])
        for t in range(2):
            gate, new = self.gates(x[t] + state).chunk(2, -1)
            gate = torch.sigmoid(gate)
            new = torch.tanh(new)
            state = gate * state + (1 - gate) * new
        centred = state - x[0]
        return (centred * self.scale + 0.25).exp()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h.transpose(1, 2).reshape(2, 4, 8))


def make(name):
    """A model and its input."""
    torch.manual_seed(0)
    tokens = torch.tensor([[1, 4, 4, 2], [4, 0, 10, 1]])
    inputs = {
        Perceptron: torch.randn(7, 6),
        Convolutional: torch.randn(2, 2, 6, 6),
        Transformer: tokens,
        Gated: torch.randn(2, 3, 5),
        Attention: torch.randn(2, 4, 8),
    }
    kind = {k.__name__.lower(): k for k in inputs}[name]
    return kind(), inputs[kind]
