"""Bring any tensor into the one form that arithmetic on values needs: strided, real, in memory."""

from __future__ import annotations

import torch

from shadowrun.numerics.bits import Uncomparable, resolved

__all__ = ["plain"]


def plain(t: torch.Tensor) -> torch.Tensor:
    """Strided real tensor with the values of `t`, sharing memory where it can.

    Complex tensors get a last dimension of 2 (real, imaginary). Sparse and MKL-DNN tensors become dense, nested ones
    flat, quantized ones are dequantized to float32.

    Args:
        t: CPU tensor of any layout.

    Raises:
        Uncomparable: If torch cannot convert it.
    """
    t = t.detach()
    try:
        if t.is_nested:
            t = torch.cat([part.reshape(-1) for part in t.unbind()]) if t.size(0) else torch.empty(0, dtype=t.dtype)
        elif t.layout is not torch.strided:
            t = t.to_dense()
        elif t.is_quantized:
            t = t.dequantize()
        t = resolved(t)
        return torch.view_as_real(t) if t.is_complex() else t
    except (RuntimeError, NotImplementedError) as error:
        raise Uncomparable(f"no dense values of a {t.layout} {t.dtype} tensor: {error}") from error
