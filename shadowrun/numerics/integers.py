"""Statistics on chunks of integers and bools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.numerics.sums import sum_of_squares

if TYPE_CHECKING:
    from shadowrun.numerics.totals import Totals

__all__ = ["add_integers"]

Ints = npt.NDArray[Any]

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def add_integers(totals: Totals, left: torch.Tensor, right: torch.Tensor, start: int) -> None:
    """Add a chunk whose bits differ.

    Args:
        totals: What to add to.
        left: Flat chunk of the target's result, of an integer dtype or bool.
        right: The reference's.
        start: Flat index of its first element.
    """
    boolean = left.dtype is torch.bool
    if boolean:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    a, e = left.numpy(), right.numpy()
    totals.n_finite += a.size
    if boolean and max(a.max(), e.max()) <= 1:
        _add_bools(totals, a, e, start)
        return
    # Wrapped differences of equal-width integers are exact when read as unsigned.
    gap = np.maximum(a, e)
    gap -= np.minimum(a, e)
    gap = gap.view(_UNSIGNED[a.itemsize])
    totals.n_different += int(np.count_nonzero(gap))
    greatest = int(gap.max())
    if not boolean:
        totals.max_ulp = max(totals.max_ulp, greatest)
    if totals.wants(float(greatest)):
        totals.offer(float(greatest), start + int(gap.argmax()))
    wide = gap.astype(np.float64)
    totals.squares += sum_of_squares(wide)
    size = e.astype(np.float64)
    # What is equal to 0 on both sides is NaN here, what is 0 on the reference's infinite: no integer is otherwise.
    ratio = np.abs(np.divide(wide, size, out=wide), out=wide)
    relative = float(np.fmax.reduce(ratio))
    if np.isinf(relative):
        totals.n_from_zero += int(np.count_nonzero(np.isinf(ratio)))
        relative = float(np.fmax.reduce(ratio, where=ratio < np.inf, initial=0.0))
    totals.max_rel = max(totals.max_rel, relative)


def _add_bools(totals: Totals, a: Ints, e: Ints, start: int) -> None:
    """Bools differ by 1 or not at all: everything follows from two counts."""
    differ = np.not_equal(a, e)
    n = int(np.count_nonzero(differ))
    from_zero = int(np.count_nonzero(np.greater(a, e)))
    totals.n_different += n
    totals.n_from_zero += from_zero
    totals.squares += n
    if totals.wants(1.0):
        totals.offer(1.0, start + int(differ.argmax()))
    if n > from_zero:
        totals.max_rel = max(totals.max_rel, 1.0)
