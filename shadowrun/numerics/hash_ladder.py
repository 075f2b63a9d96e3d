"""The truncation-hash ladder: one 64-bit hash of a tensor for each number of low mantissa bits that are ignored.

Two tensors of one form agree in all but their lowest k mantissa bits exactly if rung k of their ladders is equal. So
the *remaining precision* of Schlögl et al. (NeurIPS 2023) of any two recordings is known from hashes alone: m - k for
the smallest k whose rungs agree, where m is the number of stored mantissa bits.

Definition. Element i of the flat contiguous tensor has the raw bits b(i, j), j = 0 for the lowest. Then

    plane(j) = sum over i of b(i, j) * key(i // 32) * 2^(i % 32)   mod 2^64
    rung(k)  = mix(n_elements + sum over j >= k of factor(j) * plane(j))   mod 2^64

`key` and `factor` are odd numbers from splitmix64 (Steele et al., OOPSLA 2014). Sums commute, so that a vector unit or
an accelerator may add in any order, and 32 elements of one bit plane are one 32-bit word. The hash finds differences
between computed results; it does not protect against a person who looks for collisions.

This module is the specification, in numpy and without torch. `recording.digests` computes the same where a
tensor lies.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["LANES", "MANTISSA", "factors", "keys", "ladder", "mantissa_of", "mix", "remaining_precision", "rungs"]

Hashes = npt.NDArray[np.uint64]

LANES: Final = 32
"""Elements that share one key: the bits of one plane in them are one word."""

MANTISSA: Final[dict[str, int]] = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
    "complex128": 52,
    "complex64": 23,
    "complex32": 10,
}
"""Stored mantissa bits by the name of the dtype; a complex number is two floats."""

_GAMMA: Final = 0x9E3779B97F4A7C15
_FACTOR_SEED: Final = 0x5DEECE66D


def mantissa_of(dtype: str) -> int:
    """Stored mantissa bits of a dtype; 0 for integers and bool, whose ladder has one rung."""
    return MANTISSA.get(dtype, 0)


def mix(values: Hashes) -> Hashes:
    """The output function of splitmix64."""
    with np.errstate(over="ignore"):
        # All is mod 2^64: numpy would warn of what wraps on purpose.
        z = values + np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def keys(first: int, n: int) -> Hashes:
    """Keys of the blocks of 32 elements from `first` on: (n,)."""
    numbers = np.arange(first, first + n, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return mix(numbers * np.uint64(_GAMMA)) | np.uint64(1)


@functools.cache
def factors() -> Hashes:
    """Factors of the bit planes: (64,)."""
    return mix(np.arange(64, dtype=np.uint64) + np.uint64(_FACTOR_SEED)) | np.uint64(1)


def ladder(bits: npt.NDArray[np.unsignedinteger], mantissa: int) -> Hashes:
    """The ladder of a tensor: (mantissa + 1,), rung 0 first.

    Args:
        bits: Raw bits of its elements, in the order of the contiguous tensor; any unsigned dtype.
        mantissa: Stored mantissa bits; 0 for integers.
    """
    flat = np.ascontiguousarray(bits).reshape(-1)
    n, width = flat.size, flat.dtype.itemsize * 8
    padded = np.zeros(-(-n // LANES) * LANES, np.uint64)
    padded[:n] = flat
    blocks = padded.reshape(-1, LANES)
    block_keys, lanes = keys(0, len(blocks)), np.left_shift(np.uint64(1), np.arange(LANES, dtype=np.uint64))
    planes = np.zeros(width, np.uint64)
    with np.errstate(over="ignore"):
        for j in range(width):
            words = (((blocks >> np.uint64(j)) & np.uint64(1)) * lanes).sum(axis=1, dtype=np.uint64)
            planes[j] = (words * block_keys).sum(dtype=np.uint64)
    return rungs(planes, n, mantissa)


def rungs(planes: Hashes, n_elements: int | npt.NDArray[np.int64], mantissa: int) -> Hashes:
    """The ladder of a tensor, or of several, from the sums over bit planes: (..., mantissa + 1).

    Args:
        planes: `plane(j)` of the definition: (..., bits of the dtype).
        n_elements: Of each tensor; one number, or an array of them.
        mantissa: Stored mantissa bits; 0 for integers.
    """
    with np.errstate(over="ignore"):
        weighted = factors()[: planes.shape[-1]] * planes
        above = np.cumsum(weighted[..., ::-1], axis=-1, dtype=np.uint64)[..., ::-1]
        # With the number of elements, since zeros have no bits: a longer tensor of them would have the same sums.
        return mix(above[..., : mantissa + 1] + np.asarray(n_elements).astype(np.uint64)[..., None])


def remaining_precision(a: Hashes, b: Hashes) -> int:
    """Remaining precision in bits, from two ladders of one form.

    Returns:
        m - k for the smallest k whose rungs agree; m if all agree; 0 where signs or exponents differ too. For integers,
        whose ladder has one rung, see `a[0] == b[0]`.
    """
    equal = np.flatnonzero(a == b)
    m = len(a) - 1
    # A truncated value that agrees still agrees when more is cut off, so the first rung that agrees decides.
    return m - int(equal[0]) if equal.size else 0
