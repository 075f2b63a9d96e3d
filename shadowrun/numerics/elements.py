"""Elements of results: tensors brought into a form for arithmetic, and the elements that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.native import core
from shadowrun.numerics.bits import Uncomparable, resolved

if TYPE_CHECKING:
    from shadowrun.numerics.bits import Bools
    from shadowrun.numerics.precision import FloatFormat

__all__ = ["DifferingElements", "differing", "plain"]


def plain(t: torch.Tensor) -> torch.Tensor:
    """Strided real tensor with the values of `t`, a view of its memory where possible.

    Complex tensors get a last dimension of 2 (real, imaginary). Sparse and MKL-DNN tensors become dense, nested ones
    flat, quantized ones are dequantized to float32.

    Args:
        t: CPU tensor of any layout.

    Raises:
        Uncomparable: If torch cannot convert it.
    """
    t = t.detach()  # numpy refuses a tensor that requires a gradient
    try:
        if t.is_nested:
            t = torch.cat([part.reshape(-1) for part in t.unbind()]) if t.size(0) else torch.empty(0, dtype=t.dtype)
        elif t.layout is not torch.strided:
            t = t.to_dense()
        elif t.is_quantized:
            t = t.dequantize()
        t = resolved(t)
        return torch.view_as_real(t) if t.is_complex() else t
    except (RuntimeError, NotImplementedError) as error:
        raise Uncomparable(f"no dense values of a {t.layout} {t.dtype} tensor: {error}") from error


Indices = npt.NDArray[np.intp]

_ZEROS: Final = 1
_CLASSES: Final = 2
_NANS: Final = 4


class DifferingElements(NamedTuple):
    """Elements whose bits differ.

    Attributes:
        where: Their indices, ascending.
        zeros: Among them, those that are 0 on both sides.
        classes: Those with NaN or an infinity on one side only, or infinities of other sign.
        nans: Those that are NaN on both sides.
    """

    where: Indices
    zeros: Bools
    classes: Bools
    nans: Bools


def differing(actual: torch.Tensor, expected: torch.Tensor, fmt: FloatFormat, n_different: int) -> DifferingElements:
    """Find the elements that differ.

    Args:
        actual: Flat tensor of a float dtype.
        expected: Another of the same size and dtype.
        fmt: The format of that dtype.
        n_different: How many differ, as `diff` counted them.
    """
    # The count is known from `diff`, so that C writes into arrays of the right size without a first pass.
    # It writes 64-bit indices, and knows no 8-bit formats.
    dense = actual.is_contiguous() and expected.is_contiguous()
    if core is not None and dense and actual.itemsize > 1 and np.intp(0).itemsize == 8:
        where, kinds = np.empty(n_different, np.intp), np.empty(n_different, np.uint8)
        found, all_kinds = core.differing(
            actual.data_ptr(), expected.data_ptr(), actual.numel(), 8 * actual.itemsize, fmt.mantissa,
            where.ctypes.data, kinds.ctypes.data, n_different,
        )  # fmt: skip
        if found == n_different:
            masks = (
                kinds & kind != 0 if all_kinds & kind else np.zeros(found, bool) for kind in (_ZEROS, _CLASSES, _NANS)
            )
            return DifferingElements(where, *masks)
    where = np.flatnonzero(actual.view(fmt.view).numpy() != expected.view(fmt.view).numpy())
    index = torch.from_numpy(where)
    a, e = _wide(actual[index]), _wide(expected[index])
    nan_a, nan_e = np.isnan(a), np.isnan(e)
    classes = (nan_a != nan_e) | ((np.isinf(a) | np.isinf(e)) & (a != e))
    return DifferingElements(where, (a == 0) & (e == 0), classes, nan_a & nan_e)


def _wide(values: torch.Tensor) -> npt.NDArray[Any]:
    return values.to(torch.float64).numpy()
