"""Two small models and their training, written as a user would: their names show up in the demo's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DigitsNet", "PixelTransformer", "evaluate", "train_digits", "train_transformer"]


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
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores ``(N, 10)``."""
        features = self.features(images)
        return self.classifier(features.flatten(1))  # type: ignore[no-any-return]


class PixelTransformer(nn.Module):
    """A transformer that reads an image as 64 words, one for each pixel's grey value ``(N, 64)``."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.position = nn.Parameter(torch.randn(64, width) / width**0.5)
        self.encoder = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=2 * width, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scores ``(N, 10)``."""
        words = self.embed(pixels) + self.position
        return self.head(self.encoder(words).mean(1))  # type: ignore[no-any-return]


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
    """Train a `PixelTransformer` where the images lie, then classify; yields the loss of each step."""
    model = PixelTransformer().to(images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pixels = (16 * images).long().flatten(1)
    for step in range(steps):
        batch = slice(16 * step, 16 * step + 16)
        loss = functional.cross_entropy(model(pixels[batch]), labels[batch], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == steps - 1:
            evaluate(model, pixels[-16:], labels[-16:])
        yield loss.item()


def evaluate(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of inputs that are classified rightly, 0 to 1."""
    model.eval()
    with torch.inference_mode():
        right = model(inputs).argmax(-1) == labels
    return right.float().mean().item()  # type: ignore[no-any-return]
