"""How far rounding moves norms and softmaxes: the standard deviation of each element, in closed form.

The oracle perturbs each input by about a unit roundoff and takes the spread of the results for the condition. For these
operators the first derivatives are known, so the variance that such perturbations have is a few sums over each row:
it needs no further run. `judge.rounding.closeness` holds the distance from the reference against it.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.operators.case import Case

__all__ = ["has_row_sizes", "row_sizes"]

Sizes = tuple[torch.Tensor, ...]


def has_row_sizes(op: str) -> bool:
    """Whether `row_sizes` knows an operator, by its qualified name."""
    return op in _FORMULAS


def row_sizes(case: Case) -> Sizes | None:
    """Standard deviation of each result where each input is off by a unit roundoff, in unit roundoffs.

    Values that are not finite mean: not known. None where the results are not those of the formula.
    """
    named = case.arguments()
    sizes = _FORMULAS[case.op](named, case.expected)
    if len(sizes) != len(case.expected):
        # A gradient that is not wanted is no result.
        wanted = named.get("output_mask", ())
        sizes = tuple([size for size, is_wanted in zip(sizes, wanted, strict=False) if is_wanted])
    return sizes if [_n_elements(s) for s in sizes] == [_n_elements(e) for e in case.expected] else None


def _layer_norm(named: dict[str, Any], _: Any) -> Sizes:
    x, shape, weight, bias = named["input"], named["normalized_shape"], named["weight"], named["bias"]
    rows, n = _inner(shape), prod(shape)
    variance, mean = torch.var_mean(x, rows, correction=0, keepdim=True)
    rstd = (variance + named["eps"]).rsqrt()
    normal = (x - mean) * rstd
    square = x * x
    found = _of_normal(square, normal, rows, n)
    of_mean = square.sum(rows, True).sqrt() / n
    of_rstd = rstd * rstd * (square * normal * normal).sum(rows, True).sqrt() / n
    found = found * rstd * rstd
    if weight is not None:
        # The weight is off as well.
        found = (found + normal * normal) * (weight * weight)
    if bias is not None:
        found = found + bias * bias
    return _root(found), of_mean, of_rstd


def _of_normal(square: torch.Tensor, normal: torch.Tensor, rows: tuple[int, ...], n: int) -> torch.Tensor:
    """Sum over j of ``square_j * (delta_ij - (1 + normal_i normal_j) / n) ** 2``: the derivative of a normalization."""
    s0 = square.sum(rows, True)
    s1, s2 = (square * normal).sum(rows, True), (square * normal * normal).sum(rows, True)
    own = square * (1 - 2 * (1 + normal * normal) / n)
    return own + (s0 + normal * (2 * s1 + normal * s2)) / (n * n)


def _layer_norm_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, x, shape, weight = named["grad_out"], named["input"], named["normalized_shape"], named["weight"]
    mean, rstd = named["mean"], named["rstd"]
    rows, n = _inner(shape), prod(shape)
    batch = tuple(range(x.dim() - len(shape)))
    normal = (x - mean) * rstd
    a = grad if weight is None else grad * weight
    c1, c2 = a.mean(rows, True), (a * normal).mean(rows, True)
    # The gradient and the weight are off each by itself, and enter alike.
    of_factors = _of_normal(a * a, normal, rows, n) * (1.0 if weight is None else 2.0)
    scaled = x * x * rstd * rstd
    of_x = scaled * c2 * (c2 + 2 * normal * a / n) + normal * normal * (a * a * scaled).sum(rows, True) / (n * n)
    of_mean = (mean * rstd * (c2 + normal * c1)).square()
    of_rstd = (a - c1 - 3 * normal * c2).square()
    of_input = _root(rstd * rstd * (of_factors + of_x + of_mean + of_rstd))
    square = grad * grad
    moved = square * (2 * normal * normal + scaled + (mean * rstd).square())
    if not batch:
        return of_input, _root(moved), _root(square)
    return of_input, moved.sum(batch).sqrt(), square.sum(batch).sqrt()


def _softmax(named: dict[str, Any], expected: Any) -> Sizes:
    x, y, dim = named["self"], expected[0], named["dim"]
    # What is masked out by -inf is 0, and stays so.
    x = x.masked_fill(y == 0, 0.0)
    return (y * _root(x * x * (1 - 2 * y) + (x * y).square().sum(dim, True)),)


def _softmax_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, y, dim = named["grad_output"], named["output"], named["dim"]
    product = grad * y
    rest = grad - product.sum(dim, True)
    both = 2 * product.square().sum(dim, True)
    return (y * _root(grad * grad * (1 - 2 * y) + both + rest * (rest - 2 * product)),)


def _log_softmax(named: dict[str, Any], expected: Any) -> Sizes:
    x, y, dim = named["self"], expected[0].exp(), named["dim"]
    return (_root(x * x * (1 - 2 * y) + (x * y).square().sum(dim, True)),)


def _log_softmax_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, out, dim = named["grad_output"], named["output"], named["dim"]
    y, square = out.exp(), grad * grad
    moved = (y * out * grad.sum(dim, True)).square()
    return (_root(square * (1 - 2 * y) + y * y * square.sum(dim, True) + moved),)


def _n_elements(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else -1


def _root(variance: torch.Tensor) -> torch.Tensor:
    # Terms that cancel may leave a rounding error below 0.
    return variance.clamp_min(0.0).sqrt()


def _inner(shape: Any) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


_FORMULAS: dict[str, Callable[[dict[str, Any], Any], Sizes]] = {
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_softmax": _softmax,
    "aten::_safe_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_log_softmax": _log_softmax,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
}
