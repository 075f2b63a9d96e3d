"""Inputs with exceptional values: NaN with payload, infinities, zeros, subnormals, and the limits of a dtype's range.

The kind of operator decides how its inputs are built. Element-wise operators get all values, with two operands all
pairs. Reductions get rows of ordinary numbers with one exceptional value, at several positions. Sorts and searches get
rows of all values in several orders. All other operators get the database's samples with exceptional values inserted.
No input is built for which the result depends on the algorithm, such as a sum with an intermediate overflow or the
Fourier transform of an infinity: two correct implementations may differ there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.studies.sweep.inputs import Sample, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["batches", "bounded", "exceptional", "ordinary", "probes", "repeat_with_tail"]


_ORDINARY = (0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 3.0, -7.25, 0.1, -0.1, 10.0, math.pi, -math.e, 0.75)
# Where floats stop to hold all integers, and integers of 8, 32 and 64 bits end; 2**31 - 128 is the last float32 below
# 2**31.
_INTEGERS = (2.0**24 + 1, 2.0**31, -(2.0**31), 2.0**31 - 128, 2.0**32, 2.0**53, 2.0**53 - 1, 2.0**63, 255.0, 127.5)
_VIEWS = {
    **dict.fromkeys((torch.float16, torch.bfloat16), torch.int16),
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# Number of extra elements: no multiple of any vector length, so the scalar tail of a vectorised loop runs too.
_TAIL = 37


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
    """Exceptional floats except NaN.

    Args:
        dtype: A float of 16, 32 or 64 bits.
        infinite: With infinities.
        large: With numbers near the maximum, and those whose exponential or square is near it.
    """
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    chosen = [0.0, subnormal, info.smallest_normal - subnormal, info.smallest_normal, 2.5 * info.smallest_normal]
    if infinite:
        chosen.append(math.inf)
    if large:
        exp, least = math.log(info.max), math.log(info.smallest_normal)
        chosen += [info.max, info.max * (1 - info.eps), info.max / 2, math.sqrt(info.max), math.sqrt(info.max) * 1.01]
        # Around the ends of exp (log(max)), and of sinh and cosh (log(2) later, since these halve the exponential).
        chosen += [exp * (1 - 2 * info.eps), exp * (1 + 2 * info.eps), exp + 0.5 * math.log(2), exp + 2 * math.log(2)]
        # The same for results that become subnormal or zero, and for the bases 2 and 10.
        chosen += [-least, -least + 1.0, math.log(subnormal), math.log2(info.max), math.log10(info.max)]
        chosen += [math.sqrt(info.smallest_normal), *_INTEGERS]
    values = torch.tensor(
        [*chosen, *(-v for v in chosen), *_ORDINARY, 1 + info.eps, 1 - info.eps / 2], dtype=torch.float64
    )
    # A number out of the range of the dtype would become one more infinity.
    values = values[values.isinf() | (values.abs() <= info.max)].to(dtype)
    return _distinct(values)


def ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers between -2 and 2, none of them zero; the same for the same shape."""
    n = math.prod(shape)
    # Never 0: 1.7 n is no multiple of pi. A formula, so that no generator is moved.
    values = torch.sin(torch.arange(1, n + 1, dtype=torch.float64) * 1.7) * 2.0
    return values.to(dtype).reshape(shape)


def repeat_with_tail(values: torch.Tensor) -> torch.Tensor:
    """The values repeated, so that the vector body of a loop meets each, and its scalar tail some of them."""
    n = values.numel()
    # In steps: the first values of the list are all of one kind.
    tail = values[torch.arange(_TAIL) * 5 % n] if n else values
    return torch.cat([values, values.flip(0), tail])


def _nans(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.tensor([math.nan], dtype=dtype).view(_VIEWS[dtype])
    # The lowest bits are the payload; the least integer has the bit of the sign only.
    return torch.cat([bits, bits | 5, bits | torch.iinfo(bits.dtype).min]).view(dtype)


def _distinct(values: torch.Tensor) -> torch.Tensor:
    """Remove duplicates."""
    # By bits, since -0.0 == 0.0, and both signs of zero are needed.
    bits = values.view(_VIEWS[values.dtype]).tolist()
    return torch.tensor(list(dict.fromkeys(bits)), dtype=_VIEWS[values.dtype]).view(values.dtype)


_MAX_MODIFIED = 6
_WIDTH = 37
# The last one is in the scalar tail: a row has no multiple of any vector length.
_POSITIONS = (0, 5, 18, _WIDTH - 1)
_CONVERSIONS: tuple[torch.dtype, ...] = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
)
# Operators on rows that accept any mix of values, with their arguments.
_SORTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sort", "argsort", "mode", "cummax", "cummin", "median", "nanmedian", "msort", "unique"), ()),
    **dict.fromkeys(("max.reduction_with_dim", "min.reduction_with_dim", "aminmax", "unique_consecutive"), ()),
    "topk": (5,),
    "kthvalue": (4,),
    "quantile": (0.5,),
    "nanquantile": (0.5,),
}
_WITHOUT_DIM = frozenset(("msort", "unique", "unique_consecutive"))
# Operators that reduce or scan along ``dim`` and are no `ReductionOpInfo` in the database.
_REDUCTIONS = frozenset(
    """
    cumsum cumprod logcumsumexp softmax log_softmax nn.functional.softmin logsumexp var_mean std_mean norm diff
    linalg.norm nn.functional.normalize max.reduction_no_dim min.reduction_no_dim masked.softmax masked.log_softmax
    masked.softmin masked.cumsum masked.cumprod masked.median
    """.split()  # noqa: SIM905
)
# Element-wise operators of one operand that are no `UnaryUfuncInfo` in the database, with their arguments.
_UNARY: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("nn.functional.hardswish", "nn.functional.leaky_relu", "clone", "zeros_like", "ones_like"), ({},)),
    "nn.functional.gelu": ({}, {"approximate": "tanh"}),
    "clamp": ({"min": -1.0, "max": 1.0}, {"max": 0.5}, {"min": 0.5}),
}
# The same for two operands.
_BINARY: dict[str, tuple[tuple[Any, ...], ...]] = {"logaddexp2": ((),), "lerp": ((0.3,),)}
_BETA = frozenset(("addmm", "addmv", "addbmm", "baddbmm", "addr"))
_DIVIDES = ("div", "fmod", "remainder", "rmod", "mod__", "true_divide")
# Their second operand is a degree, and a kernel may loop that many times: exceptional degrees would time out.
_POLYNOMIALS = ("polynomial", "special.zeta")
# Excluded: NaN as an index or a probability, decompositions, and formulas whose intermediate results may overflow.
_EXCLUDED = frozenset(
    """
    nn.functional.grid_sample grid_sampler_2d grid_sampler_3d multinomial bernoulli normal normal.in_place
    normal.number_mean nn.functional.ctc_loss histc histogram histogramdd matrix_exp cov corrcoef stft istft
    ormqr geqrf qr svd svd_lowrank pca_lowrank pinverse lu lu_solve lu_unpack cholesky cholesky_inverse cholesky_solve
    triangular_solve logdet norm.nuc gradient renorm nn.functional.embedding_bag nn.functional.cosine_similarity cdist
    nn.functional.pdist linspace.tensor_overload logspace.tensor_overload
    """.split()  # noqa: SIM905
)


def probes(name: str, info: Any, dtype: str, samples: Callable[[], list[Sample]]) -> Iterator[Sample]:
    """Exceptional inputs of an operator.

    Args:
        name: Its name with its variant.
        info: Its entry in the database; the name of its class is the kind of operator.
        dtype: ``float32``; complex ones have no probes.
        samples: Returns the samples of the database; called only if they are needed, since making them is slow.
    """
    wide = getattr(torch, dtype)
    kind = type(info).__name__
    # There the result of an infinity depends on the algorithm.
    if wide.is_complex or kind == "SpectralFuncInfo":
        return
    values = exceptional(wide)
    if name in _SORTS:
        yield from _sort_inputs(name, values)
    elif name == "to":
        yield from (Sample(repeat_with_tail(values), (to,)) for to in _CONVERSIONS)
    elif name in ("bucketize", "searchsorted", "isin"):
        yield from _search_inputs(name, values)
    elif name in _UNARY:
        yield from (Sample(repeat_with_tail(values), (), kwargs) for kwargs in _UNARY[name])
    elif kind == "BinaryUfuncInfo" or name in _BINARY:
        rest = _BINARY.get(name, ((),))
        yield from (Sample(x, (y, *more)) for more in rest for x, y in _binary_inputs(name, values))
    elif kind == "UnaryUfuncInfo":
        yield from _unary_inputs(values, samples())
    elif wide.is_floating_point and (kind == "ReductionOpInfo" or name in _REDUCTIONS):
        yield from _reduction_inputs(values, samples() if kind == "ReductionOpInfo" else [])
    if name in _BETA and wide.is_floating_point:
        yield from _beta_zero_inputs(samples())
    excluded = name in _EXCLUDED or name.startswith("linalg.") or name in _SORTS or name == "to"
    if kind == "OpInfo" and wide.is_floating_point and not excluded:
        yield from _modified_samples(samples(), wide)


def batches(name: str, dtype: str, samples: Callable[[], list[Sample]]) -> Iterator[Sample]:
    """Inputs whose first dimension may be a batch."""
    wide = getattr(torch, dtype)
    if not wide.is_floating_point:
        return
    # The samples of the database are small; libraries choose another algorithm by the batch size only for large inputs.
    for shapes in _LARGE_SHAPES.get(name, ()):
        first, *others = (ordinary(shape, wide) for shape in shapes)
        yield Sample(first, tuple(others), dict(_LARGE_KWARGS.get(name, {})))
    yield from samples()[: 4 * _MAX_MODIFIED]


_LARGE_SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], ...]] = {
    "nn.functional.linear": (((33, 300), (120, 300), (120,)),),
    "mm": (((64, 512), (512, 96)),),
    "bmm": (((6, 33, 200), (6, 200, 65)),),
    "nn.functional.conv2d": (((6, 8, 20, 20), (12, 8, 3, 3)),),
    "nn.functional.conv1d": (((6, 8, 100), (12, 8, 3)),),
    "softmax": (((9, 301),),),
    "log_softmax": (((9, 301),),),
    "nn.functional.layer_norm": (((5, 700),),),
    "nn.functional.rms_norm": (((5, 700),),),
    "nn.functional.scaled_dot_product_attention": (((4, 3, 40, 16),) * 3,),
}
_LARGE_KWARGS: dict[str, dict[str, Any]] = {
    "softmax": {"dim": -1},
    "log_softmax": {"dim": -1},
    "nn.functional.layer_norm": {"normalized_shape": (700,)},
    "nn.functional.rms_norm": {"normalized_shape": (700,)},
}


def _unary_inputs(values: torch.Tensor, samples: list[Sample]) -> Iterator[Sample]:
    """All values, with each different set of arguments in the samples of the database."""
    seen: set[str] = set()
    for sample in samples:
        arguments = repr((sample.args, sample.kwargs))
        if arguments not in seen and len(seen) < _MAX_MODIFIED:
            seen.add(arguments)
            yield replace(sample, input=repeat_with_tail(values))


def _binary_inputs(name: str, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All pairs of values; where some second operand is unsafe, all pairs with safe ones."""
    others = values
    if any(word in name for word in _POLYNOMIALS):
        others = torch.tensor([0, 1, 2, 5], dtype=values.dtype)
    elif not values.dtype.is_floating_point:
        if any(word in name for word in _DIVIDES) or name in ("__rdiv__", "gcd", "lcm"):
            others = values[values > 0]  # on x86, dividing the minimum integer by -1 raises SIGFPE
            values = others if name.startswith("__r") or name in ("gcd", "lcm") else values
        # Shifts by the width or more are undefined in C, and negative powers of integers raise.
        elif "shift" in name or "pow" in name:
            others = torch.tensor([0, 1, 2, 5], dtype=values.dtype)
    yield repeat_with_tail(values.repeat_interleave(others.numel())), repeat_with_tail(others.repeat(values.numel()))


def _sort_inputs(name: str, values: torch.Tensor) -> Iterator[Sample]:
    # A separate generator: the orders must be the same when a script rebuilds the case.
    generator = torch.Generator().manual_seed(len(name))
    numbers = values[~values.isnan()] if values.is_floating_point() else values
    for row in (values, numbers):
        up = row.sort().values if row.dtype is not torch.bool else row
        orders = [row, up, up.flip(0), *(row[torch.randperm(row.numel(), generator=generator)] for _ in range(4))]
        rows = torch.stack(orders)
        if name == "msort":
            yield Sample(rows.t().contiguous())
        elif name in _WITHOUT_DIM:
            yield Sample(rows.reshape(-1))
        else:
            yield Sample(rows, _SORTS[name], {"dim": -1})
            yield Sample(rows.t().contiguous(), _SORTS[name], {"dim": 0})


def _search_inputs(name: str, values: torch.Tensor) -> Iterator[Sample]:
    numbers = values[~values.isnan()] if values.is_floating_point() else values
    edges = numbers.sort().values if numbers.dtype is not torch.bool else numbers
    if name == "isin":
        yield Sample(repeat_with_tail(values), (values[::2],))
        return
    for right in (False, True):
        pair = (edges, repeat_with_tail(values)) if name == "searchsorted" else (repeat_with_tail(values), edges)
        yield Sample(pair[0], (pair[1],), {"right": right})


def _reduction_inputs(values: torch.Tensor, samples: list[Sample]) -> Iterator[Sample]:
    """Each value at several positions among ordinary numbers: along rows, along columns, and in a reduced vector."""
    rows = ordinary((values.numel() * len(_POSITIONS), _WIDTH), values.dtype)
    for k, value in enumerate(values):
        for j, place in enumerate(_POSITIONS):
            rows[k * len(_POSITIONS) + j, place] = value
    # Tuples and lists are dims of the sample's own shape, which the rows do not have.
    args = next((s.args for s in samples if all(not isinstance(a, (torch.Tensor, tuple, list)) for a in s.args)), ())
    # Reduced along contiguous memory, and below along a stride: kernels have an algorithm for each.
    yield Sample(rows, args, {"dim": -1})
    yield Sample(rows.t().contiguous(), args, {"dim": 0})
    # One more than the number of positions: each row has another value at another position.
    for row in rows[:: len(_POSITIONS) + 1]:
        yield Sample(row.clone(), args, {} if samples else {"dim": 0})


def _beta_zero_inputs(samples: list[Sample]) -> Iterator[Sample]:
    """With beta=0, an operator must ignore the addend, also NaN and infinities in it."""
    for sample in samples[:_MAX_MODIFIED]:
        for value in (math.nan, math.inf):
            yield replace(
                sample, input=torch.full_like(sample.input.detach(), value), kwargs={**(sample.kwargs or {}), "beta": 0}
            )


def _modified_samples(samples: list[Sample], dtype: torch.dtype) -> Iterator[Sample]:
    """Samples with tiny numbers, with one NaN and one infinity, and with a first tensor of exceptional values."""
    tiny = bounded(dtype, infinite=False, large=False)
    wild = torch.cat([exceptional(dtype)[:3], bounded(dtype, infinite=True, large=False)])
    n = 0
    for sample in samples:
        made = (
            sample.changed(lambda t: _fill_cyclic(t, tiny)),
            sample.changed(_with_nan_and_inf),
            replace(sample, input=_fill_cyclic(sample.input, wild)) if isinstance(sample.input, torch.Tensor) else None,
        )
        yield from (new for new in made if new is not None)
        n += made[0] is not None
        if n == _MAX_MODIFIED:
            return


def _fill_cyclic(t: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if not _is_replaceable(t, values.dtype):
        return t
    # In steps, so that a small tensor gets values of all kinds, not only the first ones.
    order = torch.arange(t.numel()) * 7 % values.numel()
    new = torch.empty_like(t.detach())
    return new.copy_(values[order].reshape(t.shape))


def _with_nan_and_inf(t: torch.Tensor) -> torch.Tensor:
    if not _is_replaceable(t, t.dtype) or not t.is_floating_point():
        return t
    new = t.detach().clone()
    flat = new.reshape(-1)
    flat[flat.numel() // 2] = math.inf
    flat[flat.numel() // 3] = math.nan
    return flat.reshape(t.shape)


def _is_replaceable(t: torch.Tensor, dtype: torch.dtype) -> bool:
    return is_plain(t) and t.dtype is dtype and t.numel() > 0 and not t.is_conj() and not t.is_neg()
