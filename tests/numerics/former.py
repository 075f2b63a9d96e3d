"""Statistics of two tensors as they were worked out before the passes of `numerics.floats` were cut: the oracle.

Each chunk takes all passes, in float64 where anything is unusual; nothing is left out because something else proves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.numerics.bits import dense_order
from shadowrun.numerics.form import Value, as_tensor, form_difference, meta
from shadowrun.numerics.plain import plain
from shadowrun.numerics.precision import FORMATS, FloatFormat, remaining_bits, ulp_distance
from shadowrun.types import TensorDiff

if TYPE_CHECKING:
    from shadowrun.numerics.arrays import Bools, Floats

__all__ = ["class_difference", "former_diff"]

CHUNK: Final = 32768
"""Elements looked at together: 128 KB of float32 on each side."""

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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


@dataclass(slots=True)
class _Totals:
    """What the chunks add up to; the fields are those of `TensorDiff`."""

    n_different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    squares: float = 0.0
    n_finite: int = 0
    max_ulp: int = 0
    greatest_xor: int = 0
    n_nan: int = 0
    n_inf: int = 0
    n_zero_sign: int = 0
    n_subnormal: int = 0
    n_from_zero: int = 0
    worst: int = -1
    worst_is_class: bool = False

    def offer(self, gap: float, index: int) -> None:
        """Take the element as the worst so far, unless a class difference or a greater gap is known."""
        if gap > self.max_abs or self.worst < 0:
            if not self.worst_is_class:
                self.worst = index
            self.max_abs = max(self.max_abs, gap)


def former_diff(name: str, actual: Value, expected: Value) -> TensorDiff:
    """Measure how far a result of the target is from that of the reference.

    Complex tensors are counted by components (two elements each). Results of different dtype are compared as
    float64; of different shape, or None, not at all beyond their form. The fields that need a verdict
    (`n_mismatched`, the two excesses) are left at their defaults.

    Args:
        name: Name of the result.
        actual: CPU tensor of any dtype and layout, Python scalar, or None: the target's.
        expected: The reference's.

    Raises:
        Uncomparable: If torch cannot give the values of a tensor.
    """
    detail = form_difference(actual, expected)
    form = TensorDiff(name, meta(actual), meta(expected), detail=detail)
    if actual is None or expected is None or form.actual.shape != form.expected.shape:
        return form
    left, right = plain(as_tensor(actual)), plain(as_tensor(expected))
    if left.shape != right.shape:
        return form
    if left.dtype != right.dtype:
        left, right = left.to(torch.float64), right.to(torch.float64)
    order = dense_order(right)
    left, right = left.permute(order).contiguous(), right.permute(order).contiguous()
    totals = _Totals()
    flat_left, flat_right = left.reshape(-1), right.reshape(-1)
    fmt = FORMATS.get(left.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, left.numel(), CHUNK):
            a, e = flat_left[start : start + CHUNK], flat_right[start : start + CHUNK]
            if fmt is None:
                _integer_chunk(totals, a, e, start)
            else:
                _float_chunk(totals, a, e, start, fmt)
    index: tuple[int, ...] = ()
    worst = max(totals.worst, 0)
    if left.numel():
        by_order = np.unravel_index(worst, left.shape)
        place = dict(zip(order, map(int, by_order), strict=True))
        index = tuple(place[d] for d in range(len(order)))[: len(form.actual.shape)]
    return TensorDiff(
        name,
        form.actual,
        form.expected,
        n_elements=left.numel(),
        n_different=totals.n_different,
        max_abs=totals.max_abs,
        max_rel=totals.max_rel,
        rmse=(totals.squares / totals.n_finite) ** 0.5 if totals.n_finite else 0.0,
        max_ulp=totals.max_ulp,
        remaining_bits=-1 if fmt is None else remaining_bits(totals.greatest_xor, fmt.mantissa),
        n_nan=totals.n_nan,
        n_inf=totals.n_inf,
        n_zero_sign=totals.n_zero_sign,
        n_subnormal=totals.n_subnormal,
        worst_index=index,
        worst_actual=float(flat_left[worst].item()) if left.numel() else 0.0,
        worst_expected=float(flat_right[worst].item()) if left.numel() else 0.0,
        detail=detail,
        n_from_zero=totals.n_from_zero,
    )


def _float_chunk(totals: _Totals, left: torch.Tensor, right: torch.Tensor, start: int, fmt: FloatFormat) -> None:
    n = left.numel()
    bits_a: npt.NDArray[Any] = left.view(fmt.view).numpy()
    bits_e: npt.NDArray[Any] = right.view(fmt.view).numpy()
    xor = np.bitwise_xor(bits_a, bits_e, out=np.empty_like(bits_a))
    unsigned = xor.view(_UNSIGNED[xor.itemsize])
    greatest = int(unsigned.max())
    if greatest == 0:
        # Equal elements still count in the mean, unless they are not finite: those are rare enough to be looked for.
        totals.n_finite += int(torch.isfinite(left.float() if fmt.mantissa < 7 else left).sum())
        return
    totals.n_different += int(np.count_nonzero(xor))
    a: Floats
    e: Floats
    if left.dtype in (torch.float32, torch.float64):
        a, e = left.numpy(), right.numpy()
    else:
        a = left.float().numpy()
        e = right.float().numpy()
    gap = np.subtract(a, e, out=np.empty_like(a))
    squares = float(np.dot(gap, gap))
    # A finite, not vanishing sum of squares proves that all elements are finite and that no square underflowed
    # enough to matter.
    same_sign = not fmt.signed or greatest < 1 << (8 * xor.itemsize - 1)
    if not (same_sign and np.isfinite(squares) and squares > n * 1e-30):
        _careful_chunk(totals, a, e, bits_a, bits_e, start, fmt)
        return
    totals.greatest_xor = max(totals.greatest_xor, greatest)
    if fmt.signed:
        steps = np.subtract(bits_a, bits_e, out=xor)
    else:  # without a sign, the difference needs one bit more
        steps = bits_a.view(np.uint8).astype(np.int16) - bits_e.view(np.uint8)
    totals.max_ulp = max(totals.max_ulp, int(steps.max()), -int(steps.min()))
    totals.squares += squares
    totals.n_finite += n
    gap = np.abs(gap, out=gap)
    worst = int(gap.argmax())
    totals.offer(float(gap[worst]), start + worst)
    size = np.abs(e, out=np.empty_like(a))
    if float(size.min()) < fmt.normal:
        totals.n_subnormal += int(np.count_nonzero(class_difference(a, e, fmt.normal).subnormal))
        totals.n_from_zero += int(np.count_nonzero((e == 0) & (a != 0)))
    ratio = np.divide(gap, size, out=gap)
    relative = float(np.fmax.reduce(ratio))
    if not np.isfinite(relative):
        # A division by zero, or a quotient that only float64 holds.
        wide = size.astype(np.float64)
        relative = float(np.max(np.abs(a.astype(np.float64) - e) / wide, initial=0.0, where=wide > 0))
    totals.max_rel = max(totals.max_rel, relative)


def _careful_chunk(
    totals: _Totals,
    a: Floats,
    e: Floats,
    bits_a: npt.NDArray[Any],
    bits_e: npt.NDArray[Any],
    start: int,
    fmt: FloatFormat,
) -> None:
    """The same for chunks with NaN, infinities, other signs, huge or vanishing differences."""
    wide_a, wide_e = a.astype(np.float64), e.astype(np.float64)
    classes = class_difference(wide_a, wide_e, fmt.normal)
    totals.n_nan += int(np.count_nonzero(classes.nan))
    totals.n_inf += int(np.count_nonzero(classes.inf))
    totals.n_zero_sign += int(np.count_nonzero(classes.zero_sign))
    totals.n_subnormal += int(np.count_nonzero(classes.subnormal))
    exceptional = np.flatnonzero(classes.nan | classes.inf)
    if exceptional.size and not totals.worst_is_class:
        totals.worst, totals.worst_is_class = start + int(exceptional[0]), True
    finite = np.isfinite(wide_a) & np.isfinite(wide_e)
    xor = np.bitwise_xor(bits_a, bits_e).view(_UNSIGNED[bits_a.itemsize])
    both_nan = np.isnan(wide_a) & np.isnan(wide_e)
    totals.greatest_xor = max(totals.greatest_xor, int(xor.max(initial=0, where=~both_nan)))
    totals.n_finite += int(np.count_nonzero(finite))
    if not finite.any():
        return
    width = 8 * bits_a.itemsize
    if fmt.signed:
        ulp = ulp_distance(bits_a[finite], bits_e[finite], width)
    else:
        ulp = int(np.abs(bits_a[finite].astype(np.uint8).astype(int) - bits_e[finite].astype(np.uint8)).max())
    totals.max_ulp = max(totals.max_ulp, ulp)
    gap = np.abs(wide_a - wide_e, where=finite, out=np.zeros_like(wide_a))
    scale = float(gap.max()) or 1.0
    totals.squares += float(np.sum(np.square(gap / scale))) * scale * scale if np.isfinite(scale) else np.inf
    worst = int(gap.argmax())
    totals.offer(float(gap[worst]), start + worst)
    size = np.abs(wide_e)
    totals.n_from_zero += int(np.count_nonzero(finite & (wide_e == 0) & (wide_a != 0)))
    relative = np.divide(gap, size, where=finite & (size > 0), out=np.zeros_like(gap))
    totals.max_rel = max(totals.max_rel, float(relative.max()))


def _integer_chunk(totals: _Totals, left: torch.Tensor, right: torch.Tensor, start: int) -> None:
    boolean = left.dtype is torch.bool
    if boolean:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    a, e = left.numpy(), right.numpy()
    n_different = int(np.count_nonzero(a != e))
    totals.n_finite += a.size
    if not n_different:
        return
    totals.n_different += n_different
    # Wrapped differences of equal-width integers are exact when read as unsigned.
    gap = np.where(a > e, a - e, e - a).view(_UNSIGNED[a.itemsize])
    worst = int(gap.argmax())
    wide = gap.astype(np.float64)
    totals.max_ulp = max(totals.max_ulp, 0 if boolean else int(gap[worst]))
    totals.offer(float(gap[worst]), start + worst)
    totals.squares += float(np.dot(wide, wide))
    size = np.abs(e.astype(np.float64))
    totals.n_from_zero += int(np.count_nonzero((size == 0) & (gap > 0)))
    totals.max_rel = max(totals.max_rel, float(np.divide(wide, size, where=size > 0, out=np.zeros_like(wide)).max()))
