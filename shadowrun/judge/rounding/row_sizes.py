"""How far rounding moves norms, softmaxes and gradients of activations: the standard deviation of each element.

The oracle perturbs each input by about a unit roundoff and takes the spread of the results for the condition. For these
operators the first derivatives are known, so the variance that such perturbations have is a few sums over each row, or
over each channel of a batch norm, or a product at each element: it needs no further run.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.judge.rounding.attention_sizes import attention_gradient_sizes, attention_sizes, root

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

    Values that are not finite mean: not known. None where the results are not those of the formula. Inputs of 16 bits
    are taken as they are, with errors of float32: the sizes are for results in float32.
    """
    named = {name: _in_float32(value) for name, value in case.arguments().items()}
    sizes = _FORMULAS[case.op](named, tuple(map(_in_float32, case.expected)))
    if len(sizes) != len(case.expected):
        # A gradient that is not wanted is no result.
        wanted = named.get("output_mask", ())
        sizes = tuple([size for size, is_wanted in zip(sizes, wanted, strict=False) if is_wanted])
    return sizes if [_n_elements(s) for s in sizes] == [_n_elements(e) for e in case.expected] else None


# Each formula is written in place: a fresh tensor costs page faults, which take longer than the arithmetic on it.


def _layer_norm(named: dict[str, Any], _: Any) -> Sizes:
    x, shape = named["input"], named["normalized_shape"]
    return _normalization(x, _inner(shape), prod(shape), named["eps"], named["weight"], named["bias"])[:3]


def _batch_norm(named: dict[str, Any], expected: Any) -> Sizes:
    x, means, variances, eps = named["input"], named["running_mean"], named["running_var"], named["eps"]
    weight, bias, mean, variance = (_by_channel(named[k], x) for k in ("weight", "bias", "running_mean", "running_var"))
    if not named["training"]:
        rstd = (variance + eps).rsqrt_()
        normal = (x - mean).mul_(rstd)
        found = (x * x).add_(mean * mean).mul_(rstd * rstd).addcmul_(normal, normal, value=1.25)
        found = _with_affine(found, None, weight, bias)
        return root(found), *[e.abs() for e in expected[1:]]
    rows, n, momentum = _but_channels(x), x.numel() // x.shape[1], named["momentum"]
    out, of_mean, of_rstd, of_variance = _normalization(x, rows, n, eps, weight, bias)
    sizes = out, of_mean, of_rstd
    if means is None:
        return sizes
    of_variance = of_variance.flatten() * (n / max(1, n - 1))
    return *sizes, *[
        torch.hypot(value * (1 - momentum), moved.flatten() * momentum)
        for value, moved in ((means, of_mean), (variances, of_variance))
    ]


def _group_norm(named: dict[str, Any], _: Any) -> Sizes:
    shape = _groups(named)
    weight, bias = (t if t is None else t.view(1, *shape[1:3], 1) for t in (named["weight"], named["bias"]))
    return _normalization(named["input"].reshape(shape), (2, 3), prod(shape[2:]), named["eps"], weight, bias)[:3]


def _groups(named: dict[str, Any]) -> tuple[int, int, int, int]:
    """Images, groups, channels of a group, elements of a channel."""
    return named["N"], named["group"], named["C"] // named["group"], named["HxW"]


def _normalization(
    x: torch.Tensor, rows: tuple[int, ...], n: int, eps: float, weight: Any, bias: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sizes of a result, the mean, the reciprocal of the deviation, and the variance (of `n` elements)."""
    normal = x - x.mean(rows, True)
    square = normal * normal
    # `var_mean` on the CPU takes as long as fifty passes.
    rstd = square.mean(rows, True).add_(eps).rsqrt_()
    normal.mul_(rstd)
    torch.mul(x, x, out=square)
    of_mean = square.sum(rows, True).sqrt_().div_(n)
    found, of_normal, moved = _of_normal(square, normal, rows, n)
    moved.sqrt_().div_(n)
    found = _with_affine(found.mul_(rstd * rstd), of_normal, weight, bias)
    return root(found), of_mean, moved * rstd * rstd, moved.mul_(2.0).div_(rstd)


def _with_affine(found: torch.Tensor, of_normal: torch.Tensor | None, weight: Any, bias: Any) -> torch.Tensor:
    """Variances after the weight and the bias, which are off as well."""
    if weight is not None:
        found = (found if of_normal is None else found.add_(of_normal)).mul_(weight * weight)
    return found if bias is None else found.add_(bias * bias)


def _of_normal(
    square: torch.Tensor, normal: torch.Tensor, rows: tuple[int, ...], n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum over j of ``square_j * (delta_ij - (1 + normal_i normal_j) / n) ** 2``: the derivative of a normalization.

    Returns:
        The sum for each element i; ``normal ** 2``; the sum of ``square * normal ** 2`` over each row.
    """
    of_normal = normal * normal
    found = square * normal
    s0, s1 = square.sum(rows, True), found.sum(rows, True)
    s2 = found.mul_(normal).sum(rows, True)
    torch.add(of_normal, 1.0, out=found).mul_(-2.0 / n).add_(1.0).mul_(square)
    found.addcmul_(normal, s1, value=2.0 / (n * n)).addcmul_(of_normal, s2, value=1.0 / (n * n))
    return found.add_(s0, alpha=1.0 / (n * n)), of_normal, s2


def _layer_norm_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, x, shape, weight = named["grad_out"], named["input"], named["normalized_shape"], named["weight"]
    batch = tuple(range(x.dim() - len(shape)))
    # The gradient and the weight are off each by itself, and enter alike.
    a, factors = (grad, 1.0) if weight is None else (grad * weight, 2.0)
    found, moved, square = _normalization_backward(
        grad, a, x, named["mean"], named["rstd"], _inner(shape), prod(shape), factors
    )
    if batch:
        moved, square = moved.sum(batch), square.sum(batch)
    return found, root(moved), square.sqrt_()


def _rms_norm(named: dict[str, Any], expected: Any) -> Sizes:
    x, rows, n, weight = (*_rms(named), named["weight"])
    rstd = expected[1]
    square = (x * rstd).square_()
    # Sum over j of (n_i n_j) ** 2 (delta_ij - n_i n_j / n) ** 2, and the weight's own error.
    found = _of_rms(square, square, rows, n)
    if weight is not None:
        found = found.add_(square).mul_(weight * weight)
    return root(found), root((square * square).sum(rows, True)).div_(n).mul_(rstd)


def _rms_norm_backward(named: dict[str, Any], _: Any) -> Sizes:
    x, rows, n, weight = (*_rms(named), named["weight"])
    grad, rstd = named["grad_out"], named["rstd"]
    normal = x * rstd
    a = grad if weight is None else grad * weight
    product = a * normal
    mean = product.sum(rows, True).div_(n)
    # The gradient and the weight are off each by itself, and enter alike; x and the statistics enter both terms.
    found = _of_rms(a * a, normal * normal, rows, n).mul_(1.0 if weight is None else 2.0)
    moved = normal * normal
    of_x = (product * (1.0 / n) + mean).square_()
    of_x.add_((product * product).sum(rows, True), alpha=1.0 / (n * n)).mul_(moved)
    found.add_(of_x).add_((a - normal * (3.0 * mean)).square_())
    batch = tuple(range(x.dim() - len(named["normalized_shape"])))
    of_weight = (grad * normal).square_().mul_(3.0)
    return root(found).mul_(rstd), root(of_weight.sum(batch) if batch else of_weight)


def _rms(named: dict[str, Any]) -> tuple[torch.Tensor, tuple[int, ...], int]:
    shape = named["normalized_shape"]
    return named["input"], _inner(shape), prod(shape)


def _of_rms(values: torch.Tensor, square: torch.Tensor, rows: tuple[int, ...], n: int) -> torch.Tensor:
    """Sum over j of ``values_j * (delta_ij - normal_i normal_j / n) ** 2``, with the squares of the normals."""
    total = (values * square).sum(rows, True)
    return (square * (-2.0 / n)).add_(1.0).mul_(values).add_(square * total, alpha=1.0 / (n * n))


def _cudnn_batch_norm(named: dict[str, Any], expected: Any) -> Sizes:
    others = {"momentum": named["exponential_average_factor"], "eps": named["epsilon"]}
    # The running statistics are no results in its schema.
    return _batch_norm(named | others, expected)[:3]


def _cudnn_batch_norm_backward(named: dict[str, Any], expected: Any) -> Sizes:
    others = {"grad_out": named["grad_output"], "save_invstd": named["save_var"], "train": True}
    return _batch_norm_backward(named | others, expected)


def _batch_norm_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, x, rows = named["grad_out"], named["input"], _but_channels(named["input"])
    weight, mean, rstd = (_by_channel(named[k], x) for k in ("weight", "save_mean", "save_invstd"))
    if not named["train"]:
        mean = _by_channel(named["running_mean"], x)
        rstd = (_by_channel(named["running_var"], x) + named["eps"]).rsqrt_()
    # The weight is one factor of all elements of a channel, which moves them as their own rounding does.
    a, n = grad if weight is None else grad * weight, x.numel() // x.shape[1]
    found, moved, square = _normalization_backward(grad, a, x, mean, rstd, rows, n, 1.0)
    if not named["train"]:
        # A product of three, one of which is the root of a variance.
        found = (a * rstd).abs_().mul_(1.5)
    return found, root(moved.sum(rows)), square.sum(rows).sqrt_()


def _group_norm_backward(named: dict[str, Any], _: Any) -> Sizes:
    shape, weight = _groups(named), named["weight"]
    grad, x = named["grad_out"].reshape(shape), named["input"].reshape(shape)
    mean, rstd = (named[k].view(*shape[:2], 1, 1) for k in ("mean", "rstd"))
    # As in a layer norm, each channel of a row has a weight of its own.
    a, factors = (grad, 1.0) if weight is None else (grad * weight.view(1, *shape[1:3], 1), 2.0)
    found, moved, square = _normalization_backward(grad, a, x, mean, rstd, (2, 3), prod(shape[2:]), factors)
    return found, root(moved.sum((0, 3))), square.sum((0, 3)).sqrt_()


def _normalization_backward(
    grad: torch.Tensor,
    a: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    rows: tuple[int, ...],
    n: int,
    factors: float,
) -> Sizes:
    """Sizes of the input's gradient; the variances of each term of the weight's, and of the bias's."""
    normal = (x - mean).mul_(rstd)
    scratch = a * normal
    c1, c2 = a.mean(rows, True), scratch.mean(rows, True)
    square = a * a
    found, of_normal, _moved = _of_normal(square, normal, rows, n)
    found.mul_(factors)
    scaled = (x * x).mul_(rstd * rstd)
    # Of the input itself.
    found.addcmul_(of_normal, square.mul_(scaled).sum(rows, True), value=1.0 / (n * n))
    found.addcmul_(scratch.mul_(2.0 / n).add_(c2).mul_(scaled), c2)
    # Of the mean, and of the reciprocal of the deviation.
    torch.mul(normal, c2, out=scratch)
    found.add_(torch.sub(a, scratch, alpha=3.0, out=square).sub_(c1).square_())
    found.add_(torch.mul(normal, c1, out=scratch).add_(c2).mul_(mean * rstd).square_())
    of_input = root(found.mul_(rstd * rstd))
    torch.mul(grad, grad, out=square)
    return of_input, of_normal.mul_(2.0).add_(scaled).add_((mean * rstd).square_()).mul_(square), square


def _softmax(named: dict[str, Any], expected: Any) -> Sizes:
    x, y, dim = named["self"], expected[0], named["dim"]
    # What is masked out by -inf is 0, and stays so.
    square = x.masked_fill(y == 0, 0.0).square_()
    scratch = y * y
    total = scratch.mul_(square).sum(dim, True)
    found = torch.mul(y, -2.0, out=scratch).add_(1.0).mul_(square).add_(total)
    return (root(found).mul_(y),)


def _softmax_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, y, dim = named["grad_output"], named["output"], named["dim"]
    product = grad * y
    rest = grad - product.sum(dim, True)
    scratch = product * product
    both = scratch.sum(dim, True).mul_(2.0)
    found = torch.mul(y, -2.0, out=scratch).add_(1.0).mul_(grad).mul_(grad).add_(both)
    found.addcmul_(rest, product.mul_(-2.0).add_(rest))
    return (root(found).mul_(y),)


def _log_softmax(named: dict[str, Any], expected: Any) -> Sizes:
    square, y, dim = named["self"].square(), expected[0].exp(), named["dim"]
    total = (y * y).mul_(square).sum(dim, True)
    return (root(y.mul_(-2.0).add_(1.0).mul_(square).add_(total)),)


def _log_softmax_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, out, dim = named["grad_output"], named["output"], named["dim"]
    y, square = out.exp(), grad * grad
    moved = (y * out).mul_(grad.sum(dim, True)).square_()
    moved.addcmul_(y.square(), square.sum(dim, True))
    return (root(moved.add_(y.mul_(-2.0).add_(1.0).mul_(square))),)


def _tanh_backward(named: dict[str, Any], _: Any) -> Sizes:
    y = named["output"]
    return ((y * y).mul_(named["grad_output"]).mul_(2.0).abs_(),)


def _sigmoid_backward(named: dict[str, Any], _: Any) -> Sizes:
    y = named["output"]
    return (y.mul(-2.0).add_(1.0).mul_(y).mul_(named["grad_output"]).abs_(),)


def _silu_backward(named: dict[str, Any], expected: Any) -> Sizes:
    x = named["self"]
    s = x.sigmoid()
    # The derivative of s + x s (1 - s).
    slope = s.mul(-2.0).add_(1.0).mul_(x).add_(2.0)
    return (slope.mul_(s).mul_(1.0 - s).mul_(x).mul_(named["grad_output"]).hypot_(expected[0]),)


def _in_float32(value: Any) -> Any:
    is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.to(torch.float32) if is_short else value


def _n_elements(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else -1


def _by_channel(t: torch.Tensor | None, x: torch.Tensor) -> Any:
    return None if t is None else t.view(-1, *[1] * (x.dim() - 2))


def _but_channels(x: torch.Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _inner(shape: Any) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


_FORMULAS: dict[str, Callable[[dict[str, Any], Any], Sizes]] = {
    "aten::_fused_rms_norm": _rms_norm,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    "aten::cudnn_batch_norm": _cudnn_batch_norm,
    "aten::cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm_backward,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_softmax": _softmax,
    "aten::_safe_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_log_softmax": _log_softmax,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
    "aten::sigmoid_backward": _sigmoid_backward,
    "aten::silu_backward": _silu_backward,
    "aten::tanh_backward": _tanh_backward,
}
for _name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    _FORMULAS[f"aten::_scaled_dot_product_{_name}"] = attention_sizes
    _FORMULAS[f"aten::_scaled_dot_product_{_name}_backward"] = attention_gradient_sizes
