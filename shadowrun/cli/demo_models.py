"""Two small models and their training, written as a user would: their names show up in the demo's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DigitsNet", "RowTransformer", "train_digits", "train_transformer"]


class DigitsNet(nn.Module):
    """A convolutional network for 8 x 8 grey images ``(N, 1, 8, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.SiLU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores ``(N, 10)``."""
        features = self.features(images)
        return self.classifier(features.flatten(1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Self-attention and a feed-forward part, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, rows, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, rows, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        attended = scores.softmax(-1) @ value
        x = x + self.out(attended.transpose(1, 2).reshape(n, rows, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class RowTransformer(nn.Module):
    """A transformer that reads an image row by row, ``(N, 8, 8)``."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Embedding(8, width)
        self.block = Block(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Scores ``(N, 10)``."""
        places = torch.arange(rows.shape[1], device=rows.device)
        x = self.embed(rows) + self.position(places)
        x = self.norm(self.block(x))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def train_digits(images: torch.Tensor, labels: torch.Tensor, steps: int) -> Iterator[float]:
    """Train a `DigitsNet` where the images lie; yields the loss of each step."""
    model = DigitsNet().to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = slice(32 * step, 32 * step + 32)
        loss = functional.cross_entropy(model(images[batch].unsqueeze(1)), labels[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


def train_transformer(images: torch.Tensor, labels: torch.Tensor, steps: int) -> Iterator[float]:
    """Train a `RowTransformer` where the images lie; yields the loss of each step."""
    model = RowTransformer().to(images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = slice(32 * step, 32 * step + 32)
        loss = functional.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()
