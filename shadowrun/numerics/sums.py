"""Sums of squares on the calling thread alone."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["sum_of_squares"]

_ALONE: Final = 8192
"""OpenBLAS shares a float64 dot product of more than 10,000 elements with threads of its own, whose waiting for a
processor was seen to take milliseconds where the sum takes microseconds. It leaves float32 to one thread."""


def sum_of_squares(values: npt.NDArray[np.floating[Any]]) -> float:
    """Sum of squares of a flat array, in its own precision."""
    if values.itemsize < 8 or values.size <= _ALONE:
        return float(np.dot(values, values))
    return sum(float(np.dot(part, part)) for part in (values[i : i + _ALONE] for i in range(0, values.size, _ALONE)))
