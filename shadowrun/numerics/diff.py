"""All statistics on how far one tensor is from another, in one pass over memory by cache-sized chunks.

Chunks stay in the L2 cache while about ten numpy passes look at them (measured faster than torch for comparisons and
reductions; torch widens 16-bit floats faster). Chunks that are equal are only looked through for NaN and infinities.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from shadowrun.numerics.bits import dense_order, same_memory
from shadowrun.numerics.floats import FloatChunks
from shadowrun.numerics.form import Value, as_tensor, form_difference, meta
from shadowrun.numerics.integers import add_integers
from shadowrun.numerics.plain import plain
from shadowrun.numerics.precision import FORMATS, FloatFormat, remaining_bits
from shadowrun.numerics.totals import Totals
from shadowrun.types import TensorDiff

__all__ = ["CHUNK", "diff"]

CHUNK: Final = 32768
"""Elements looked at together: 128 KB of float32 on each side (float64: half as many)."""


def diff(name: str, actual: Value, expected: Value) -> TensorDiff:
    """Measure how far a result of the target is from that of the reference.

    Complex tensors are counted by components (two elements each). Results of different dtype are compared as
    float64; of different shape, or None, not at all beyond their form. The fields that need a verdict
    (`n_mismatched`, the two excesses) are left at their defaults.

    Args:
        name: Name of the result.
        actual: CPU tensor of any dtype and layout, Python scalar, or None: the target's.
        expected: The reference's.

    Raises:
        Uncomparable: If torch cannot give the values of a tensor.
    """
    detail = form_difference(actual, expected)
    form = TensorDiff(name, meta(actual), meta(expected), detail=detail)
    if actual is None or expected is None or form.actual.shape != form.expected.shape:
        return form
    left, right = plain(as_tensor(actual)), plain(as_tensor(expected))
    if left.shape != right.shape:
        return form
    if left.dtype != right.dtype:
        left, right = left.to(torch.float64), right.to(torch.float64)
    order = dense_order(right)
    left, right = left.permute(order).contiguous(), right.permute(order).contiguous()
    flat_left, flat_right = left.reshape(-1), right.reshape(-1)
    fmt = FORMATS.get(left.dtype)
    totals = _add_up(flat_left, flat_right, fmt)
    index: tuple[int, ...] = ()
    worst = max(totals.worst, 0)
    if left.numel():
        by_order = np.unravel_index(worst, left.shape)
        place = dict(zip(order, map(int, by_order), strict=True))
        index = tuple(place[d] for d in range(len(order)))[: len(form.actual.shape)]
    return TensorDiff(
        name,
        form.actual,
        form.expected,
        n_elements=left.numel(),
        n_different=totals.n_different,
        max_abs=totals.max_abs,
        max_rel=totals.max_rel,
        rmse=(totals.squares / totals.n_finite) ** 0.5 if totals.n_finite else 0.0,
        max_ulp=totals.max_ulp,
        remaining_bits=-1 if fmt is None else remaining_bits(totals.greatest_xor, fmt.mantissa),
        n_nan=totals.n_nan,
        n_inf=totals.n_inf,
        n_zero_sign=totals.n_zero_sign,
        n_subnormal=totals.n_subnormal,
        worst_index=index,
        worst_actual=float(flat_left[worst].item()) if left.numel() else 0.0,
        worst_expected=float(flat_right[worst].item()) if left.numel() else 0.0,
        detail=detail,
        n_from_zero=totals.n_from_zero,
    )


def _add_up(left: torch.Tensor, right: torch.Tensor, fmt: FloatFormat | None) -> Totals:
    totals = Totals()
    with np.errstate(all="ignore"):
        if fmt is not None:
            chunks = FloatChunks(totals, left, right, fmt)
            for start in range(0, left.numel(), chunks.length):
                chunks.add(start)
            return totals
        pointers, size = (left.data_ptr(), right.data_ptr()), left.itemsize
        for start in range(0, left.numel(), CHUNK):
            a, e = left[start : start + CHUNK], right[start : start + CHUNK]
            if same_memory(pointers[0] + start * size, pointers[1] + start * size, a.numel() * size):
                totals.n_finite += a.numel()
            else:
                add_integers(totals, a, e, start)
    return totals
