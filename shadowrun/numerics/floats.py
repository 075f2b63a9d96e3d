"""Statistics on chunks of floating-point numbers: the passes that every chunk needs, and no other.

A chunk stays in the L2 cache while about ten numpy passes look at it; each takes as long as half a memcpy, so what
the passes before prove is not looked for again:

- A sum of squares that is finite proves that all elements are.
- Where no ratio ``|a - e| / |e|`` is above a half, signs agree and no zero stands against another number, and a
  ratio r is at most r * 2 ** (mantissa + 1) units in the last place. These are counted only where that bound is above
  the greatest number known.
- An xor as long as the mantissa leaves no bits in common; afterwards none is looked for.

What is left goes to `unusual`.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.numerics.bits import same_memory
from shadowrun.numerics.chunk import UNSIGNED, Chunk, extremes, greatest_steps
from shadowrun.numerics.precision import FORMATS, FloatFormat
from shadowrun.numerics.scratch import BYTES, scratch
from shadowrun.numerics.sums import sum_of_squares
from shadowrun.numerics.unusual import Passes, add_unusual, without_classes

if TYPE_CHECKING:
    from shadowrun.numerics.totals import Totals

__all__ = ["FloatChunks"]

_WIDE: Final[dict[torch.dtype, type[np.float32 | np.float64]]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
}
_ROUNDED: Final = 1 + 2.0**-20
"""More than rounding to float32 takes from a difference and a quotient."""


_max = np.maximum.reduce  # the methods of arrays go through Python first


class _Constants(NamedTuple):
    """What follows from a dtype alone.

    Attributes:
        fmt: The format.
        wide: Type in which the arithmetic is done.
        widen: The dtype is another one.
        length: Elements of a chunk.
        unsigned: Integers of the dtype's size.
        sign: Bit of the sign.
        infinity: Its bits, in formats of two bytes and more.
        steps_of_ratio: Units in the last place that a ratio of 1 may have, at most.
        vanishing: Mean square below which squares may have underflowed.
    """

    fmt: FloatFormat
    wide: type[np.float32 | np.float64]
    widen: bool
    length: int
    unsigned: Any
    sign: int
    infinity: int
    steps_of_ratio: float
    vanishing: float


@functools.cache
def _constants(dtype: torch.dtype) -> _Constants:
    fmt, wide = FORMATS[dtype], dtype is torch.float64
    sign = 1 << (8 * dtype.itemsize - 1)
    return _Constants(
        fmt,
        _WIDE.get(dtype, np.float32),
        widen=dtype not in _WIDE,
        length=BYTES // (8 if wide else 4),
        unsigned=UNSIGNED[dtype.itemsize],
        sign=sign,
        infinity=sign - (1 << fmt.mantissa),
        steps_of_ratio=2.0 ** (fmt.mantissa + 1) * _ROUNDED,
        vanishing=1e-280 if wide else 1e-30,
    )


class FloatChunks:
    """Two flat, contiguous tensors of one float dtype, to be added chunk by chunk.

    Args:
        totals: What to add to.
        left: The target's result.
        right: The reference's.
    """

    def __init__(self, totals: Totals, left: torch.Tensor, right: torch.Tensor) -> None:
        self._totals = totals
        self._c = c = _constants(left.dtype)
        self._left, self._right = left, right
        self._bits_a: npt.NDArray[Any] = left.view(c.fmt.view).numpy()
        self._bits_e: npt.NDArray[Any] = right.view(c.fmt.view).numpy()
        self._pointers = left.data_ptr(), right.data_ptr()
        self.length = c.length
        rooms = scratch
        self._gap, self._ratio = rooms.gap.view(c.wide), rooms.ratio.view(c.wide)
        self._bits, self._flags = rooms.bits.view(self._bits_a.dtype), rooms.flags

    def add(self, start: int) -> None:
        """Add the chunk that begins at an element."""
        stop = start + self.length
        bits_a, bits_e = self._bits_a[start:stop], self._bits_e[start:stop]
        n, size = bits_a.size, bits_a.itemsize
        if same_memory(self._pointers[0] + start * size, self._pointers[1] + start * size, n * size):
            self._totals.n_finite += self._count_finite(bits_a, start)
        elif self._c.widen:
            a = scratch.wide_actual[:n].copy_(self._left[start:stop]).numpy()
            e = scratch.wide_expected[:n].copy_(self._right[start:stop]).numpy()
            self._add(Chunk(a, e, bits_a, bits_e, start))
        else:
            self._add(Chunk(bits_a.view(self._c.wide), bits_e.view(self._c.wide), bits_a, bits_e, start))

    def _count_finite(self, bits: npt.NDArray[Any], start: int) -> int:
        """Equal elements count in the mean, unless they are not finite: those are rare enough to be looked for."""
        c = self._c
        if (
            bits.itemsize > 1
            and int(_max(bits)) < c.infinity
            and int(_max(bits.view(c.unsigned))) < c.sign + c.infinity
        ):
            return bits.size
        part = self._left[start : start + bits.size]
        return int(torch.isfinite(part.float() if c.fmt.mantissa < 7 else part).sum())

    def _add(self, chunk: Chunk, *, exact: bool = False) -> None:
        n = chunk.actual.size
        gap = np.subtract(chunk.actual, chunk.expected, out=self._gap[:n])
        squares = sum_of_squares(gap)
        if not math.isfinite(squares):
            rest = without_classes(self._totals, chunk)
            if rest is None:
                return
            if rest is not chunk:
                self._add(rest, exact=True)
                return
        low, high = gap.argmin(), gap.argmax()
        least, most = gap.item(low), gap.item(high)
        greatest = max(most, -least)
        ratio = np.divide(gap, chunk.expected, out=self._ratio[:n])
        smallest, largest = extremes(ratio)
        relative = max(largest, -smallest)
        zeros = math.isnan(relative)
        if zeros:
            relative = max(float(np.fmax.reduce(ratio)), -float(np.fmin.reduce(ratio)))
            relative = 0.0 if math.isnan(relative) else relative
        proper = n * self._c.vanishing < squares < math.inf
        if exact or not (proper and relative <= 0.5 and self._add_bits(chunk, zeros=zeros)):
            found = Passes(gap, ratio, greatest, relative, squares if proper else None)
            add_unusual(self._totals, chunk, found, self._c.fmt, exact=exact)
            return
        totals = self._totals
        totals.n_finite += n
        totals.squares += squares
        if totals.wants(greatest):
            first = min(low, high) if most == -least else high if most > -least else low
            totals.offer(greatest, chunk.start + int(first))
        totals.max_rel = max(totals.max_rel, relative)
        if int(relative * self._c.steps_of_ratio) > totals.max_ulp:
            room = self._bits[:n]
            totals.max_ulp = max(totals.max_ulp, greatest_steps(chunk, room, signed=self._c.fmt.signed))

    def _add_bits(self, chunk: Chunk, *, zeros: bool) -> bool:
        """Count differing elements and bits; False, with nothing counted, if zeros differ in sign."""
        totals, fmt = self._totals, self._c.fmt
        n = chunk.bits_actual.size
        if zeros or totals.greatest_xor.bit_length() < fmt.mantissa:
            xor = np.bitwise_xor(chunk.bits_actual, chunk.bits_expected, out=self._bits[:n])
            room = xor.view(self._c.unsigned)
            greatest = room.item(room.argmax())
            if fmt.signed and greatest >= self._c.sign:
                return False
            totals.greatest_xor = max(totals.greatest_xor, greatest)
        differ = np.not_equal(chunk.bits_actual, chunk.bits_expected, out=self._flags[:n])
        totals.n_different += int(np.count_nonzero(differ))  # of bools: those of integers are counted one by one
        return True
