"""Triggers of wrong forms and of unusual ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.platforms.sim.triggers.base import randn, trigger

__all__: list[str] = []


@trigger("sigmoid-wrong-stride")
def _sigmoid(device: str) -> Any:
    return randn(device, 4, 5).sigmoid()


@trigger("argmax-int32")
def _argmax(device: str) -> Any:
    return randn(device, 4, 5).argmax(1)


@trigger("logsumexp-float32")
def _logsumexp(device: str) -> Any:
    return randn(device, 4, 5, dtype=torch.float64).logsumexp(1)


@trigger("leaky-relu-ignores-strides")
def _leaky_relu(device: str) -> Any:
    return F.leaky_relu(randn(device, 4, 5)), F.leaky_relu(randn(device, 4, 5).t())


@trigger("mul-inplace-lost")
def _mul(device: str) -> Any:
    table = randn(device, 4, 6)
    table[:, ::2].mul_(2.0)
    return table.mul_(3.0)
