"""Classes of floating-point values: NaN, infinite, zero with its sign, subnormal, normal."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Bools", "ClassDifference", "Floats", "class_difference"]

Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]


class ClassDifference(NamedTuple):
    """Where two arrays differ in class, one mask for each kind.

    Attributes:
        nan: NaN on one side only.
        inf: Infinite on one side only, or on both with other signs (and NaN on neither).
        zero_sign: +0 against -0.
        subnormal: A subnormal number against zero.
    """

    nan: Bools
    inf: Bools
    zero_sign: Bools
    subnormal: Bools


def class_difference(actual: Floats, expected: Floats, normal: float) -> ClassDifference:
    """Compare the classes of each pair of elements.

    Args:
        actual: float32 or float64 array; 16- and 8-bit floats are widened first.
        expected: Another of the same shape.
        normal: Smallest positive normal number of the dtype that the values came from.
    """
    nan_a, nan_e = np.isnan(actual), np.isnan(expected)
    infinite = np.isinf(actual) | np.isinf(expected)
    zero_a, zero_e = actual == 0, expected == 0
    tiny_a = (np.abs(actual) < normal) & ~zero_a
    tiny_e = (np.abs(expected) < normal) & ~zero_e
    return ClassDifference(
        nan=nan_a != nan_e,
        inf=infinite & ~nan_a & ~nan_e & (actual != expected),
        zero_sign=zero_a & zero_e & (np.signbit(actual) != np.signbit(expected)),
        subnormal=(tiny_a & zero_e) | (zero_a & tiny_e),
    )
