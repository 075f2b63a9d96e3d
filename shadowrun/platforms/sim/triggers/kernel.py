"""Triggers of wrong kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.platforms.sim.triggers.base import randn, trigger

__all__: list[str] = []


@trigger("softmax-error")
def _softmax(device: str) -> Any:
    return randn(device, 4, 9).softmax(-1)


@trigger("gelu-by-tanh")
def _gelu(device: str) -> Any:
    return F.gelu(randn(device, 64))


@trigger("silu-tail")
def _silu(device: str) -> Any:
    return F.silu(randn(device, 32)), F.silu(randn(device, 35))


@trigger("layer-norm-block-edge")
def _layer_norm(device: str) -> Any:
    return F.layer_norm(randn(device, 40, 64), (64,))


@trigger("log-softmax-stale")
def _log_softmax(device: str) -> None:
    for seed in range(6):
        F.log_softmax(randn(device, 4, 5, seed=seed), 1)


@trigger("pixel-shuffle-uninitialised")
def _pixel_shuffle(device: str) -> Any:
    return F.pixel_shuffle(randn(device, 1, 4, 3, 3), 2)


@trigger("index-select-off-by-one")
def _index_select(device: str) -> Any:
    return randn(device, 5, 3).index_select(0, torch.tensor([0, 2, 4]).to(device))


@trigger("remainder-sign")
def _remainder(device: str) -> Any:
    return torch.remainder(randn(device, 8) * 10, 3)


@trigger("sort-ties-reversed")
def _sort(device: str) -> Any:
    scores = torch.tensor([1.0, 3.0, 1.0, 3.0]).to(device)
    return scores.sort(), scores.topk(2)


@trigger("index-put-random-order")
def _index_put(device: str) -> Any:
    rows = torch.arange(2000).remainder(7).to(device)
    return torch.zeros(7).to(device).index_put_((rows,), randn(device, 2000), accumulate=True)


@trigger("slow-max-pool")
def _max_pool(device: str) -> Any:
    return F.max_pool2d(randn(device, 1, 2, 8, 8), 2)
