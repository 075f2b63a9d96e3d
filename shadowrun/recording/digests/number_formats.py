"""Formats of the numbers that are digested: what `native/digest.c` and the operators on integers know of a dtype."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import torch

from shadowrun.numerics.hash_ladder import mantissa_of
from shadowrun.numerics.precision import FORMATS

__all__ = ["NUMBER_FORMATS", "Encoding", "NumberFormat"]


class Encoding(IntEnum):
    """How the bits of a format are numbers; the values are those of native/digest.h."""

    FLOAT = 0
    """IEEE 754."""
    BFLOAT = 1
    """IEEE 754 with the exponent of float32 in 16 bits."""
    SIGNED = 2
    UNSIGNED = 3
    CODES = 4
    """Floats of 8 bits: a table has their numbers."""


class NumberFormat(NamedTuple):
    """The format of a real dtype.

    Attributes:
        place: Its place in `NUMBER_FORMATS`.
        dlpack: DLPack's code of its kind; -1 where few versions of torch have one.
        width: Bits of an element.
        mantissa: Stored mantissa bits; 0 for integers.
        encoding: How its bits are numbers.
        normal: Smallest positive normal number; 0 for integers.
        numbers: The 256 numbers of `Encoding.CODES` as float64, else None.
        ints: Signed integer dtype of the same width.
    """

    place: int
    dlpack: int
    width: int
    mantissa: int
    encoding: Encoding
    normal: float
    numbers: bytes | None
    ints: torch.dtype


_INTS: Final = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_INTEGERS: Final = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
# `DLDataTypeCode` of dlpack.h, where bool is a type of its own.
_DLPACK: Final = {Encoding.SIGNED: 0, Encoding.UNSIGNED: 1, Encoding.FLOAT: 2, Encoding.BFLOAT: 4, Encoding.CODES: -1}
_DLPACK_BOOL: Final = 6


def _encoding(dtype: torch.dtype) -> Encoding:
    if dtype in FORMATS:
        if dtype.itemsize == 1:
            return Encoding.CODES
        return Encoding.BFLOAT if dtype is torch.bfloat16 else Encoding.FLOAT
    return Encoding.SIGNED if dtype.is_signed else Encoding.UNSIGNED


def _format(place: int, dtype: torch.dtype) -> NumberFormat:
    encoding, width = _encoding(dtype), 8 * dtype.itemsize
    dlpack = _DLPACK_BOOL if dtype is torch.bool else _DLPACK[encoding]
    normal = FORMATS[dtype].normal if dtype in FORMATS else 0.0
    numbers = None
    if encoding is Encoding.CODES:
        # From torch itself, since the float8 dtypes differ in NaN, infinity and zero; on the CPU, since the program may
        # have set another default device.
        numbers = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).double().numpy().tobytes()
    mantissa = mantissa_of(str(dtype).removeprefix("torch."))
    return NumberFormat(place, dlpack, width, mantissa, encoding, normal, numbers, _INTS[width])


NUMBER_FORMATS: Final[dict[torch.dtype, NumberFormat]] = {
    dtype: _format(place, dtype) for place, dtype in enumerate((*FORMATS, *(getattr(torch, n) for n in _INTEGERS)))
}
"""By dtype; complex dtypes are digested as pairs of real numbers."""
