"""The part of two float tensors that is looked at together."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowrun.numerics.arrays import Floats  # noqa: TC001

__all__ = ["UNSIGNED", "Chunk", "extremes", "greatest_steps"]

Ints = npt.NDArray[Any]

UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers by their size in bytes."""


class Chunk(NamedTuple):
    """Elements of both sides.

    Attributes:
        actual: The target's, as float32 or float64.
        expected: The reference's.
        bits_actual: The target's in their own dtype, as signed integers.
        bits_expected: The reference's.
        start: Flat index of the first element.
    """

    actual: Floats
    expected: Floats
    bits_actual: Ints
    bits_expected: Ints
    start: int


def extremes(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Least and greatest element of a flat array that is not empty, NaN if there is one.

    An index costs less to find than a value: numpy reduces through its ufunc machinery, 0.7 µs for a few elements.
    """
    return values.item(values.argmin()), values.item(values.argmax())


def greatest_steps(chunk: Chunk, room: Ints, *, signed: bool) -> int:
    """Greatest distance in units in the last place, where no two elements differ in sign.

    Args:
        chunk: No NaN in it.
        room: Memory for the differences, as long as the chunk, of its integer dtype.
        signed: Whether the format has a sign; else the bits are unsigned.
    """
    if signed:
        steps = np.subtract(chunk.bits_actual, chunk.bits_expected, out=room)
        least, most = extremes(steps)
        return int(max(most, -least))
    a, e = chunk.bits_actual.view(np.uint8), chunk.bits_expected.view(np.uint8)
    return int((np.maximum(a, e) - np.minimum(a, e)).max())
