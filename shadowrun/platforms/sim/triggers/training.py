"""Triggers of what only training meets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.platforms.sim.triggers.base import randn, trigger

__all__: list[str] = []


def _backward(function: Any, device: str) -> None:
    (function(randn(device, 64).requires_grad_()) + 1).square().sum().backward()


def _step(device: str, *, foreach: bool) -> None:
    weights = [nn.Parameter(randn(device, 4, seed=seed)) for seed in range(3)]
    optimizer = torch.optim.AdamW(weights, foreach=foreach)
    torch.stack([w.square().sum() for w in weights]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@trigger("relu-backward-leaks")
def _relu(device: str) -> None:
    _backward(F.relu, device)


@trigger("gelu-backward-constant")
def _gelu(device: str) -> None:
    _backward(F.gelu, device)


@trigger("silu-backward-sign")
def _silu(device: str) -> None:
    _backward(F.silu, device)


@trigger("biased-running-variance")
def _batch_norm(device: str) -> Any:
    layer = nn.BatchNorm2d(3).to(device)
    return layer(randn(device, 2, 3, 4, 4))


@trigger("embedding-loses-duplicates")
def _embedding(device: str) -> None:
    table = randn(device, 6, 4).requires_grad_()
    F.embedding(torch.tensor([1, 2, 1, 5]).to(device), table).square().sum().backward()  # type: ignore[no-untyped-call]


@trigger("index-put-loses-duplicates")
def _index_put(device: str) -> Any:
    rows = torch.tensor([0, 1, 0, 2]).to(device)
    return torch.zeros(4).to(device).index_put_((rows,), randn(device, 4), accumulate=True)


@trigger("foreach-skips-last")
def _foreach(device: str) -> None:
    _step(device, foreach=True)


@trigger("addcdiv-scaled")
def _single(device: str) -> None:
    _step(device, foreach=False)


@trigger("dropout-ignores-p")
def _dropout(device: str) -> Any:
    return F.dropout(torch.ones(1000).to(device), 0.1)
