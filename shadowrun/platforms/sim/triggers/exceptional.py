"""Triggers of NaN, infinities, signed zeros, subnormals and the edges of the range."""

from __future__ import annotations

from typing import Any

import torch

from shadowrun.platforms.sim.triggers.base import randn, trigger

__all__: list[str] = []

_NAN, _INF = float("nan"), float("inf")


def _tensor(device: str, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device)


@trigger("maximum-drops-nan")
def _maximum(device: str) -> Any:
    return torch.maximum(_tensor(device, 1, _NAN, 3), _tensor(device, 0, 2, _NAN))


@trigger("reduced-max-drops-nan")
def _amax(device: str) -> Any:
    return _tensor(device, 1, _NAN, 3).amax()


@trigger("clamp-nan-to-bound")
def _clamp(device: str) -> Any:
    return _tensor(device, 1, _NAN, 3).clamp(0, 2)


@trigger("nan-to-zero-integer")
def _to_integer(device: str) -> Any:
    return _tensor(device, 1, _NAN, 3).to(torch.int32)


@trigger("tril-of-inf")
def _tril(device: str) -> Any:
    return torch.full((3, 3), -_INF).to(device).tril()


@trigger("baddbmm-beta-zero")
def _baddbmm(device: str) -> Any:
    unset = torch.full((2, 3, 3), _NAN).to(device)
    return torch.baddbmm(unset, randn(device, 2, 3, 4), randn(device, 2, 4, 3), beta=0)


@trigger("hypot-overflows")
def _hypot(device: str) -> Any:
    return torch.hypot(_tensor(device, 3e30, _INF, 3), _tensor(device, 4e30, _NAN, 4))


@trigger("sinh-overflows")
def _sinh(device: str) -> Any:
    return _tensor(device, 1, 89).sinh()


@trigger("cosh-overflows")
def _cosh(device: str) -> Any:
    return _tensor(device, 1, -89).cosh()


@trigger("exp-overflows-early")
def _exp(device: str) -> Any:
    return _tensor(device, 1, 88.5).exp()


@trigger("round-loses-zero-sign")
def _round(device: str) -> Any:
    return _tensor(device, -0.3, 0.3, 1.6).round()


@trigger("mul-flushes-subnormals")
def _mul(device: str) -> Any:
    return _tensor(device, 1e-30, 3e-39, 2) * _tensor(device, 1e-10, 1, 2)


@trigger("sqrt-nan-is-zero")
def _sqrt(device: str) -> Any:
    return _tensor(device, -1, 4).sqrt()
