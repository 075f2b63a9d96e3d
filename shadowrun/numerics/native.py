"""The statistics in C (native/stats.c): the table of dtypes that they need, and their functions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shadowrun.native import core, tensors
from shadowrun.numerics.form import dtype_name
from shadowrun.numerics.precision import FORMATS
from shadowrun.types import TensorDiff, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.numerics.form import Value

__all__ = ["NativeFormat", "format_of", "native_diff", "statistics"]

_INTEGERS = frozenset(
    getattr(torch, name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
_DLPACK = {torch.bool: 6, torch.bfloat16: 4}
"""DLPack's codes of dtypes that are not signed (0), unsigned (1) or floating (2) numbers."""


class NativeFormat(NamedTuple):
    """A dtype as native/stats.c takes it.

    Attributes:
        name: Of the dtype; ``float8`` for all floats of 8 bits.
        normal: Smallest positive normal number.
        vanishing: Mean square below which squares may have underflowed.
        signed: The format has a sign.
        numbers: The 256 numbers of an 8-bit float format as float32, else None.
    """

    name: str
    normal: float = 0.0
    vanishing: float = 0.0
    signed: bool = True
    numbers: bytes | None = None


@functools.cache
def format_of(dtype: torch.dtype) -> NativeFormat | None:
    """The format of a dtype; None where the C extension does not know it or is not built."""
    if core is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if dtype in _INTEGERS:
        return NativeFormat(name)
    fmt = FORMATS.get(dtype)
    if fmt is None:
        return None
    vanishing = 1e-280 if dtype is torch.float64 else 1e-30
    if dtype.itemsize > 1:
        return NativeFormat(name, fmt.normal, vanishing)
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy().tobytes()
    return NativeFormat("float8", fmt.normal, vanishing, fmt.signed, numbers)


def statistics(left: torch.Tensor, right: torch.Tensor, form: NativeFormat) -> tuple[Any, ...]:
    """Fields of `diff.Totals`, in their order, for two contiguous tensors of one dtype."""
    assert core is not None
    return core.statistics(left.data_ptr(), right.data_ptr(), left.numel(), left.nbytes, form)  # type: ignore[no-any-return]


def _native_diff() -> Callable[[str, Value, Value], TensorDiff | None] | None:
    if core is None or tensors.plainly_equal is None:
        return None
    # The table is handed to C once, so that no call looks up a dtype in Python.
    known = []
    for dtype in (*FORMATS, *_INTEGERS):
        form, fmt = format_of(dtype), FORMATS.get(dtype)
        if form is not None and form.numbers is None:
            code = _DLPACK.get(dtype, 2 if fmt is not None else 0 if dtype.is_signed else 1)
            mantissa = -1 if fmt is None else fmt.mantissa
            known.append((code, 8 * dtype.itemsize, dtype_name(dtype), mantissa, tuple(form)))
    return core.diff if core.setup_diff(TensorDiff, TensorMeta, tuple(known)) else None


native_diff = _native_diff()
"""`diff.diff` for plain tensors of the same form; it returns None for all others."""
