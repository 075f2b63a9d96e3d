"""Autocast on the device: the casts that autocast makes on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.sim import device
from shadowrun.platforms.sim.device import Kernel, NoTorchFunction

if TYPE_CHECKING:
    from torch.library import Library

__all__ = ["register"]

# The lists of at::autocast for the CPU (torch 2.13.0), so that the device computes what the CPU computes.
_LOWER = (
    "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "linalg_vecdot", "linear", "matmul", "mm", "prelu",
    "scaled_dot_product_attention",
)  # fmt: skip
_FLOAT32 = (
    "avg_pool3d", "binary_cross_entropy", "cosine_embedding_loss", "ctc_loss.IntList", "ctc_loss.Tensor", "huber_loss",
    "kl_div", "l1_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nanquantile", "nll_loss",
    "nll_loss2d", "poisson_nll_loss", "prod", "prod.dim_int", "quantile", "smooth_l1_loss", "trace",
    "triplet_margin_loss",
)  # fmt: skip
_WIDEST = ("cat", "stack", "index_copy")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype not in (torch.float64, dtype) and not value.is_cpu
        return value.to(dtype) if eligible else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(v, dtype) for v in value])
    return value


def _kernel(op: Any, dtype_of: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with NoTorchFunction():
            dtype = dtype_of(args)

            def cast_and_call() -> Any:
                return op(*(_cast(a, dtype) for a in args), **{k: _cast(v, dtype) for k, v in kwargs.items()})

            return device.below_autocast(cast_and_call)

    return kernel


def register() -> Library:
    """Registers the casts of autocast for the device."""

    def lower(_: Any) -> torch.dtype:
        return torch.get_autocast_dtype(device.current_name())

    def widest(args: Any) -> torch.dtype:
        values = args[0] if isinstance(args[0], (list, tuple)) else [a for a in args if isinstance(a, torch.Tensor)]
        return torch.float32 if any(v.dtype == torch.float32 for v in values) else lower(args)

    entries = [
        *((n, lower) for n in _LOWER),
        *((n, lambda _: torch.float32) for n in _FLOAT32),
        *((n, widest) for n in _WIDEST),
    ]
    pairs = [(f"aten::{n}", _kernel(device.overload(f"aten::{n}"), rule)) for n, rule in entries]
    return device.register(pairs, "AutocastPrivateUse1")
