"""Inputs of exceptional values for an operator of torch's database, by what kind of operator it is.

Element-wise operators get all values, those of two operands all pairs; reductions each value by itself, among ordinary
ones, at several places of a row; sorts and searches rows of all values in several orders; all others the database's
own inputs with exceptional values put into them. Where the outcome is open (sums that overflow on the way, the
transform of an infinity) no such input is made.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.sweep.exceptional import bounded, exceptional, ordinary, several
from shadowrun.sweep.inputs import Sample, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["batches", "probes"]

_MOST_CHANGED = 6
_WIDTH = 37
_PLACES = (0, 5, 18, _WIDTH - 1)
_CONVERSIONS: tuple[torch.dtype, ...] = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
)
_ORDERED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sort", "argsort", "mode", "cummax", "cummin", "median", "nanmedian", "msort", "unique"), ()),
    **dict.fromkeys(("max.reduction_with_dim", "min.reduction_with_dim", "aminmax", "unique_consecutive"), ()),
    "topk": (5,),
    "kthvalue": (4,),
    "quantile": (0.5,),
    "nanquantile": (0.5,),
}
"""Operators on rows in which any value may stand beside any other, with their arguments."""
_WITHOUT_DIM = frozenset(("msort", "unique", "unique_consecutive"))
_ROWS = frozenset(
    """
    cumsum cumprod logcumsumexp softmax log_softmax nn.functional.softmin logsumexp var_mean std_mean norm diff
    linalg.norm nn.functional.normalize max.reduction_no_dim min.reduction_no_dim masked.softmax masked.log_softmax
    masked.softmin masked.cumsum masked.cumprod masked.median
    """.split()  # noqa: SIM905
)
"""Operators that reduce or scan along ``dim``, besides those that the database calls reductions."""
_ONE: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("nn.functional.hardswish", "nn.functional.leaky_relu", "clone", "zeros_like", "ones_like"), ({},)),
    "nn.functional.gelu": ({}, {"approximate": "tanh"}),
    "clamp": ({"min": -1.0, "max": 1.0}, {"max": 0.5}, {"min": 0.5}),
}
"""Element-wise operators of one operand that the database does not call so, with their arguments."""
_TWO: dict[str, tuple[tuple[Any, ...], ...]] = {"logaddexp2": ((),), "lerp": ((0.3,),)}
"""The same for two operands."""
_BETA = frozenset(("addmm", "addmv", "addbmm", "baddbmm", "addr"))
_DIVIDES = ("div", "fmod", "remainder", "rmod", "mod__", "true_divide")
_DEGREE = ("polynomial", "special.zeta")
"""Their second operand is a degree, as often as which they may run a loop."""
_LEFT_OUT = frozenset(
    """
    nn.functional.grid_sample grid_sampler_2d grid_sampler_3d multinomial bernoulli normal normal.in_place
    normal.number_mean nn.functional.ctc_loss histc histogram histogramdd matrix_exp cov corrcoef stft istft
    ormqr geqrf qr svd svd_lowrank pca_lowrank pinverse lu lu_solve lu_unpack cholesky cholesky_inverse cholesky_solve
    triangular_solve logdet norm.nuc gradient renorm nn.functional.embedding_bag nn.functional.cosine_similarity cdist
    nn.functional.pdist linspace.tensor_overload logspace.tensor_overload
    """.split()  # noqa: SIM905
)
"""Left alone: NaN as an index or a probability, decompositions, and formulas that may leave the range on their way."""


def probes(name: str, info: Any, dtype: str, made: Callable[[], list[Sample]]) -> Iterator[Sample]:
    """Exceptional inputs of an operator.

    Args:
        name: Its name with its variant.
        info: Its entry in the database; the name of its class says which kind of operator it is.
        dtype: ``float32``; complex ones have no probes.
        made: Gives the database's own samples.
    """
    wide = getattr(torch, dtype)
    kind = type(info).__name__
    if wide.is_complex or kind == "SpectralFuncInfo":
        return
    values = exceptional(wide)
    if name in _ORDERED:
        yield from _ordered(name, values)
    elif name == "to":
        yield from (Sample(several(values), (to,)) for to in _CONVERSIONS)
    elif name in ("bucketize", "searchsorted", "isin"):
        yield from _searched(name, values)
    elif name in _ONE:
        yield from (Sample(several(values), (), kwargs) for kwargs in _ONE[name])
    elif kind == "BinaryUfuncInfo" or name in _TWO:
        rest = _TWO.get(name, ((),))
        yield from (Sample(x, (y, *more)) for more in rest for x, y in _pairs(name, values))
    elif kind == "UnaryUfuncInfo":
        yield from _unary(values, made())
    elif wide.is_floating_point and (kind == "ReductionOpInfo" or name in _ROWS):
        yield from _rows(values, made() if kind == "ReductionOpInfo" else [])
    if name in _BETA and wide.is_floating_point:
        yield from _ignored(made())
    left_out = name in _LEFT_OUT or name.startswith("linalg.") or name in _ORDERED or name == "to"
    if kind == "OpInfo" and wide.is_floating_point and not left_out:
        yield from _changed(made(), wide)


def batches(name: str, dtype: str, made: Callable[[], list[Sample]]) -> Iterator[Sample]:
    """Inputs whose first dimension may be a batch: the database's, and large ones where an algorithm may turn on it."""
    wide = getattr(torch, dtype)
    if not wide.is_floating_point:
        return
    for shapes in _LARGE.get(name, ()):
        first, *others = (ordinary(shape, wide) for shape in shapes)
        yield Sample(first, tuple(others), dict(_LARGE_KWARGS.get(name, {})))
    yield from made()[: 4 * _MOST_CHANGED]


_LARGE: dict[str, tuple[tuple[tuple[int, ...], ...], ...]] = {
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


def _unary(values: torch.Tensor, samples: list[Sample]) -> Iterator[Sample]:
    """All values, with the arguments of each of the database's samples that has others."""
    seen: set[str] = set()
    for sample in samples:
        arguments = repr((sample.args, sample.kwargs))
        if arguments not in seen and len(seen) < _MOST_CHANGED:
            seen.add(arguments)
            yield replace(sample, input=several(values))


def _pairs(name: str, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every value with every other, and all with a number beside them."""
    others = values
    if any(word in name for word in _DEGREE):
        others = torch.tensor([0, 1, 2, 5], dtype=values.dtype)
    elif not values.dtype.is_floating_point:
        if any(word in name for word in _DIVIDES) or name in ("__rdiv__", "gcd", "lcm"):
            others = values[values > 0]  # the least integer by -1 ends the process on some processors
            values = others if name.startswith("__r") or name in ("gcd", "lcm") else values
        elif "shift" in name or "pow" in name:
            others = torch.tensor([0, 1, 2, 5], dtype=values.dtype)
    yield several(values.repeat_interleave(others.numel())), several(others.repeat(values.numel()))


def _ordered(name: str, values: torch.Tensor) -> Iterator[Sample]:
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
            yield Sample(rows, _ORDERED[name], {"dim": -1})
            yield Sample(rows.t().contiguous(), _ORDERED[name], {"dim": 0})


def _searched(name: str, values: torch.Tensor) -> Iterator[Sample]:
    numbers = values[~values.isnan()] if values.is_floating_point() else values
    edges = numbers.sort().values if numbers.dtype is not torch.bool else numbers
    if name == "isin":
        yield Sample(several(values), (values[::2],))
        return
    for right in (False, True):
        pair = (edges, several(values)) if name == "searchsorted" else (several(values), edges)
        yield Sample(pair[0], (pair[1],), {"right": right})


def _rows(values: torch.Tensor, samples: list[Sample]) -> Iterator[Sample]:
    """Each value at several places among ordinary ones: along rows, along columns, and alone in a whole."""
    rows = ordinary((values.numel() * len(_PLACES), _WIDTH), values.dtype)
    for k, value in enumerate(values):
        for j, place in enumerate(_PLACES):
            rows[k * len(_PLACES) + j, place] = value
    args = next((s.args for s in samples if all(not isinstance(a, (torch.Tensor, tuple, list)) for a in s.args)), ())
    yield Sample(rows, args, {"dim": -1})
    yield Sample(rows.t().contiguous(), args, {"dim": 0})
    for row in rows[:: len(_PLACES) + 1]:
        yield Sample(row.clone(), args, {} if samples else {"dim": 0})


def _ignored(samples: list[Sample]) -> Iterator[Sample]:
    """Where beta is 0 the addend is to be ignored, NaN and infinities too."""
    for sample in samples[:_MOST_CHANGED]:
        for value in (math.nan, math.inf):
            yield replace(
                sample, input=torch.full_like(sample.input.detach(), value), kwargs={**(sample.kwargs or {}), "beta": 0}
            )


def _changed(samples: list[Sample], dtype: torch.dtype) -> Iterator[Sample]:
    """The database's inputs: with tiny numbers, with one NaN and one infinity, and the first tensor all exceptional."""
    tiny = bounded(dtype, infinite=False, large=False)
    wild = torch.cat([exceptional(dtype)[:3], bounded(dtype, infinite=True, large=False)])
    n = 0
    for sample in samples:
        made = (
            sample.changed(lambda t: _filled(t, tiny)),
            sample.changed(_pierced),
            replace(sample, input=_filled(sample.input, wild)) if isinstance(sample.input, torch.Tensor) else None,
        )
        yield from (new for new in made if new is not None)
        n += made[0] is not None
        if n == _MOST_CHANGED:
            return


def _filled(t: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if not _may_change(t, values.dtype):
        return t
    order = torch.arange(t.numel()) * 7 % values.numel()
    new = torch.empty_like(t.detach())
    return new.copy_(values[order].reshape(t.shape))


def _pierced(t: torch.Tensor) -> torch.Tensor:
    if not _may_change(t, t.dtype) or not t.is_floating_point():
        return t
    new = t.detach().clone()
    flat = new.reshape(-1)
    flat[flat.numel() // 2] = math.inf
    flat[flat.numel() // 3] = math.nan
    return flat.reshape(t.shape)


def _may_change(t: torch.Tensor, dtype: torch.dtype) -> bool:
    return is_plain(t) and t.dtype is dtype and t.numel() > 0 and not t.is_conj() and not t.is_neg()
