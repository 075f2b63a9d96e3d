"""Distances between floating-point numbers by their bits: units in the last place and remaining precision."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["FORMATS", "FloatFormat", "monotone", "remaining_bits", "ulp_distance"]

Ints = npt.NDArray[np.signedinteger[Any]]


# Elements whose int64 copies stay in the L2 cache, and in memory that is used again.
_PART: Final = 8192


class FloatFormat(NamedTuple):
    """A floating dtype as the verdict needs it.

    Attributes:
        mantissa: Stored mantissa bits; the unit roundoff is 2 ** -(mantissa + 1).
        view: Integer dtype of the same size.
        largest: Greatest finite number.
        smallest: Smallest positive number, subnormal where the dtype has them.
        normal: Smallest positive normal number.
        signed: False for ``float8_e8m0fnu``, an exponent without sign.
    """

    mantissa: int
    view: torch.dtype
    largest: float
    smallest: float
    normal: float
    signed: bool = True

    @property
    def vanishing(self) -> float:
        """Mean square below which squares may have underflowed in the arithmetic of the statistics."""
        # Part of the specification, as `diff.CHUNK` is: native/stats.c gets the same limits.
        return 1e-280 if self.view is torch.int64 else 1e-30

    @property
    def roundoff(self) -> float:
        """Greatest relative error of one rounding to nearest, 2 ** -(mantissa + 1)."""
        return 2.0 ** -(self.mantissa + 1)


def _format(dtype: torch.dtype, mantissa: int, view: torch.dtype, *, signed: bool = True) -> FloatFormat:
    info = torch.finfo(dtype)
    # `float8_e8m0fnu` has no subnormal numbers.
    smallest = info.tiny * 2.0**-mantissa if signed else info.tiny
    return FloatFormat(mantissa, view, info.max, smallest, info.tiny, signed)


FORMATS: Final[dict[torch.dtype, FloatFormat]] = {
    torch.float64: _format(torch.float64, 52, torch.int64),
    torch.float32: _format(torch.float32, 23, torch.int32),
    torch.float16: _format(torch.float16, 10, torch.int16),
    torch.bfloat16: _format(torch.bfloat16, 7, torch.int16),
    torch.float8_e4m3fn: _format(torch.float8_e4m3fn, 3, torch.int8),
    torch.float8_e4m3fnuz: _format(torch.float8_e4m3fnuz, 3, torch.int8),
    torch.float8_e5m2: _format(torch.float8_e5m2, 2, torch.int8),
    torch.float8_e5m2fnuz: _format(torch.float8_e5m2fnuz, 2, torch.int8),
    torch.float8_e8m0fnu: _format(torch.float8_e8m0fnu, 0, torch.int8, signed=False),
}


def monotone(bits: Ints, width: int) -> Ints:
    """Map the bits of floats to integers that order as the numbers do; neighbours differ by 1, -0 and +0 by 0.

    Negative floats are stored as sign and magnitude, so their magnitude is negated. (The usual
    ``i ^ ((i >> 31) & 0x7fffffff)`` is the same, but puts -0 at -1.)

    Args:
        bits: int64 array, sign-extended from the integer view of the dtype; no NaN among the floats.
        width: Bits of the dtype: 8, 16, 32 or 64.
    """
    return np.where(bits < 0, -(1 << (width - 1)) - bits, bits)


def ulp_distance(actual: Ints, expected: Ints, width: int) -> int:
    """Greatest distance in units in the last place between two arrays of float bits; 0 if they are empty.

    Args:
        actual: Signed integer view of floats, no NaN among them.
        expected: Another of the same size and float dtype.
        width: Bits of that dtype.
    """
    parts = (slice(i, i + _PART) for i in range(0, actual.size, _PART))
    return max((_greatest_distance(actual[part], expected[part], width) for part in parts), default=0)


def _greatest_distance(actual: Ints, expected: Ints, width: int) -> int:
    a, e = monotone(actual.astype(np.int64), width), monotone(expected.astype(np.int64), width)
    # Two float64 of opposite sign are up to 2**64 apart: a wrapped difference read as unsigned is exact.
    return int((np.maximum(a, e) - np.minimum(a, e)).view(np.uint64).max())


def remaining_bits(greatest_xor: int, mantissa: int) -> int:
    """Identical leading mantissa bits of the worst element: RP of Schlögl et al., NeurIPS 2023.

    The smallest i with ``a >> i == b >> i`` is the bit length of ``a ^ b``; RP is ``mantissa - i``, and 0 where sign
    or exponent differ. Over an array the greatest xor (as unsigned) has the greatest bit length.
    """
    return max(0, mantissa - greatest_xor.bit_length())
