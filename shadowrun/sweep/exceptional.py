"""Exceptional values of a dtype: NaN with payload, infinities, zeros, subnormals, and the edges of the range."""

from __future__ import annotations

import math

import torch

__all__ = ["bounded", "exceptional", "ordinary", "several"]

_ORDINARY = (0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 3.0, -7.25, 0.1, -0.1, 10.0, math.pi, -math.e, 0.75)
_INTEGERS = (2.0**24 + 1, 2.0**31, -(2.0**31), 2.0**31 - 128, 2.0**32, 2.0**53, 2.0**53 - 1, 2.0**63, 255.0, 127.5)
_VIEWS = {
    **dict.fromkeys((torch.float16, torch.bfloat16), torch.int16),
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_LAST = 37
"""Elements past a multiple of every vector's length: they go through the tail of a loop."""


def exceptional(dtype: torch.dtype) -> torch.Tensor:
    """All exceptional values of a dtype, among ordinary ones.

    Args:
        dtype: Of 16, 32 or 64 bits, or an integer or bool.

    Returns:
        One dimension. For floats NaN (quiet, negative, with payload), infinities, zeros, the smallest and greatest
        subnormal, the smallest normal and the greatest numbers, the places where exp, sinh and squares leave the range,
        2**31 and 2**53 where they can be held; for integers the least, the greatest and small numbers.
    """
    if dtype is torch.bool:
        return torch.tensor([True, False])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        few = (0, 1, 2, 3, 7, 100, 127, info.max, info.max - 1, info.min, info.min + 1, -1, -2, -3)
        return torch.tensor([v for v in few if info.min <= v <= info.max], dtype=dtype)
    return torch.cat([_nans(dtype), bounded(dtype, infinite=True, large=True)])


def bounded(dtype: torch.dtype, *, infinite: bool, large: bool) -> torch.Tensor:
    """Exceptional floats other than NaN.

    Args:
        dtype: A float of 16, 32 or 64 bits.
        infinite: With infinities.
        large: With numbers near the greatest, and those whose exponential or square is.
    """
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    found = [0.0, subnormal, info.smallest_normal - subnormal, info.smallest_normal, 2.5 * info.smallest_normal]
    if infinite:
        found.append(math.inf)
    if large:
        exp, least = math.log(info.max), math.log(info.smallest_normal)
        found += [info.max, info.max * (1 - info.eps), info.max / 2, math.sqrt(info.max), math.sqrt(info.max) * 1.01]
        found += [exp * (1 - 2 * info.eps), exp * (1 + 2 * info.eps), exp + 0.5 * math.log(2), exp + 2 * math.log(2)]
        found += [-least, -least + 1.0, math.log(subnormal), math.log2(info.max), math.log10(info.max)]
        found += [math.sqrt(info.smallest_normal), *_INTEGERS]
    values = torch.tensor(
        [*found, *(-v for v in found), *_ORDINARY, 1 + info.eps, 1 - info.eps / 2], dtype=torch.float64
    )
    # What the dtype cannot hold would become another infinity.
    values = values[values.isinf() | (values.abs() <= info.max)].to(dtype)
    return _distinct(values)


def ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The same numbers between -2 and 2 for the same shape, none of them zero."""
    n = math.prod(shape)
    values = torch.sin(torch.arange(1, n + 1, dtype=torch.float64) * 1.7) * 2.0
    return values.to(dtype).reshape(shape)


def several(values: torch.Tensor) -> torch.Tensor:
    """The values several times over, so that each is met in the vectors of a loop, and some again in its tail."""
    n = values.numel()
    tail = values[torch.arange(_LAST) * 5 % n] if n else values
    return torch.cat([values, values.flip(0), tail])


def _nans(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.tensor([math.nan], dtype=dtype).view(_VIEWS[dtype])
    return torch.cat([bits, bits | 5, bits | torch.iinfo(bits.dtype).min]).view(dtype)


def _distinct(values: torch.Tensor) -> torch.Tensor:
    """Each once, by bits: the zeros differ."""
    bits = values.view(_VIEWS[values.dtype]).tolist()
    return torch.tensor(list(dict.fromkeys(bits)), dtype=_VIEWS[values.dtype]).view(values.dtype)
