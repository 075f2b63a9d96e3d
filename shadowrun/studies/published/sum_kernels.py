"""Operators whose order of additions the probe reveals, and their inputs.

Masks are put into one input, and the other holds ones: products are exact, so that a fused multiply-add makes no
difference, and every element of the result is the sum of the same summands.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import UsageError
from shadowrun.studies.published.mask_probe import SumKernel

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KERNELS", "MAX_SUMMANDS", "kernel_of", "read_shape"]

# A pairwise order of n takes n/2 log2(n) calls, half of `MAX_CALLS` at 4096.
MAX_SUMMANDS = 4096
MAX_ELEMENTS = 1 << 24

_aten = torch.ops.aten


def _sum(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    if len(shape) == 1:
        return _aten.sum.default, shape[0], lambda s: (s,)
    rows, n = shape
    return _aten.sum.dim_IntList, n, lambda s: (s.repeat(rows, 1), [-1])


def _sum_dim0(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    n, columns = shape
    return _aten.sum.dim_IntList, n, lambda s: (s[:, None].repeat(1, columns), [0])


def _dot(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    return _aten.dot.default, shape[0], lambda s: (s, torch.ones_like(s))


def _mv(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    rows, n = shape
    return _aten.mv.default, n, lambda s: (s.repeat(rows, 1), torch.ones_like(s))


def _mm(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    rows, n, columns = shape
    return _aten.mm.default, n, lambda s: (s.repeat(rows, 1), s.new_ones(n, columns))


def _bmm(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    batch, rows, n, columns = shape
    return _aten.bmm.default, n, lambda s: (s.repeat(batch, rows, 1), s.new_ones(batch, n, columns))


def _conv(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    batch, channels, height, width, filters, side = shape
    # No padding: windows at an edge would have fewer summands.
    options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    def inputs(s: torch.Tensor) -> tuple[Any, ...]:
        weight = s.reshape(1, channels, side, side).repeat(filters, 1, 1, 1)
        return (s.new_ones(batch, channels, height, width), weight, *options)

    return _aten.convolution.default, channels * side * side, inputs


KERNELS = {
    "sum": (_sum, ("n", "rows x n"), ((64,), (8, 64))),
    "sum_dim0": (_sum_dim0, ("n x columns",), ((64, 8),)),
    "dot": (_dot, ("n",), ((64,),)),
    "mv": (_mv, ("rows x n",), ((8, 64),)),
    "mm": (_mm, ("rows x n x columns",), ((8, 64, 8),)),
    "bmm": (_bmm, ("batch x rows x n x columns",), ((2, 8, 64, 8),)),
    "conv": (_conv, ("batch x channels x height x width x filters x side",), ((1, 4, 8, 8, 8, 3),)),
}
"""Name to its inputs, the meaning of its sizes, and the shapes that are probed unless others are asked for."""


def kernel_of(name: str, shape: tuple[int, ...]) -> SumKernel:
    """An operator with inputs of a shape.

    Args:
        name: One of `KERNELS`.
        shape: Sizes, as `read_shape` reads them.

    Raises:
        UsageError: The number of sizes is wrong, or the shape is too large.
    """
    make, meanings, _ = KERNELS[name]
    if len(shape) not in {meaning.count(" x ") + 1 for meaning in meanings}:
        raise UsageError(
            f"--shape {name}={'x'.join(map(str, shape))}: {name} has the sizes {' or '.join(meanings)}.",
            slug="bad-option",
        )
    if name == "conv" and shape[5] > min(shape[2:4]):
        raise UsageError(f"--shape {name}: a window of {shape[5]} is larger than the input.", slug="bad-option")
    operator, n, inputs = make(shape)
    if n > MAX_SUMMANDS or math.prod(shape) > MAX_ELEMENTS:
        raise UsageError(
            f"--shape {name}={'x'.join(map(str, shape))}: at most {MAX_SUMMANDS:,} summands and "
            f"{MAX_ELEMENTS:,} products can be probed.",
            slug="bad-option",
        )
    return SumKernel(name, operator, shape, n, inputs)


def read_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read ``mm=8x64x8``.

    Raises:
        UsageError: Unknown operator, or no sizes.
    """
    name, _, sizes = text.partition("=")
    if name not in KERNELS:
        raise UsageError(f"--shape {text!r}: use one of {', '.join(KERNELS)}, as in mm=8x64x8.", slug="bad-option")
    words = sizes.lower().split("x")
    if not all(word.isascii() and word.isdecimal() and int(word[:9]) > 0 for word in words):
        raise UsageError(f"--shape {text!r}: sizes are whole numbers from 1 on, as in {name}=…x….", slug="bad-option")
    return name, tuple(int(word[:9]) for word in words)
