"""The description of values that were seen: which `Fill` gives values of their kind.

Spreads and edges are rounded to powers of two: the weights of two layers then have one description, and graphs that
differ in nothing else have one identity.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from shadowrun.studies.zoo.graph import Fill, Input

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["described", "fitted"]

_FEW: Final = 2
# Integers beyond it are no float64, which a fill has.
_MAX_EXACT: Final = 1 << 53


def described(
    name: str, t: torch.Tensor, *, role: str = "input", requires_grad: bool = False, strides: bool = True
) -> Input:
    """An input with the form of a tensor, and values of its kind.

    Args:
        name: Of the input.
        t: A strided tensor on any device. Its storage offset is left out.
        role: As `Input.role`.
        requires_grad: As `Input.requires_grad`.
        strides: Keep strides that are not those of a contiguous tensor.
    """
    keeps = strides and not t.is_contiguous()
    steps = tuple(int(s) for s in t.stride()) if keeps else ()
    return Input(name, tuple(t.shape), t.dtype, fitted(t), steps, 0, requires_grad, role)


def fitted(t: torch.Tensor) -> Fill:
    """The fill whose values are most like these: constants and patterns exactly, others by range or spread."""
    t = t.detach()
    if t.dtype is torch.bool:
        return _of_two(t, 0.0, 1.0) if t.numel() else Fill("bools", 0.5)
    if not t.numel():
        return Fill("constant", 0.0)
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    # float64 holds each value of the shorter dtypes exactly, so that patterns are found by equality.
    x = t.to(device="cpu", dtype=torch.float64)
    low, high = float(x.min()), float(x.max())
    if low == high:
        return Fill("constant", low)
    floats = t.is_floating_point()
    # With a NaN among the values, minimum and maximum are NaN.
    if not math.isnan(low):
        two = _of_two(x, low, high) if _has_two(x, low, high) else None
        if two is not None:
            return two
        line = _line(x)
        if line is not None:
            return line
    return _of_floats(x, torch.finfo(t.dtype).max) if floats else _of_integers(low, high)


def _has_two(x: torch.Tensor, low: float, high: float) -> bool:
    # Of two elements, any two values are a pair: that says nothing.
    return x.numel() > _FEW and bool(((x == low) | (x == high)).all())


def _of_two(x: torch.Tensor, low: float, high: float) -> Fill:
    """Values of which there are two: a triangle, or drawn with their share."""
    is_high = x == high
    if is_high.all() or not is_high.any():
        return Fill("constant", high if is_high.any() else low)
    if x.dim() >= 2 and min(x.shape[-2:]) > 1:
        rows, columns = x.shape[-2:]
        # Of a mask with more columns than rows, the last column belongs to the last row: keys that were cached come
        # first.
        below = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows).expand(x.shape)
        if torch.equal(is_high.cpu(), below):
            return Fill("triangle", high, low)
        if torch.equal(is_high.cpu(), ~below):
            return Fill("triangle", low, high)
    if (low, high) == (0.0, 1.0):
        # In eighths, and never all or none: two masks of nearly one share have one description.
        return Fill("bools", min(max(round(float(is_high.double().mean()) * 8), 1), 7) / 8)
    return Fill("choice", low, high)


def _line(x: torch.Tensor) -> Fill | None:
    """Each row is start, start + step, … exactly."""
    if not x.dim() or x.shape[-1] <= _FEW or not torch.isfinite(x).all():
        return None
    rows = x.reshape(-1, x.shape[-1])
    start, step = float(rows[0, 0]), float(rows[0, 1] - rows[0, 0])
    line = start + step * torch.arange(x.shape[-1], dtype=torch.float64)
    if torch.equal(rows, line.expand(rows.shape)):
        return Fill("arange", start, step)
    if torch.equal(rows.sort(-1).values, torch.arange(x.shape[-1], dtype=torch.float64).expand(rows.shape)):
        return Fill("permutation")
    return None


def _of_integers(low: float, high: float) -> Fill:
    edges = [max(-_MAX_EXACT, min(_MAX_EXACT, v)) for v in (low, high)]
    # From 1 on where all were positive: an index stays in range, and a divisor is not zero.
    return Fill("integers", min(edges[0], 1.0), edges[1])


def _of_floats(x: torch.Tensor, largest: float) -> Fill:
    finite = x[torch.isfinite(x)]
    if not finite.numel():
        return Fill("constant", float(x.reshape(-1)[0]))
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return Fill("constant", low)
    # Values of one sign keep it: they may be variances, or arguments of a logarithm.
    if low >= 0:
        return Fill("uniform", _rounded(low, math.floor), min(_rounded(high, math.ceil), largest))
    if high <= 0:
        return Fill("uniform", max(-_rounded(-low, math.ceil), -largest), -_rounded(-high, math.floor))
    mean, std = float(finite.mean()), float(finite.std(correction=0))
    if not 0 < std < largest / 8:  # else values would be infinite
        return Fill("choice", low, high)
    std = _rounded(std, round)
    # The mean in steps of the deviation: small means of two layers are both 0.
    return Fill("normal", round(mean / std) * std, std)


def _rounded(value: float, how: Callable[[float], int]) -> float:
    """A power of two near a number >= 0."""
    return math.ldexp(1.0, min(how(math.log2(value)), 1023)) if value > 0 else 0.0
