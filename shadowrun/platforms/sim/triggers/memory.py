"""Triggers of effects on memory: what is read later shows them."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.platforms.sim.triggers.base import randn, trigger

__all__: list[str] = []


@trigger("layer-norm-centres-its-input")
def _layer_norm(device: str) -> Any:
    x = randn(device, 4, 6)
    return x + F.layer_norm(x, (6,))


@trigger("mul-writes-past-the-view")
def _mul(device: str) -> Any:
    table = randn(device, 4, 6)
    table[1:3].mul_(0.5)
    return table.abs()


@trigger("clone-aliases")
def _clone(device: str) -> Any:
    kept = randn(device, 4, 6)
    changed = kept.clone().add_(1)
    return kept, changed
