"""Programs for an accelerator, self-contained: a Llama, a network like ResNet-50, single products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PROGRAMS", "SIZES", "Program", "products"]

SIZES = ("small", "full", "large")


@dataclass(frozen=True)
class Program:
    """A program that was built.

    Attributes:
        step: What is timed.
        model: What it trains; None for single operators.
    """

    step: Callable[[], object]
    model: nn.Module | None = None


class Attention(nn.Module):
    """Causal, with rotary positions and fewer heads for keys and values."""

    def __init__(self, d: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d_head = heads, kv_heads, d // heads
        self.q = nn.Linear(d, d, bias=False)
        self.kv = nn.Linear(d, 2 * kv_heads * self.d_head, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q = _turned(self.q(x).view(n, t, self.heads, self.d_head).transpose(1, 2), cos, sin)
        k, v = self.kv(x).view(n, t, 2, self.kv_heads, self.d_head).permute(2, 0, 3, 1, 4)
        again = self.heads // self.kv_heads
        k, v = _turned(k, cos, sin).repeat_interleave(again, 1), v.repeat_interleave(again, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d))


class Block(nn.Module):
    """Attention and a gated MLP, each after RMSNorm."""

    def __init__(self, d: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attention = Attention(d, heads, kv_heads)
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Embedding, blocks, and a head of its own."""

    def __init__(self, vocabulary: int, d: int, heads: int, hidden: int, length: int, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(Block(d, heads, max(1, heads // 2), hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocabulary, bias=False)
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, d // heads, 2) / (d // heads))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, with batch norm, and a shortcut."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width

        def conv(i: int, o: int, k: int, s: int = 1) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o))

        self.way = nn.Sequential(
            conv(n_in, width, 1), nn.ReLU(), conv(width, width, 3, stride), nn.ReLU(), conv(width, n_out, 1)
        )
        self.shortcut = conv(n_in, n_out, 1, stride) if stride > 1 or n_in != n_out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.way(x) + self.shortcut(x))


def resnet(width: int, blocks: tuple[int, ...], classes: int) -> nn.Sequential:
    """Stem, four stages of bottlenecks, head."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    n_in = width
    for stage, n in enumerate(blocks):
        for i in range(n):
            layers.append(Bottleneck(n_in, width << stage, 2 if stage and not i else 1))
            n_in = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, classes))


# Vocabulary, width, heads, hidden width, batch, sequence, layers; large: 1.08 billion parameters.
_LLAMA = {
    "small": (64, 32, 4, 64, 2, 8, 4),
    "full": (8192, 1024, 16, 2816, 4, 512, 4),
    "large": (32000, 2048, 16, 5632, 1, 2048, 20),
}
# Width, blocks of each stage, classes, batch, edge of an image; large: ResNet-50's own.
_RESNET = {
    "small": (4, (1, 1, 1, 1), 10, 2, 32),
    "full": (64, (3, 4, 6, 3), 1000, 16, 128),
    "large": (64, (3, 4, 6, 3), 1000, 64, 224),
}


def llama_step(device: str, size: str, dtype: torch.dtype = torch.float32) -> Program:
    """A training step with AdamW; `dtype` is that of autocast."""
    vocabulary, d, heads, hidden, n, length, layers = _LLAMA[size]
    with torch.device(device if size == "large" else "cpu"):  # a billion numbers take a minute on a CPU
        model = Llama(vocabulary, d, heads, hidden, length, layers)
    model = model.to(device)
    tokens = torch.randint(0, vocabulary, (n, length)).to(device)

    def loss_of() -> torch.Tensor:
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not torch.float32):
            return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    return _training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of)


def resnet_step(device: str, size: str, dtype: torch.dtype = torch.float32) -> Program:
    """A training step with SGD and momentum; `dtype` is that of autocast."""
    width, blocks, classes, n, edge = _RESNET[size]
    model = resnet(width, blocks, classes).to(device)
    x, y = torch.randn(n, 3, edge, edge).to(device), torch.randint(0, classes, (n,)).to(device)

    def loss_of() -> torch.Tensor:
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not torch.float32):
            return F.cross_entropy(model(x).float(), y)

    return _training(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), loss_of)


def products(device: str, size: str) -> dict[str, Callable[[], Program]]:
    """Square matrix products."""

    def make(n: int, dtype: torch.dtype) -> Program:
        a, b = (torch.randn(n, n).to(dtype).to(device) for _ in range(2))
        return Program(lambda: a @ b)

    edges = (256, 512, 1024, 2048, 4096) if size != "small" else (16, 32, 64)
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16}
    return {
        f"mm {name} {n}": (lambda n=n, dtype=dtype: make(n, dtype)) for name, dtype in dtypes.items() for n in edges
    }


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> Program:
    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return Program(step, model)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


PROGRAMS: dict[str, Callable[[str, str], Program]] = {
    "Llama, AdamW": llama_step,
    "Llama, AdamW, bf16": partial(llama_step, dtype=torch.bfloat16),
    "ResNet-50-like, SGD": resnet_step,
    "ResNet-50-like, SGD, bf16": partial(resnet_step, dtype=torch.bfloat16),
}
"""Training steps by name: take the device and one of `SIZES`."""
