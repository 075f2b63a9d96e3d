"""All statistics on how far one tensor is from another, in one pass over memory by cache-sized chunks.

In C where there is the compiled part (`kernel`). In Python, chunks stay in the L2 cache while about ten numpy passes
look at them (measured faster than torch for comparisons and reductions; torch widens 16-bit floats faster). Chunks that
are equal are only looked through for NaN and infinities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from shadowrun.numerics.bits import dense_order, same_memory
from shadowrun.numerics.floats import FloatChunks
from shadowrun.numerics.form import Value, as_tensor, forms
from shadowrun.numerics.integers import add_integers
from shadowrun.numerics.kernel import format_of, plain_diff, statistics
from shadowrun.numerics.plain import plain
from shadowrun.numerics.precision import FORMATS, FloatFormat, remaining_bits
from shadowrun.numerics.totals import Totals
from shadowrun.types import TensorDiff

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    if plain_diff is not None and (found := plain_diff(name, actual, expected)) is not None:
        return found
    form_actual, form_expected, detail = forms(actual, expected)
    if actual is None or expected is None or form_actual.shape != form_expected.shape:
        return TensorDiff(name, form_actual, form_expected, detail=detail)
    left, right = plain(as_tensor(actual)), plain(as_tensor(expected))
    if left.shape != right.shape:
        return TensorDiff(name, form_actual, form_expected, detail=detail)
    if left.dtype != right.dtype:
        left, right = left.to(torch.float64), right.to(torch.float64)
    shape, n = left.shape, left.numel()
    order = None
    if not (left.is_contiguous() and right.is_contiguous()):
        order = dense_order(right)
        left, right = left.permute(order).contiguous(), right.permute(order).contiguous()
    fmt, form = FORMATS.get(left.dtype), format_of(left.dtype)
    totals, worst_actual, worst_expected = _add_up(left, right, fmt) if form is None else statistics(left, right, form)
    worst = max(totals.worst, 0)
    return TensorDiff(
        name,
        form_actual,
        form_expected,
        n_elements=n,
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
        worst_index=_index(worst, shape, order)[: len(form_actual.shape)] if n else (),
        worst_actual=worst_actual,
        worst_expected=worst_expected,
        detail=detail,
        n_from_zero=totals.n_from_zero,
    )


def _value(flat: torch.Tensor, index: int) -> float:
    if flat.dtype is torch.float32 or flat.dtype is torch.float64:
        return flat.numpy().item(index)  # type: ignore[no-any-return]
    return float(flat[index].item())


def _index(flat: int, shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Index of an element.

    Args:
        flat: Where it lies in memory.
        shape: Sizes of the tensor.
        order: Order of the dimensions in memory, outermost first; None: as they are.
    """
    dims = range(len(shape)) if order is None else order
    index = [0] * len(shape)
    for d in reversed(dims):
        flat, index[d] = divmod(flat, shape[d])
    return tuple(index)


def _add_up(left: torch.Tensor, right: torch.Tensor, fmt: FloatFormat | None) -> tuple[Totals, float, float]:
    """What `kernel.statistics` does, in Python."""
    left, right = left.view(-1), right.view(-1)
    totals, n = Totals(), left.numel()
    with np.errstate(all="ignore"):
        if fmt is not None:
            chunks = FloatChunks(totals, left, right)
            for start in range(0, n, chunks.length):
                chunks.add(start)
        else:
            _add_integers(totals, left, right)
    worst = max(totals.worst, 0)
    return (totals, _value(left, worst), _value(right, worst)) if n else (totals, 0.0, 0.0)


def _add_integers(totals: Totals, left: torch.Tensor, right: torch.Tensor) -> None:
    pointers, size = (left.data_ptr(), right.data_ptr()), left.itemsize
    for start in range(0, left.numel(), CHUNK):
        a, e = left[start : start + CHUNK], right[start : start + CHUNK]
        if same_memory(pointers[0] + start * size, pointers[1] + start * size, a.numel() * size):
            totals.n_finite += a.numel()
        else:
            add_integers(totals, a, e, start)
