"""Numbers of differences as `schema.number` reads them: 32-bit floats as whole numbers, a thousand rows at a time."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shadowrun.store.codec import PackedDiff

__all__ = ["encode_numbers"]

_EXCESSES = slice(5, 7)
_NOT_MEASURED = -1.0
_FRACTION_BITS = 23
_EXPONENT_OF_ULP_1, _LEAST_EXPONENT = 150, 27
"""A float of that exponent is its significand; from 123 less on, it is the significand divided by 2 up to 123 times."""


def encode_numbers(rows: Sequence[PackedDiff]) -> list[tuple[Any, ...]]:
    """Rows of `packed_diff` from what `encode_diff` returned; at least one. Exact.

    What is no 32-bit float between 2^-123 and 2^24 stays as it is, NaN becomes a text, and a distance from the oracle
    that was not measured None.
    """
    width = len(rows[0][1])
    flat = list(chain.from_iterable([last for _, last in rows]))
    numbers = np.array(flat, np.float64)
    whole, fits = _fractions(numbers)
    packed = np.empty(len(flat), object)
    packed[:] = flat
    packed[fits] = whole[fits]
    packed[np.isnan(numbers)] = "nan"
    excesses = packed.reshape(-1, width)[:, _EXCESSES]
    excesses[numbers.reshape(-1, width)[:, _EXCESSES] == _NOT_MEASURED] = None
    return [(*first, *last) for (first, _), last in zip(rows, packed.reshape(-1, width).tolist(), strict=True)]


def _fractions(numbers: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """``128 p + s`` of each number ``p / 2^s``, p odd or s 0, and which numbers are such."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = numbers.astype(np.float32)
    bits = single.view(np.int32)
    exponent = (bits >> _FRACTION_BITS) & 255
    significand = (bits & (2**_FRACTION_BITS - 1)) | 2**_FRACTION_BITS
    # A power of two as a float tells its exponent: that of the lowest bit is how often the significand can be halved.
    lowest = ((significand & -significand).astype(np.float32).view(np.int32) >> _FRACTION_BITS) - 127
    zeros = np.minimum(lowest, np.maximum(_EXPONENT_OF_ULP_1 - exponent, 0))
    significand >>= zeros
    whole = np.where(bits < 0, -significand, significand) * 128 + (_EXPONENT_OF_ULP_1 - exponent - zeros)
    is_zero = bits == 0  # and not -0
    whole[is_zero] = 0
    in_range = (exponent >= _LEAST_EXPONENT) & (exponent <= _EXPONENT_OF_ULP_1)
    return whole, (single == numbers) & (in_range | is_zero)
