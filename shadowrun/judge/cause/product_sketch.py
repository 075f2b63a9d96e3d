"""How far a matrix product is from that of rounded factors, without the product: its columns added with random signs.

For a vector r of signs, ``P r`` and ``A (B r)`` are equal if ``P = A B``, and the latter takes as long as reading the
matrices (Freivalds 1977, *Probabilistic machines can use less running time*). With ``E = P - A B``, the squares of
``E r`` have the expectation of those of E, and an element of E that is large appears in its row of ``E r``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

import torch

if TYPE_CHECKING:
    from shadowrun.numerics.input_roundings import InputRounding
    from shadowrun.operators.case import Case, Value

__all__ = ["MIN_ROWS", "ProductSketch", "sketch_product"]

MIN_ROWS: Final = 64
"""The estimate of a norm from so many squares is within a quarter of it in 99 of 100 cases."""
_MIN_SIZE: Final = 1 << 17
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
    if not _is_matrix(left) or not _is_matrix(right) or not _is_matrix(actual) or left.dim() != actual.dim():
        return None
    if actual.numel() * left.shape[-1] < _MIN_SIZE or actual.numel() < MIN_ROWS * actual.shape[-1]:
        return None
    with torch.no_grad():
        signs = _signs(actual.shape[-1])
        product = rounding.times(left.detach(), rounding.times(right.detach(), signs))
        if added is not None:
            product = _plus(product, named, rounding, actual, only_operands=only_operands)
        rest = torch.matmul(actual.detach(), signs).sub_(product).reshape(-1)
        return ProductSketch(float(torch.dot(rest, rest)) ** 0.5, float(rest.abs_().max()))


def _plus(
    product: torch.Tensor,
    named: dict[str, Any],
    rounding: InputRounding,
    actual: torch.Tensor,
    *,
    only_operands: bool,
) -> torch.Tensor:
    """``beta * added + alpha * product`` of sketches."""
    added: torch.Tensor = named["self"].detach()
    signs, alpha, beta = _signs(actual.shape[-1]), float(named["alpha"]), float(named["beta"])
    product = product * alpha
    # What is multiplied by 0 is not read: NaN there is no NaN in the result.
    if beta == 0:
        return product
    added = added if only_operands else rounding(added)
    is_bias = added.shape == actual.shape[-1:]
    return product + beta * (torch.dot(added, signs) if is_bias else added.expand_as(actual) @ signs)


def _is_matrix(t: object) -> TypeGuard[torch.Tensor]:
    return isinstance(t, torch.Tensor) and t.dim() >= 2 and t.dtype is torch.float32 and t.layout is torch.strided


@functools.lru_cache(maxsize=64)
def _signs(n: int) -> torch.Tensor:
    """(n,) of 1 and -1, always the same ones; the program's generator is left alone."""
    generator = torch.Generator(device="cpu").manual_seed(n)
    bits = torch.randint(0, 2, (n,), generator=generator, device="cpu", dtype=torch.float32)
    return bits.mul_(2).sub_(1)
