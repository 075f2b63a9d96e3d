"""Triggers of missing kernels, missing dtypes and fallbacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.platforms.sim.triggers.base import randn, trigger

__all__: list[str] = []


@trigger("missing-cumsum")
def _cumsum(device: str) -> Any:
    return randn(device, 4, 5).cumsum(1)


@trigger("missing-cummax-helper")
def _cummax(device: str) -> Any:
    return randn(device, 4, 5).cummax(1)


@trigger("missing-lerp")
def _lerp(device: str) -> Any:
    return randn(device, 8).lerp_(randn(device, 8, seed=1), 0.1)


@trigger("missing-addcdiv")
def _adamw(device: str) -> None:
    weight = nn.Parameter(randn(device, 8))
    optimizer = torch.optim.AdamW([weight], foreach=True)
    weight.square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@trigger("missing-max-pool-backward")
def _max_pool(device: str) -> None:
    F.max_pool2d(randn(device, 1, 2, 8, 8).requires_grad_(), 2).sum().backward()  # type: ignore[no-untyped-call]


@trigger("histc-not-implemented")
def _histc(device: str) -> Any:
    return randn(device, 32).histc(8)


@trigger("kthvalue-err01007")
def _kthvalue(device: str) -> Any:
    return randn(device, 32).kthvalue(3)


@trigger("ctc-loss-not-lowered")
def _ctc(device: str) -> Any:
    logits = randn(device, 6, 2, 5).log_softmax(2)
    return F.ctc_loss(logits, torch.tensor([[1, 2], [3, 4]]).to(device), (6, 6), (2, 2))  # type: ignore[arg-type]


@trigger("group-norm-no-bf16")
def _group_norm(device: str) -> Any:
    return F.group_norm(randn(device, 2, 4, 3, 3).bfloat16(), 2)


@trigger("softplus-no-half")
def _softplus(device: str) -> Any:
    return F.softplus(randn(device, 8).half())


@trigger("no-float64")
def _float64(device: str) -> Any:
    return randn(device, 8).double() + 1


@trigger("fft-key-error")
def _fft(device: str) -> Any:
    return torch.fft.rfft(randn(device, 16))


@trigger("topk-device-error")
def _topk(device: str) -> Any:
    return randn(device, 32).topk(3)


@trigger("vector-norm-falls-back")
def _clip(device: str) -> None:
    layer = nn.Linear(4, 4).to(device)
    layer(randn(device, 2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 0.1, foreach=False)


@trigger("isin-falls-back")
def _isin(device: str) -> Any:
    return torch.isin(torch.arange(8).to(device), torch.tensor([2, 3, 5]).to(device))


@trigger("encoder-layer-falls-back")
def _encoder(device: str) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device).eval()
    with torch.no_grad():
        return layer(randn(device, 2, 3, 8))


@trigger("nll-loss-falls-back-silently")
def _cross_entropy(device: str) -> Any:
    return F.cross_entropy(randn(device, 4, 5), torch.tensor([0, 1, 2, 3]).to(device))


@trigger("bincount-stays-on-cpu")
def _bincount(device: str) -> Any:
    return torch.tensor([0, 1, 1, 3]).to(device).bincount()
