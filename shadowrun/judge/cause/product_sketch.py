"""How far a matrix product is from that of rounded factors, without the product: its columns added with random factors.

For a random vector r, ``P r`` and ``A (B r)`` are equal if ``P = A B``, and the latter takes as long as reading the
matrices (Freivalds 1977, *Probabilistic machines can use less running time*). With ``E = P - A B``, the squares of
``E r`` have the expectation of those of E, and an element of E that is large appears in its row of ``E r``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, NamedTuple, TypeGuard

import torch

if TYPE_CHECKING:
    from shadowrun.numerics.input_roundings import InputRounding
    from shadowrun.operators.case import Case, Value

__all__ = ["MIN_ROWS", "MIN_SIZE", "ProductSketch", "factors_of", "is_matrix", "random_vector", "sketch_product"]

MIN_ROWS: Final = 64
"""The estimate of a norm from so many squares is within a quarter of it in 99 of 100 cases."""
MIN_SIZE: Final = 1 << 15
"""Products of less multiplications are computed as soon."""
# Operator: its factors, and what is added to their product.
_PRODUCTS: Final = {
    "aten::mm": ("self", "mat2", ""),
    "aten::addmm": ("mat1", "mat2", "self"),
    "aten::bmm": ("self", "mat2", ""),
    "aten::baddbmm": ("batch1", "batch2", "self"),
}


class ProductSketch(NamedTuple):
    """Of E, the distance of a result from the product of changed factors.

    Attributes:
        norm: Its 2-norm, estimated.
        greatest: Greatest absolute value of ``E r``. An element of E is as great at most, apart from what the others in
            its row add up to.
    """

    norm: float
    greatest: float


def sketch_product(case: Case, actual: Value, rounding: InputRounding, *, only_operands: bool) -> ProductSketch | None:
    """Compare a result with the product of rounded inputs.

    Args:
        case: A call with inputs of float32.
        actual: The result.
        rounding: Of the inputs.
        only_operands: Leave what is added to the product as it is.

    Returns:
        None for other operators than matrix products, small ones, and other inputs.
    """
    names = _PRODUCTS.get(case.op)
    if names is None or not isinstance(actual, torch.Tensor):
        return None
    named = case.arguments()
    left, right, added = (named.get(name) for name in names)
    if not is_matrix(left) or not is_matrix(right) or not is_matrix(actual) or left.dim() != actual.dim():
        return None
    left, right, actual = left.detach(), right.detach(), actual.detach()
    # What is multiplied by 0 is not read: NaN there is no NaN in the result.
    added = None if added is None or named["beta"] == 0 else added.detach()
    if added is not None and not only_operands:
        added = rounding(added)
    if actual.shape[-2] == 1:
        # It takes as long to compute the only row as to add it up.
        added = None if added is None else added.expand_as(actual).mT
        left, right, actual = right.mT, left.mT, actual.mT
    if actual.numel() * left.shape[-1] < MIN_SIZE or actual.numel() < MIN_ROWS * actual.shape[-1]:
        return None
    vector = random_vector(actual.shape[-1])
    start = None
    if added is not None:
        # A bias is added to each row.
        start = (added.expand(*added.shape[:-1], len(vector)) @ vector).mul_(-float(named["beta"]))
        start = start.expand(actual.shape[:-1]).contiguous()
    factor = -float(named.get("alpha", 1))
    return ProductSketch(*rounding.distance(left, right, actual, vector, factor, start))


def factors_of(case: Case) -> tuple[torch.Tensor, ...]:
    """Both factors of a matrix product; empty for other operators."""
    names = _PRODUCTS.get(case.op)
    if names is None:
        return ()
    named = case.arguments()
    return named[names[0]], named[names[1]]


def is_matrix(t: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor of float32 that has rows and columns."""
    return isinstance(t, torch.Tensor) and t.dim() >= 2 and t.dtype is torch.float32 and t.layout is torch.strided


@functools.lru_cache(maxsize=64)
def random_vector(n: int) -> torch.Tensor:
    """(n,) of either sign and about 1, always the same ones; the program's generator is left alone."""
    generator = torch.Generator(device="cpu").manual_seed(n)
    bits, sizes = torch.rand(2, n, generator=generator, device="cpu", dtype=torch.float32)
    # Of one size, they would cancel where two elements are exchanged, or all are off by the same.
    return torch.where(bits < 0.5, -1.0, 1.0).mul_(sizes.mul_(0.5).add_(0.75))
