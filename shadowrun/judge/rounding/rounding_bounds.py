"""The limits of rounding as plain arithmetic on sizes, without tensors: `bounds` says how they were chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.operators.facts import OpFacts

__all__ = [
    "ARITHMETIC_BOUND",
    "BOUND",
    "COARSE_BOUND",
    "COARSE_SUM_BOUND",
    "FAST_CONVOLUTION_PEAK",
    "FAST_CONVOLUTION_RMS",
    "FULL_MANTISSA",
    "RECURRENT_BOUND",
    "ROOT",
    "is_made_of_sums",
    "reduction_length",
    "rounding_bound",
]

BOUND: Final = 32.0
"""Units of rounding within which any implementation is correct, if the operator is none of the kinds below."""
ARITHMETIC_BOUND: Final = 16.0
"""The same for short chains of IEEE operations."""
RECURRENT_BOUND: Final = 256.0
"""The same for recurrent networks of a vendor's library: cuDNN 9.19 approximates its gates and reaches 114 on an H100
(LSTM, GRU and RNN, 5 steps, forward and backward); tf32 in its products is 3,000 to 8,000 off."""
COARSE_BOUND: Final = 8.0
"""The same for results of 16 and 8 bits: intermediate values may be rounded to these a few times."""
COARSE_SUM_BOUND: Final = 4.0
"""The same for 16-bit sums and products, which are accumulated in float32."""
ROOT: Final = 1.0
"""Further units for each root of the number of terms (Higham & Mary 2019: errors grow as sqrt(n) u)."""
FAST_CONVOLUTION_RMS: Final = 64.0
FAST_CONVOLUTION_PEAK: Final = 60.0
"""A fast convolution (Winograd, FFT) has larger errors, spread like noise: NNPACK's reach a root mean square of 31 and
a peak of 1585, at most 30 times that mean once the spread is known (15 shapes and seeds); tf32 has a mean of 1500,
and one wrong element a peak of 1000 times the mean."""
FULL_MANTISSA: Final = 23
"""Mantissa bits from which sums are accumulated in the dtype itself; results with fewer are *coarse*."""


def rounding_bound(row: OpFacts, mantissa: int, *, n_terms: float = 1.0, n_partial_sums: int = 1) -> float:
    """Units of rounding that a correct implementation may be off.

    Args:
        row: Of the operator.
        mantissa: Stored mantissa bits of the result.
        n_terms: How many terms enter each element of a sum or product.
        n_partial_sums: How many partial sums may be added up in the memory of a coarse result.
    """
    if mantissa < FULL_MANTISSA:
        # Errors of independent roundings add up as the root of their number; a model of 9 to 1024 additions gave 0.91
        # times it.
        added = n_partial_sums - 1
        return COARSE_SUM_BOUND + ROOT * float(added**0.5) if is_made_of_sums(row) else COARSE_BOUND
    if row.recurrent:
        return RECURRENT_BOUND
    if row.accumulates:
        # Rounding errors of a sum grow as sqrt(n) u (Higham & Mary 2019); recursive summation of n positive terms
        # reaches 0.84.
        return BOUND + ROOT * float(n_terms**0.5)
    return ARITHMETIC_BOUND if row.arithmetic else BOUND


def is_made_of_sums(row: OpFacts) -> bool:
    """Whether a 16-bit result is made of sums: gradients of a loss are a formula on each element."""
    return row.accumulates and not row.loss_gradient


def reduction_length(sizes: Iterable[int], size: int) -> float:
    """About how many terms enter each element of a result: length of the reduction or contraction.

    The elements of the greatest input for each of the result or, for products of two (the inner dimension of a
    matrix product exactly), the geometric mean with the second greatest.

    Args:
        sizes: Elements of each floating input.
        size: Elements of the result.
    """
    inputs = sorted(sizes, reverse=True)
    if not inputs:
        return 1.0
    size = max(size, 1)
    product = (inputs[0] * inputs[1] / size) ** 0.5 if len(inputs) > 1 else 0.0
    return max(1.0, inputs[0] / size, product)
