"""The statistics in C (`shadowrun/native/stats.c`): what they have to be told of each dtype."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from shadowrun.native import core, tensors
from shadowrun.numerics.form import dtype_name
from shadowrun.numerics.precision import FORMATS
from shadowrun.numerics.totals import Totals
from shadowrun.types import TensorDiff, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.numerics.form import Value

__all__ = ["Format", "format_of", "plain_diff", "statistics"]

_INTEGERS = frozenset(
    getattr(torch, name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
_DLPACK = {torch.bool: 6, torch.bfloat16: 4}
"""Codes of DLPack's dtypes beside those of signed (0), unsigned (1) and floating (2) ones."""


class Format(NamedTuple):
    """A dtype as C knows it.

    Attributes:
        name: The dtype's, ``float8`` for all with 8 bits.
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
def format_of(dtype: torch.dtype) -> Format | None:
    """The format of a dtype; None for those that C does not know, or without the compiled part."""
    if core is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if dtype in _INTEGERS:
        return Format(name)
    fmt = FORMATS.get(dtype)
    if fmt is None:
        return None
    vanishing = 1e-280 if dtype is torch.float64 else 1e-30
    if dtype.itemsize > 1:
        return Format(name, fmt.normal, vanishing)
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy().tobytes()
    return Format("float8", fmt.normal, vanishing, fmt.signed, numbers)


def statistics(left: torch.Tensor, right: torch.Tensor, form: Format) -> tuple[Totals, float, float]:
    """Add up two contiguous tensors of one dtype.

    Returns:
        Their totals, and the values of the worst element: the target's, the reference's.
    """
    assert core is not None
    found = core.statistics(left.data_ptr(), right.data_ptr(), left.numel(), left.nbytes, form)
    return Totals(*found[:-2]), found[-2], found[-1]


def _plain_diff() -> Callable[[str, Value, Value], TensorDiff | None] | None:
    if core is None or tensors.plainly_equal is None:
        return None
    known = []
    for dtype in (*FORMATS, *_INTEGERS):
        form, fmt = format_of(dtype), FORMATS.get(dtype)
        if form is not None and form.numbers is None:
            code = _DLPACK.get(dtype, 2 if fmt is not None else 0 if dtype.is_signed else 1)
            mantissa = -1 if fmt is None else fmt.mantissa
            known.append((code, 8 * dtype.itemsize, dtype_name(dtype), mantissa, tuple(form)))
    return core.diff if core.setup_diff(TensorDiff, TensorMeta, tuple(known)) else None


plain_diff = _plain_diff()
"""`shadowrun.numerics.diff.diff` for plain tensors of the same form; it gives None for all others."""
