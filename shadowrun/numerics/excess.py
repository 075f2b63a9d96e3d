"""Distance of a value from the truth in units of the operator's own rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowrun.numerics.bits import Bools  # noqa: TC001

if TYPE_CHECKING:
    from shadowrun.numerics.precision import FloatFormat

__all__ = ["PART", "Truth", "excess"]

Array = npt.NDArray[np.float64]

EDGE = 8.0
"""Units of rounding by which a finite truth may miss the greatest number and still overflow."""

# Elements that are looked at together: their dozen copies stay in the cache, in memory that is used again.
PART = 8192


class Truth(NamedTuple):
    """One result of the float64 oracle, flat; complex results by components.

    Attributes:
        value: Unperturbed.
        magnitude: ``|value|``; for complex results the modulus, at both components.
        spread: Greatest distance of a perturbed value from it, so far.
        flips: The class (NaN, infinite, its sign) or, for integers, the value changed under perturbation.
    """

    value: npt.NDArray[Any]
    magnitude: Array
    spread: Array
    flips: Bools

    def unit(self, fmt: FloatFormat, floor: Array | float = 0.0) -> Array:
        """What an excess of 1 is for each element: spread, rounding error and the smallest subnormal."""
        # The smallest subnormal is the absolute rounding error near 0, where u |o| vanishes.
        return self.spread + fmt.roundoff * self.magnitude + fmt.smallest + floor


def excess(
    value: Array, truth: Truth, fmt: FloatFormat, where: npt.NDArray[np.intp], floor: Array | float = 0.0
) -> Array:
    """``|value - o| / (s + u |o| + smallest subnormal)`` for each element asked for.

    Where the classes differ the excess is infinite, except at the edge of overflow (the truth is within `EDGE`
    units of the greatest number), and where perturbation changes the class, which leaves it undefined: then 0.
    The formula joins a mixed error bound (Higham, Accuracy and Stability, 2nd ed., section 1.6) with Monte-Carlo
    arithmetic (Parker 1997) for the conditioning.

    Args:
        value: float64 array: the elements asked for.
        truth: The oracle's result, all elements.
        fmt: Dtype of the result before it was widened.
        where: Indices of the elements asked for.
        floor: Added to the denominator.
    """
    found = np.empty(where.size)
    is_whole = where.size == truth.value.size  # indices ascend
    for start in range(0, where.size, PART):
        part = slice(start, start + PART)
        share = floor[part] if isinstance(floor, np.ndarray) and floor.size == where.size else floor
        found[part] = _part(value[part], truth, fmt, part if is_whole else where[part], share)
    return found


def _part(
    value: Array, truth: Truth, fmt: FloatFormat, where: slice | npt.NDArray[np.intp], floor: Array | float
) -> Array:
    part = Truth(truth.value[where], truth.magnitude[where], truth.spread[where], truth.flips[where])
    o = part.value
    with np.errstate(all="ignore"):
        unit = part.unit(fmt, floor)
        distance: Array = np.abs(value - o) / unit
        if np.isfinite(distance.max()):  # so is each value, and what is equal is at 0
            return distance
        # A correct result a few units below the greatest number may round to infinity.
        overflow = np.isinf(value) & (np.sign(value) == np.sign(o)) & (part.magnitude + EDGE * unit >= fmt.largest)
    # Subtraction of equal infinities, and of NaN, gives NaN: equality decides first.
    same = (value == o) | (np.isnan(value) & np.isnan(o))
    distance[np.isnan(distance) | np.isinf(value) | np.isinf(o)] = np.inf
    distance[same | overflow] = 0.0
    # Inputs whose rounding changes the class do not determine it.
    distance[part.flips & ~(np.isfinite(value) & np.isfinite(o))] = 0.0
    return distance
