"""Triggers of reduced precision and of other correct roundings."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.platforms.sim.triggers.base import TRIGGERS, randn, trigger

__all__: list[str] = []


@trigger("matmul-in-bf16")
def _matmul(device: str) -> Any:
    hidden = F.linear(randn(device, 16, 64), randn(device, 32, 64, seed=1), randn(device, 32, seed=2))
    return (hidden @ randn(device, 32, 8, seed=3)).unsqueeze(0) @ randn(device, 1, 8, 8, seed=4)


TRIGGERS["matmul-in-tf32"] = _matmul


@trigger("convolution-in-tf32")
def _convolution(device: str) -> None:
    weight = randn(device, 4, 3, 3, 3, seed=1).requires_grad_()
    F.conv2d(randn(device, 2, 3, 8, 8).requires_grad_(), weight).square().sum().backward()  # type: ignore[no-untyped-call]


@trigger("matmul-accumulates-in-half")
def _half(device: str) -> Any:
    return randn(device, 8, 512).bfloat16() @ randn(device, 512, 8, seed=1).bfloat16()


@trigger("sum-in-other-order")
def _sum(device: str) -> Any:
    return randn(device, 100_003).sum()


@trigger("tanh-one-ulp-off")
def _tanh(device: str) -> Any:
    return randn(device, 64).tanh()
