"""How far a convolution or its gradients are from those of rounded inputs, by the sketch of a product: one channel.

A result is linear in each factor: its channels, added with random factors, are those of the factor that has the same
channels, convolved. So one channel is computed in the place of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.judge.cause.product_sketch import MIN_ROWS, MIN_SIZE, ProductSketch, is_matrix, random_vector

if TYPE_CHECKING:
    from collections.abc import Collection

    from shadowrun.numerics.input_roundings import InputRounding
    from shadowrun.operators.case import Case

__all__ = ["sketch_convolution"]

_HOW: Final = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_INPUT, _WEIGHT, _BIAS = range(3)
"""In ``output_mask``."""
_aten = torch.ops.aten


def sketch_convolution(
    case: Case, positions: Collection[int], rounding: InputRounding, *, only_operands: bool
) -> dict[int, ProductSketch | None]:
    """Compare results with those of rounded inputs.

    Args:
        case: A call with inputs of float32.
        positions: Of the results.
        rounding: Of the inputs.
        only_operands: Leave a bias as it is.

    Returns:
        By position; nothing for other operators, convolutions by groups, small ones, and other inputs.
    """
    named = case.arguments()
    sketch = {"aten::convolution": _forward, "aten::convolution_backward": _backward}.get(case.op)
    if sketch is None or named["groups"] != 1:
        return {}
    factors = [named[k] for k in ("grad_output", "input", "weight") if k in named]
    if not all(is_matrix(t) and t.dim() == factors[0].dim() > 2 for t in factors):
        return {}
    with torch.no_grad():
        return sketch(case, positions, rounding, only_operands)


def _forward(
    case: Case, _: Collection[int], rounding: InputRounding, only_operands: bool
) -> dict[int, ProductSketch | None]:
    named, result = case.arguments(), case.actual[0]
    x, weight, bias = named["input"].detach(), named["weight"].detach(), named["bias"]
    channel = 1 if named["transposed"] else 0  # of the result, in the weight
    if not _is_large(result, 1, weight.numel() // weight.shape[channel]):
        return {}
    how = [named[k] for k in _HOW]
    product = _aten.convolution.default(rounding(x), _added_up(weight, channel, rounding), None, *how)
    if bias is not None:
        bias = bias.detach() if only_operands else rounding(bias.detach())
        product += torch.dot(bias, random_vector(bias.numel()))
    return {0: _sketch(result, 1, product)}


def _backward(
    case: Case, positions: Collection[int], rounding: InputRounding, _: bool
) -> dict[int, ProductSketch | None]:
    named = case.arguments()
    gradient, x, weight = (named[k].detach() for k in ("grad_output", "input", "weight"))
    gradient, how = rounding(gradient), [named[k] for k in _HOW]
    in_weight = 0 if named["transposed"] else 1  # where the input's channels are
    found: dict[int, ProductSketch | None] = {}
    for position, which in enumerate(k for k, wanted in enumerate(named["output_mask"]) if wanted):
        if position not in positions:
            continue
        result: Any = case.actual[position]
        if which == _BIAS:
            rest = result.detach() - gradient.sum([0, *range(2, gradient.dim())])
            found[position] = ProductSketch(float(rest.norm()), float(rest.abs().max()))
            continue
        # Of the factor that has the form of the result, nothing else counts.
        if which == _INPUT:
            channel, n_terms = 1, weight.numel() // weight.shape[in_weight]
            factors = x.narrow(1, 0, 1), _added_up(weight, in_weight, rounding)
        else:
            channel, n_terms = in_weight, gradient.numel() // gradient.shape[1]
            factors = _added_up(x, 1, rounding), weight.narrow(in_weight, 0, 1)
        if not _is_large(result, channel, n_terms):
            return {}
        mask = [which == _INPUT, which == _WEIGHT, False]
        product = _aten.convolution_backward.default(gradient, *factors, None, *how, mask)[which]
        found[position] = _sketch(result, channel, product)
    return found


def _is_large(result: Any, channel: int, n_terms: int) -> bool:
    n: int = result.numel()
    return n * n_terms >= MIN_SIZE and n >= MIN_ROWS * result.shape[channel]


def _added_up(values: torch.Tensor, channel: int, rounding: InputRounding) -> torch.Tensor:
    """Rounded values with their channels added up to one."""
    first = values.transpose(1, channel)
    added = rounding.times(first.flatten(2).transpose(1, 2), random_vector(first.shape[1]))
    return added.view(first.shape[0], 1, *first.shape[2:]).transpose(1, channel)


def _sketch(result: Any, channel: int, product: torch.Tensor) -> ProductSketch:
    first = result.detach().transpose(1, channel).flatten(2)
    added = torch.matmul(random_vector(first.shape[1]), first)
    rest = added.sub_(product.transpose(1, channel).reshape(added.shape)).view(-1)
    return ProductSketch(float(torch.dot(rest, rest)) ** 0.5, float(rest.abs_().max()))
