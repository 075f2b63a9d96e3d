"""Calls that take a tensor and give one of the same shape and dtype: what is inserted into a program.

Each is defined for all finite inputs: an operator with a smaller domain gets its argument through a guard. So a
variant stays a program whose results mean something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.studies.campaign.mutators.mutator import op_named
from shadowrun.studies.campaign.variants.tracing import Invalid
from shadowrun.studies.zoo.graph import DEVICE, Fill, Input

if TYPE_CHECKING:
    from shadowrun.studies.campaign.mutators.mutator import Edit
    from shadowrun.studies.campaign.variants.counter_rng import CounterRng
    from shadowrun.studies.zoo.graph import Ref

__all__ = ["BINARY", "FLOAT", "INTEGER", "LAYERS", "guarded"]

aten = torch.ops.aten

_ANY: Final = """
    relu tanh sigmoid neg abs sin cos erf erfc atan asinh silu gelu hardtanh hardswish hardsigmoid elu leaky_relu
    softplus mish celu selu relu6 log_sigmoid exp exp2 expm1 square floor ceil round trunc frac sign sgn tan sinh cosh
    sinc nan_to_num hardshrink softshrink positive rad2deg deg2rad special_i0e special_i1e special_i0
    special_i1 special_erfcx special_ndtr special_bessel_j0 special_bessel_j1 special_log_ndtr
""".split()  # noqa: SIM905
_POSITIVE: Final = "sqrt rsqrt log log2 log10 log1p reciprocal lgamma digamma special_entr".split()  # noqa: SIM905
_UNIT: Final = "asin acos atanh special_erfinv".split()  # noqa: SIM905
_ABOVE_ONE: Final = ("acosh",)
FLOAT: Final = (*_ANY, *_POSITIVE, *_UNIT, *_ABOVE_ONE)
"""Element-wise operators of floats with one argument."""
INTEGER: Final = ("neg", "abs", "square", "sign", "sgn", "positive", "bitwise_not", "clamp_max_7", "relu")
"""The same for integers."""

_PLAIN_BINARY: Final = """
    add.Tensor sub.Tensor mul.Tensor maximum minimum fmax fmin atan2 hypot copysign.Tensor logaddexp logaddexp2
    heaviside rsub.Tensor
""".split()  # noqa: SIM905
_GUARDED_BINARY: Final = "div.Tensor fmod.Tensor remainder.Tensor xlogy.Tensor floor_divide".split()  # noqa: SIM905
BINARY: Final = (*_PLAIN_BINARY, *_GUARDED_BINARY, "pow.Tensor_Tensor", "where", "lerp", "addcmul", "addcdiv")
"""Element-wise operators with two arguments that are broadcast."""
_INTEGER_BINARY: Final = frozenset({"add.Tensor", "sub.Tensor", "mul.Tensor", "maximum", "minimum", "where"})


def guarded(edit: Edit, name: str, x: Ref) -> Ref:
    """The argument of an operator, moved into its domain."""
    if name in _POSITIVE:
        return edit.call(aten.add.Scalar, edit.call(aten.abs.default, x), 0.5)
    if name in _UNIT:
        # Not to 1: asin, atanh and erfinv are steep there, and one unit of the argument's rounding would be many of the
        # result's.
        return edit.call(aten.mul.Scalar, edit.call(aten.tanh.default, x), 0.9)
    if name in _ABOVE_ONE:
        return edit.call(aten.add.Scalar, edit.call(aten.abs.default, x), 1.0)
    return x


def unary(edit: Edit, name: str, x: Ref) -> Ref:
    """An element-wise operator of `FLOAT` or `INTEGER`."""
    if name == "clamp_max_7":
        return edit.call(aten.clamp_max.default, x, 7)
    if name == "nan_to_num":
        # Its default for infinities is the largest number, which the next sum takes out of the range or not, by its
        # order.
        return edit.call(aten.nan_to_num.default, x, 0.0, 1.0, -1.0)
    return edit.call(op_named(name), guarded(edit, name, x))


def binary(edit: Edit, name: str, x: Ref, y: Ref, t: torch.Tensor) -> Ref:
    """An element-wise operator of `BINARY`.

    Raises:
        Invalid: It has no meaning for the dtype.
    """
    if not t.is_floating_point() and name not in _INTEGER_BINARY:
        raise Invalid(f"{name} of {t.dtype}")
    if name in _GUARDED_BINARY:
        # Divided by numbers near 0, the error of the divisor would be all of the result: no platform could be told
        # wrong.
        return edit.call(op_named(name), x, edit.call(aten.add.Scalar, edit.call(aten.abs.default, y), 0.5))
    if name == "pow.Tensor_Tensor":
        # A negative base to a broken power is NaN, and large exponents leave the range of 16 bits at once.
        base = edit.call(aten.add.Scalar, edit.call(aten.abs.default, x), 0.5)
        return edit.call(aten.pow.Tensor_Tensor, base, edit.call(aten.tanh.default, y))
    if name == "where":
        return edit.call(aten.where.self, edit.call(aten.gt.Tensor, x, y), x, y)
    if name == "lerp":
        return edit.call(aten.lerp.Scalar, x, y, 0.25)
    if name == "addcmul":
        return edit.call(aten.addcmul.default, x, y, y, value=0.5)
    if name == "addcdiv":
        below = edit.call(aten.add.Scalar, edit.call(aten.abs.default, y), 0.5)
        return edit.call(aten.addcdiv.default, x, y, below, value=0.5)
    return edit.call(op_named(name), x, y)


def _dim(t: torch.Tensor, rng: CounterRng) -> int:
    """A dimension, counted from either end."""
    if not t.dim():
        raise Invalid("no dimension")
    return rng.below(2 * t.dim()) - t.dim()


def _weight(edit: Edit, t: torch.Tensor, shape: list[int], *, mean: float = 0.0, std: float = 0.3) -> Ref:
    fill = Fill("normal", mean, std)
    return edit.input(Input("added", tuple(shape), t.dtype, fill, requires_grad=True, role="parameter"))


def _softmax(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    op = rng.choice((op_named("_softmax"), op_named("_log_softmax")))
    return edit.call(op, x, _dim(t, rng), False)


def _cumulative(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    d = _dim(t, rng)
    kind = rng.choice(("cumsum", "logcumsumexp", "cummax", "cummin", "cumprod"))
    # As in `_centred`: products of larger numbers leave the range, depending on the order of their factors.
    if kind == "cumprod":
        x = edit.call(aten.tanh.default, x)
    return edit.call(op_named(kind), x, d)


def _flip(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    return edit.call(aten.flip.default, x, [_dim(t, rng)])


def _roll(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    return edit.call(aten.roll.default, x, [rng.below(7) - 3], [_dim(t, rng)])


def _sort(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    return edit.call(aten.sort.default, x, _dim(t, rng), rng.chance(0.5))


def _topk(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    d = _dim(t, rng)
    # All elements of a row, sorted: of several equal ones, which are the k greatest is not defined.
    return edit.call(aten.topk.default, x, t.shape[d], d, rng.chance(0.5), True)


def _triangle(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    if t.dim() < 2:
        raise Invalid("less than two dimensions")
    return edit.call(rng.choice((aten.tril.default, aten.triu.default)), x, rng.below(5) - 2)


def _layer_norm(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    if not t.dim():
        raise Invalid("no dimension")
    # Over the last one or two dimensions, as in models; over one of size 1 the result is the bias, which is a case as
    # well.
    sizes = list(t.shape[-1 - rng.below(min(2, t.dim())) :])
    weight, bias = (_weight(edit, t, sizes, mean=m) for m in (1.0, 0.0)) if rng.chance(0.6) else (None, None)
    return edit.call(aten.native_layer_norm.default, x, sizes, weight, bias, rng.choice((1e-5, 1e-6, 1e-12)))


def _row_norm(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """Divided by a norm of the row."""
    d = _dim(t, rng)
    norm = edit.call(aten.linalg_vector_norm.default, x, rng.choice((1, 2, 3, 0.5)), [d], True)
    # With 0.1 added: a row of zeros has the norm 0.
    return edit.call(aten.div.Tensor, x, edit.call(aten.add.Scalar, norm, 0.1))


def _centred(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """Minus a statistic of the row."""
    d = _dim(t, rng)
    kind = rng.choice(("mean", "amax", "amin", "sum", "logsumexp", "var", "std", "prod", "median"))
    if kind == "median":
        statistic = edit.call(aten.median.dim, x, d, True)
    elif kind in ("var", "std"):
        if t.shape[d] < 2:
            raise Invalid("a variance of one value")
        statistic = edit.call(op_named(f"{kind}.correction"), x, [d], correction=rng.below(2), keepdim=True)
    # Of tanh: products of larger numbers leave the range, depending on the order of their factors.
    elif kind == "prod":
        statistic = edit.call(aten.prod.dim_int, edit.call(aten.tanh.default, x), d, True)
    else:
        name = {"mean": "mean.dim", "sum": "sum.dim_IntList"}.get(kind, kind)
        statistic = edit.call(op_named(name), x, [d], True)
    return edit.call(aten.sub.Tensor, x, statistic)


def _linear(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    if not t.dim():
        raise Invalid("no dimension")
    n = t.shape[-1]
    if not 0 < n <= 512:
        raise Invalid("rows too long for a product")
    flat = edit.call(aten.reshape.default, x, [t.numel() // n, n])
    # So that values keep their size: a hundred mutations would else overflow, or end in zeros.
    weight = _weight(edit, t, [n, n], std=round(n**-0.5, 3))
    if rng.chance(0.5):
        out = edit.call(aten.mm.default, flat, edit.call(aten.t.default, weight))
    else:
        out = edit.call(aten.addmm.default, _weight(edit, t, [n]), flat, weight)
    return edit.call(aten.view.default, out, list(t.shape))


def _attention(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """Each row attends to the others."""
    if t.dim() < 2 or not t.numel() or t.shape[-2] > 128:
        raise Invalid("no rows to attend to")
    three = edit.call(aten.reshape.default, x, [t.shape[:-2].numel(), *t.shape[-2:]])
    if rng.chance(0.5):
        scores = edit.call(aten.bmm.default, three, edit.call(aten.transpose.int, three, 1, 2))
        weights = edit.call(op_named("_softmax"), edit.call(aten.mul.Scalar, scores, 0.125), -1, False)
        out = edit.call(aten.bmm.default, weights, three)
    else:
        four = edit.call(aten.unsqueeze.default, three, 1)
        # As many keys as values: with fewer, a kernel of the CPU reads behind the end of the keys.
        attend = aten.scaled_dot_product_attention.default
        out = edit.call(attend, four, four, four, None, 0.0, rng.chance(0.5))
    return edit.call(aten.reshape.default, out, list(t.shape))


def _convolution(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    n = t.dim() - 2
    if n not in (1, 2, 3) or not t.numel() or t.shape[1] > 256:
        raise Invalid("no image")
    channels, depthwise, wide = t.shape[1], rng.chance(0.5), rng.chance(0.6)
    k, dilation = (3, 1 + rng.below(2)) if wide else (1, 1)
    groups = channels if depthwise else 1
    # The deviation of the weights is the root of its inverse, so that values keep their size through the layer.
    fan_in = (1 if depthwise else channels) * k**n
    weight = _weight(edit, t, [channels, channels // groups, *[k] * n], std=round(fan_in**-0.5, 3))
    bias = _weight(edit, t, [channels]) if rng.chance(0.5) else None
    # A layer keeps the shape, so that it fits anywhere: what reads the value was captured with its sizes.
    pad = dilation if k == 3 else 0
    return edit.call(
        aten.convolution.default, x, weight, bias, [1] * n, [pad] * n, [dilation] * n, False, [0] * n, groups
    )


def _pool(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    if t.dim() != 4 or not t.numel():
        raise Invalid("no image")
    if rng.chance(0.5):
        return edit.call(aten.max_pool2d_with_indices.default, x, [3, 3], [1, 1], [1, 1], [1, 1], False)
    return edit.call(aten.avg_pool2d.default, x, [3, 3], [1, 1], [1, 1], False, rng.chance(0.5))


def _resampled(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """Enlarged, and reduced again."""
    if t.dim() != 4 or not t.numel():
        raise Invalid("no image")
    size, kind = list(t.shape[2:]), rng.below(4)
    large = [2 * n + rng.below(2) for n in size]
    if kind == 0:
        return edit.call(op_named("_adaptive_avg_pool2d"), edit.call(aten.upsample_nearest2d.default, x, large), size)
    if kind == 1:
        large_one = edit.call(aten.upsample_bicubic2d.default, x, large, rng.chance(0.5))
        return edit.call(op_named("_adaptive_avg_pool2d"), large_one, size)
    align = rng.chance(0.5)
    large_one = edit.call(aten.upsample_bilinear2d.default, x, large, align)
    if kind == 2:
        return edit.call(aten.upsample_bilinear2d.default, large_one, size, align)
    return edit.call(aten.adaptive_max_pool2d.default, large_one, size)


def _group_norm(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    if t.dim() < 3 or not t.numel():
        raise Invalid("no channels")
    n, c, inner = t.shape[0], t.shape[1], t.shape[2:].numel()
    groups = rng.choice([g for g in (1, 2, 4, c) if c % g == 0])
    weight, bias = (_weight(edit, t, [c], mean=m) for m in (1.0, 0.0))
    whole = edit.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    return edit.call(aten.native_group_norm.default, whole, weight, bias, n, c, inner, groups, 1e-5)


def _batch_norm(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    # A variance needs two values in each channel.
    if t.dim() < 2 or t.numel() // max(t.shape[1], 1) < 2:
        raise Invalid("no batch")
    c = t.shape[1]
    weight, bias = (_weight(edit, t, [c], mean=m) for m in (1.0, 0.0))
    variance = Input("added", (c,), t.dtype, Fill("uniform", 0.5, 1.5), role="buffer")
    mean = Input("added", (c,), t.dtype, Fill("normal", 0.0, 0.3), role="buffer")
    stats = edit.input(mean), edit.input(variance)
    if rng.chance(0.5):
        return edit.call(op_named("_native_batch_norm_legit_no_training"), x, weight, bias, *stats, 0.1, 1e-5)
    # Never in evaluation without running statistics: that ends in a segmentation fault of the CPU's kernel.
    return edit.call(op_named("_native_batch_norm_legit.no_stats"), x, weight, bias, True, 0.1, 1e-5)


def _index_input(edit: Edit, sizes: list[int], n: int, *, once: bool) -> Ref:
    # From the shape at the time of the mutation: later ones leave alone what decides an index (`Draft.index_sources`).
    fill = Fill("permutation") if once else Fill("integers", 0, n - 1)
    return edit.input(Input("added", tuple(sizes), torch.int64, fill))


def _index_select(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    d = _dim(t, rng)
    n = t.shape[d]
    if not n:
        raise Invalid("nothing to select")
    return edit.call(aten.index_select.default, x, d, _index_input(edit, [n], n, once=rng.chance(0.5)))


def _gather(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    d = _dim(t, rng)
    if not t.numel():
        raise Invalid("nothing to gather")
    return edit.call(aten.gather.default, x, d, _index_input(edit, list(t.shape), t.shape[d], once=False))


def _scatter(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    d = _dim(t, rng)
    if not t.numel():
        raise Invalid("nowhere to scatter")
    index = _index_input(edit, list(t.shape), t.shape[d], once=False)
    if rng.chance(0.5):
        return edit.call(aten.scatter_add.default, x, d, index, x)
    kind = rng.choice(("sum", "mean", "amax", "amin"))
    return edit.call(aten.scatter_reduce.two, x, d, index, x, kind, include_self=rng.chance(0.5))


def _index_put(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """Rows added at indices; without duplicates, also written."""
    if not t.dim() or not t.shape[0]:
        raise Invalid("no rows")
    add = rng.chance(0.6)
    # Two writes to one place without adding: which is last is not defined.
    index = _index_input(edit, [t.shape[0]], t.shape[0], once=not add)
    return edit.call(aten.index_put.default, x, [index], x, add)


def _masked(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    mask = edit.input(Input("added", tuple(t.shape), torch.bool, Fill("bools", 0.3, 0.0)))
    if rng.chance(0.5):
        return edit.call(aten.masked_fill.Scalar, x, mask, rng.choice((0, 1, -1)))
    return edit.call(aten.where.self, mask, x, edit.call(aten.neg.default, x))


def _split_and_joined(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    d = _dim(t, rng)
    n = t.shape[d]
    if n < 2:
        raise Invalid("nothing to split")
    # Neither part is empty: the exchange of the two is then a change of the values, which a wrong offset would show.
    first = 1 + rng.below(n - 1)
    parts = edit.call(aten.split_with_sizes.default, x, [first, n - first], d)
    return edit.call(aten.cat.default, [parts._replace(output=1), parts], d)


def _padded_and_cut(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    if not t.dim():
        raise Invalid("no dimension")
    left, right, n = rng.below(3), rng.below(3), t.shape[-1]
    wide = edit.call(aten.constant_pad_nd.default, x, [left, right], rng.choice((0, 1, -2)))
    start = rng.below(left + right + 1)
    return edit.call(aten.slice.Tensor, wide, -1, start, start + n)


def _stacked(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    d = rng.below(t.dim() + 1)
    both = edit.call(aten.stack.default, [x, edit.call(aten.neg.default, x)], d)
    return edit.call(rng.choice((aten.amax.default, aten.amin.default)), both, [d])


def _transposed(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """The same values in transposed memory."""
    if t.dim() < 2:
        raise Invalid("less than two dimensions")
    a = rng.below(t.dim() - 1)
    b = a + 1 + rng.below(t.dim() - 1 - a)
    turned = edit.call(aten.transpose.int, x, a, b)
    whole = edit.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return edit.call(aten.transpose.int, whole, a, b)


def _channels_last(edit: Edit, x: Ref, t: torch.Tensor, _: CounterRng) -> Ref:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if t.dim() not in formats:
        raise Invalid("no image")
    return edit.call(aten.clone.default, x, memory_format=formats[t.dim()])


def _every_other(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """The same values in every other place of memory, behind an offset."""
    if not t.dim():
        raise Invalid("no dimension")
    # Memory with gaps comes about as in programs, by a select of a result: no call of a variant sets strides by hand.
    both = edit.call(aten.stack.default, [edit.call(aten.neg.default, x), x], t.dim())
    return edit.call(aten.select.int, both, -1, rng.below(2))


def _through_dtype(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """Converted, and back."""
    others = [d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16) if d is not t.dtype]
    y = edit.call(op_named("_to_copy"), x, dtype=rng.choice(others))
    y = edit.call(rng.choice((aten.tanh.default, aten.sin.default, aten.neg.default)), y)
    return edit.call(op_named("_to_copy"), y, dtype=t.dtype)


def _through_complex(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    # The CPU transforms no 16-bit numbers, and a program that the reference refuses is an invalid variant.
    if t.dtype not in (torch.float32, torch.float64) or not t.numel() or not t.dim():
        raise Invalid("no transform of this dtype")
    if rng.chance(0.5):
        y = edit.call(aten.fft_fft.default, x)
        return edit.call(rng.choice((aten.real.default, aten.imag.default, aten.abs.default)), y)
    z = edit.call(aten.complex.default, x, edit.call(aten.neg.default, x))
    return edit.call(rng.choice((aten.abs.default, aten.angle.default)), z)


def _scalar_operand(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """A tensor without dimensions as operand: it counts less in type promotion."""
    dtype = rng.choice((t.dtype, torch.float64, torch.int64))
    scalar = edit.call(aten.full.default, [], 2, dtype=dtype, device=DEVICE)
    return edit.call(rng.choice((aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)), x, scalar)


def _range_operand(edit: Edit, x: Ref, t: torch.Tensor, rng: CounterRng) -> Ref:
    """A row of numbers as operand, broadcast over the others."""
    if not t.dim():
        raise Invalid("no dimension")
    row = edit.call(aten.arange.default, t.shape[-1], dtype=t.dtype, device=DEVICE)
    scaled = edit.call(aten.mul.Scalar, row, 0.125)
    return edit.call(rng.choice((aten.add.Tensor, aten.maximum.default, aten.sub.Tensor)), x, scaled)


LAYERS: Final[dict[str, Any]] = {
    "softmax": _softmax,
    "cumulative": _cumulative,
    "flip": _flip,
    "roll": _roll,
    "sort": _sort,
    "topk": _topk,
    "triangle": _triangle,
    "layer-norm": _layer_norm,
    "row-norm": _row_norm,
    "centred": _centred,
    "linear": _linear,
    "attention": _attention,
    "convolution": _convolution,
    "pool": _pool,
    "resampled": _resampled,
    "group-norm": _group_norm,
    "batch-norm": _batch_norm,
    "index-select": _index_select,
    "gather": _gather,
    "scatter": _scatter,
    "index-put": _index_put,
    "masked": _masked,
    "split": _split_and_joined,
    "pad": _padded_and_cut,
    "stack": _stacked,
    "transposed": _transposed,
    "channels-last": _channels_last,
    "every-other": _every_other,
    "through-dtype": _through_dtype,
    "complex": _through_complex,
    "scalar-operand": _scalar_operand,
    "range-operand": _range_operand,
}
"""By name: functions that add a layer behind a floating value, with choices from a stream."""
