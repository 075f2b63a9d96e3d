"""Chunks with NaN, infinities, other signs, zeros against numbers, huge or vanishing differences.

What the short way rounds to float32, this one gives as float64 does, for the few elements that may have the greatest
value: rounding never changes the order of two numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowrun.numerics.arrays import Floats  # noqa: TC001
from shadowrun.numerics.chunk import UNSIGNED, Chunk, greatest_steps
from shadowrun.numerics.scratch import scratch
from shadowrun.numerics.sums import sum_of_squares

if TYPE_CHECKING:
    from shadowrun.numerics.precision import FloatFormat
    from shadowrun.numerics.totals import Totals

__all__ = ["Passes", "add_unusual", "without_classes"]

_BELOW = 1 - 2.0**-20
"""Less than what rounding to float32 may leave of the greatest quotient."""


class Passes(NamedTuple):
    """What the passes of `floats` found; the arrays may be overwritten.

    Attributes:
        gap: ``actual - expected``.
        ratio: ``gap / expected``, NaN where both are 0.
        greatest: The greatest size of a gap.
        relative: The greatest size of a ratio that is not NaN.
        squares: Sum of the squares of the gaps; None if they overflowed or vanished.
    """

    gap: Floats
    ratio: Floats
    greatest: float
    relative: float
    squares: float | None


def without_classes(totals: Totals, chunk: Chunk) -> Chunk | None:
    """Count elements that are NaN or infinite on a side, and give a copy of the chunk with +0 in their places.

    Returns:
        The chunk itself if there are none, None if there are no others.
    """
    a, e, bits_a, bits_e, start = chunk
    finite = np.isfinite(a) & np.isfinite(e)
    where = np.flatnonzero(~finite)
    if not where.size:
        return chunk
    xor = (bits_a[where] ^ bits_e[where]).view(UNSIGNED[bits_a.itemsize])
    totals.n_different += int(np.count_nonzero(xor))
    nan_a, nan_e = np.isnan(a[where]), np.isnan(e[where])
    totals.greatest_xor = max(totals.greatest_xor, int(xor.max(initial=0, where=~(nan_a & nan_e))))
    nan, inf = nan_a != nan_e, ~nan_a & ~nan_e & (a[where] != e[where])
    totals.n_nan += int(np.count_nonzero(nan))
    totals.n_inf += int(np.count_nonzero(inf))
    differ = nan | inf
    if not totals.worst_is_class and differ.any():
        totals.worst, totals.worst_is_class = start + int(where[differ.argmax()]), True
    if where.size == a.size:
        return None
    totals.n_finite -= where.size
    values, bits = [], []
    for memory, side, pattern in ((scratch.actual, a, bits_a), (scratch.expected, e, bits_e)):
        copy = memory.view(side.dtype)[: side.size]
        if side.itemsize == pattern.itemsize:
            copy[:] = side
            codes = copy.view(pattern.dtype)
        else:  # widened, in that very memory
            codes = pattern.copy()
            codes[where] = 0
        copy[where] = 0
        values.append(copy)
        bits.append(codes)
    return Chunk(values[0], values[1], bits[0], bits[1], start)


def add_unusual(totals: Totals, chunk: Chunk, passes: Passes, fmt: FloatFormat, *, exact: bool) -> None:
    """Add a chunk without NaN and infinities, whatever else may be in it.

    Args:
        totals: What to add to.
        chunk: The elements.
        passes: What is known of them.
        fmt: Their format.
        exact: Give the greatest differences as float64 does, also where all signs agree.
    """
    n, size = chunk.actual.size, chunk.bits_actual.itemsize
    xor = np.bitwise_xor(chunk.bits_actual, chunk.bits_expected, out=scratch.bits.view(chunk.bits_actual.dtype)[:n])
    greatest = int(xor.view(UNSIGNED[size]).max())
    mixed = fmt.signed and greatest >= 1 << (8 * size - 1)
    totals.greatest_xor = max(totals.greatest_xor, greatest)
    totals.n_different += int(np.count_nonzero(xor))
    totals.n_finite += n
    if mixed:
        opposite = np.flatnonzero(xor == np.iinfo(xor.dtype).min)
        totals.n_zero_sign += int(np.count_nonzero(chunk.actual[opposite] == 0))
    exact = exact or mixed or passes.squares is None
    _add_ratio(totals, chunk, passes, fmt, exact=exact)
    _add_gap(totals, chunk, passes, exact=exact)
    room = passes.ratio.view(np.uint8).view(xor.dtype)[:n]
    if mixed:
        more = passes.gap.view(np.uint8).view(xor.dtype)[:n]
        ulp = _steps_across_zero(chunk, xor, room, more)
    else:
        ulp = greatest_steps(chunk, room, signed=fmt.signed)
    totals.max_ulp = max(totals.max_ulp, ulp)


def _add_ratio(totals: Totals, chunk: Chunk, passes: Passes, fmt: FloatFormat, *, exact: bool) -> None:
    a, e, ratio, relative = chunk.actual, chunk.expected, passes.ratio, passes.relative
    if relative >= 1:  # a zero on the target gives -1, one on the reference an infinity
        to_zero = np.flatnonzero(ratio == -1)
        lost = (a[to_zero] == 0) & (np.abs(e[to_zero]) < fmt.normal)
        totals.n_subnormal += int(np.count_nonzero(lost))
    if np.isinf(relative):
        from_zero = np.flatnonzero(np.isinf(ratio))
        from_zero = from_zero[e[from_zero] == 0]
        totals.n_from_zero += from_zero.size
        totals.n_subnormal += int(np.count_nonzero(np.abs(a[from_zero]) < fmt.normal))
        ratio[from_zero] = 0
        relative = max(float(np.fmax.reduce(ratio)), -float(np.fmin.reduce(ratio)))
        exact = True
    if exact and relative > 0:
        size = np.abs(ratio, out=ratio)
        # Where a difference or a quotient overflows, the greatest may be another.
        near = np.flatnonzero(size > 0 if np.isinf(relative) else size >= relative * _BELOW)
        wide_a, wide_e = a[near].astype(np.float64), e[near].astype(np.float64)
        relative = float((np.abs(wide_a - wide_e) / np.abs(wide_e)).max())
    totals.max_rel = max(totals.max_rel, relative)


def _add_gap(totals: Totals, chunk: Chunk, passes: Passes, *, exact: bool) -> None:
    gap = np.abs(passes.gap, out=passes.gap)
    greatest, index = passes.greatest, 0
    if exact and greatest > 0:
        near = np.flatnonzero(gap == greatest)
        wide = np.abs(chunk.actual[near].astype(np.float64) - chunk.expected[near])
        first = int(wide.argmax())
        greatest, index = float(wide[first]), int(near[first])
    elif greatest > 0:
        index = int(gap.argmax())
    totals.offer(greatest, chunk.start + index)
    if passes.squares is not None:
        totals.squares += passes.squares
        return
    scale = greatest or 1.0
    if np.isfinite(scale):
        wide = np.subtract(chunk.actual, chunk.expected, dtype=np.float64)
        totals.squares += sum_of_squares(wide / scale) * scale * scale
    else:
        totals.squares = np.inf


def _steps_across_zero(chunk: Chunk, xor: npt.NDArray[Any], room: npt.NDArray[Any], more: npt.NDArray[Any]) -> int:
    """Greatest distance in units in the last place, where some elements differ in sign; `xor` is overwritten.

    Two of one sign are as far apart as their bits. Of other signs, they are as far as their magnitudes add up to:
    x and -2 ** (w - 1) + y in bits, so that their sum needs its first bit turned.
    """
    differ = np.right_shift(xor, 8 * xor.itemsize - 1, out=xor)  # all ones where signs differ
    sums = np.add(chunk.bits_actual, chunk.bits_expected, out=room)
    sums ^= np.iinfo(xor.dtype).min
    sums &= differ
    steps = np.subtract(chunk.bits_actual, chunk.bits_expected, out=more)
    steps &= np.invert(differ, out=differ)
    return max(int(sums.view(UNSIGNED[sums.itemsize]).max()), int(steps.max()), -int(steps.min()))
