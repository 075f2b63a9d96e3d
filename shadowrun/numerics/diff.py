"""Statistics of the difference between two tensors: the specification, in plain numpy, of those in C.

`shadowrun.native` computes the same figures where it is built, and falls back to this file for what it does not know.
Every field is equal bit for bit, except for the last digits of the root mean square error, whose terms may be added in
any order (tests/numerics/test_native_statistics.py).

Tensors are compared in chunks, so that the copies take little memory. The length of a chunk is part of the
specification: a chunk of 32-bit or narrower floats uses float32 arithmetic if all its elements are finite and of one
sign, and if the squares of the differences neither overflow nor underflow. Any other chunk uses float64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.native import core, tensors
from shadowrun.numerics.bits import dense_order
from shadowrun.numerics.elements import plain
from shadowrun.numerics.form import Value, as_tensor, dtype_name, forms
from shadowrun.numerics.precision import FORMATS, FloatFormat, remaining_bits, ulp_distance
from shadowrun.types import TensorDiff, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.numerics.bits import Floats

__all__ = ["CHUNK", "NativeFormat", "Totals", "diff", "format_of", "native_diff"]

CHUNK: Final = 32768
"""Elements compared together. `CHUNK` in native/stats_float.h has to agree: see the module's docstring."""

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INTEGERS: Final = frozenset(
    getattr(torch, name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
# DLPack's codes of dtypes that are not signed (0), unsigned (1) or floating (2) numbers.
_DLPACK: Final = {torch.bool: 6, torch.bfloat16: 4}

Ints = npt.NDArray[Any]


@dataclass(slots=True)
class Totals:
    """Statistics of the chunks compared so far; `shadowrun.native` returns them in this order.

    Attributes:
        squares: Sum of squared differences of the elements that are finite on both sides.
        n_finite: Number of those elements.
        greatest_xor: Of the bits of two elements, as unsigned numbers. Only its bit length counts, up to the size of
            the mantissa.
        worst: Flat index of the worst element, -1 while there is none.
        worst_is_class: The worst element is NaN or infinite on one side only, which outranks any finite difference.
        worst_actual: Value of the target's worst element.
        worst_expected: Value of the reference's.
    """

    # In the order of C's tuple: `_native_statistics` gives positions, and no names.
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
    worst_actual: float = 0.0
    worst_expected: float = 0.0

    def keep_worst(self, gap: float, index: int) -> None:
        """Take the element as the worst so far, unless a class difference or a greater gap is known."""
        if gap > self.max_abs or self.worst < 0:
            if not self.worst_is_class:
                self.worst = index
            self.max_abs = max(self.max_abs, gap)


# Totals that are a figure of a result as they are.
# The rest follows from several totals, or from a verdict.
_FIGURES: Final = tuple({f.name for f in fields(Totals)} & {f.name for f in fields(TensorDiff)})


def diff(name: str, actual: Value, expected: Value) -> TensorDiff:
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
    # One loop in C reads memory once, where each tensor operation reads it again.
    if native_diff is not None and (found := native_diff(name, actual, expected)) is not None:
        return found
    form_actual, form_expected, detail = forms(actual, expected)
    if actual is None or expected is None or form_actual.shape != form_expected.shape:
        return TensorDiff(name, form_actual, form_expected, detail=detail)
    a, e = plain(as_tensor(actual)), plain(as_tensor(expected))
    if a.shape != e.shape:
        return TensorDiff(name, form_actual, form_expected, detail=detail)
    if a.dtype != e.dtype:
        # float64 holds the values of both dtypes, so the difference is that of the values.
        a, e = a.to(torch.float64), e.to(torch.float64)
    shape, n = a.shape, a.numel()
    order = tuple(range(a.dim()))
    if not (a.is_contiguous() and e.is_contiguous()):
        # In the order of memory, as the C loop; the index of the worst element is mapped back by `_index`.
        order = dense_order(e)
        a, e = a.permute(order).contiguous(), e.permute(order).contiguous()
    fmt, form = FORMATS.get(a.dtype), format_of(a.dtype)
    totals = _add_up(a.view(-1), e.view(-1), fmt) if form is None else Totals(*_native_statistics(a, e, form))
    return TensorDiff(
        name,
        form_actual,
        form_expected,
        n_elements=n,
        rmse=(totals.squares / totals.n_finite) ** 0.5 if totals.n_finite else 0.0,
        remaining_bits=-1 if fmt is None else remaining_bits(totals.greatest_xor, fmt.mantissa),
        worst_index=_index(max(totals.worst, 0), shape, order)[: len(form_actual.shape)] if n else (),
        detail=detail,
        **{name: getattr(totals, name) for name in _FIGURES},
    )


class NativeFormat(NamedTuple):
    """A dtype in the form that native/stats.c takes.

    Attributes:
        name: Of the dtype; ``float8`` for all floats of 8 bits.
        normal: Smallest positive normal number.
        vanishing: Mean square below which squares may have underflowed.
        signed: The format has a sign.
        numbers: The 256 numbers of an 8-bit float format as float32, else None.
    """

    name: str
    normal: float = 0.0
    vanishing: float = 0.0
    signed: bool = True
    numbers: bytes | None = None


@functools.cache
def format_of(dtype: torch.dtype) -> NativeFormat | None:
    """The format of a dtype; None where the C extension does not know it or is not built."""
    if core is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if dtype in _INTEGERS:
        return NativeFormat(name)
    fmt = FORMATS.get(dtype)
    if fmt is None:
        return None
    if dtype.itemsize > 1:  # C widens these by itself; the 256 numbers of an 8-bit format come as a table
        return NativeFormat(name, fmt.normal, fmt.vanishing)
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy().tobytes()
    return NativeFormat("float8", fmt.normal, fmt.vanishing, fmt.signed, numbers)


def _native_statistics(actual: torch.Tensor, expected: torch.Tensor, form: NativeFormat) -> tuple[Any, ...]:
    """Fields of `Totals`, in their order, for two contiguous tensors of one dtype."""
    assert core is not None  # `format_of` returned a format
    return core.statistics(actual.data_ptr(), expected.data_ptr(), actual.numel(), actual.nbytes, form)  # type: ignore[no-any-return]


def _native_diff() -> Callable[[str, Value, Value], TensorDiff | None] | None:
    if core is None or tensors.plainly_equal is None:
        return None
    # The table is handed to C once, so that no call looks up a dtype in Python.
    known = []
    for dtype in (*FORMATS, *_INTEGERS):
        fmt = FORMATS.get(dtype)
        # Formats with a table of numbers take the way through `_native_statistics`. An operator makes the table: none
        # runs when this is imported, since torch then chooses its kernels by the environment.
        if (fmt is None or dtype.itemsize > 1) and (form := format_of(dtype)) is not None:
            code = _DLPACK.get(dtype, 2 if fmt is not None else 0 if dtype.is_signed else 1)
            mantissa = -1 if fmt is None else fmt.mantissa
            known.append((code, 8 * dtype.itemsize, dtype_name(dtype), mantissa, tuple(form)))
    return core.diff if core.setup_diff(TensorDiff, TensorMeta, tuple(known)) else None


native_diff = _native_diff()
"""`diff` for plain tensors of the same form; it returns None for all others."""


def _index(flat: int, shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Index of an element, given its position in memory and the order of the dimensions there, outermost first."""
    index = [0] * len(shape)
    for d in reversed(order):
        flat, index[d] = divmod(flat, shape[d])
    return tuple(index)


def _add_up(actual: torch.Tensor, expected: torch.Tensor, fmt: FloatFormat | None) -> Totals:
    """Totals of two flat, contiguous tensors of one dtype."""
    totals = Totals()
    if not actual.numel():
        return totals
    with np.errstate(all="ignore"):
        for start in range(0, actual.numel(), CHUNK):
            a, e = actual[start : start + CHUNK], expected[start : start + CHUNK]
            if fmt is None:
                _add_integers(totals, a, e, start)
            else:
                _add_floats(totals, a, e, start, fmt)
    worst = max(totals.worst, 0)
    totals.worst_actual, totals.worst_expected = float(actual[worst].item()), float(expected[worst].item())
    return totals


def _add_floats(totals: Totals, actual: torch.Tensor, expected: torch.Tensor, start: int, fmt: FloatFormat) -> None:
    bits_a, bits_e = actual.view(fmt.view).numpy(), expected.view(fmt.view).numpy()
    xor = bits_a ^ bits_e
    n_different = int(np.count_nonzero(xor))
    a, e = _widened(actual), _widened(expected)
    if not n_different:
        totals.n_finite += int(np.count_nonzero(np.isfinite(e)))
        return
    totals.n_different += n_different
    gap = np.abs(a - e)
    # The sum decides whether all elements are finite, at no further pass over memory.
    squares = _sum_of_squares(gap)
    n_finite = a.size
    if not np.isfinite(squares):  # else all elements are finite
        finite = np.isfinite(a) & np.isfinite(e)
        n_finite = int(np.count_nonzero(finite))
    if n_finite < a.size:
        _add_classes(totals, a, e, xor, start)
        if not n_finite:
            return
        # From here on, +0 stands for what is NaN or infinite on a side: equal elements, which change no figure.
        a, e, xor, bits_a, bits_e = (np.where(finite, x, x.dtype.type(0)) for x in (a, e, xor, bits_a, bits_e))
        gap = np.abs(a - e)
        squares = _sum_of_squares(gap)
    totals.n_finite += n_finite
    one_sign = _add_bits(totals, bits_a, bits_e, xor, fmt)
    if not one_sign:
        totals.n_zero_sign += int(np.count_nonzero((a == 0) & (xor == np.iinfo(xor.dtype).min)))
    proper = a.size * fmt.vanishing < squares <= float(np.finfo(a.dtype).max)
    if proper:
        totals.squares += squares
    if not (proper and one_sign and n_finite == a.size):
        a, e = a.astype(np.float64, copy=False), e.astype(np.float64, copy=False)
        gap = np.abs(a - e)
        if not proper:
            totals.squares += _scaled_squares(gap)
    worst = int(gap.argmax())
    totals.keep_worst(float(gap[worst]), start + worst)
    _add_ratios(totals, a, e, gap)
    if float(np.abs(e).min()) < fmt.normal:
        _add_zeros(totals, a, e, fmt.normal)


def _widened(values: torch.Tensor) -> Floats:
    wide = values if values.dtype is torch.float64 else values.float()
    return wide.numpy()


def _add_classes(totals: Totals, a: Floats, e: Floats, xor: Ints, start: int) -> None:
    """Count the elements that are NaN or infinite on one side only, or infinite with other signs."""
    nan_a, nan_e = np.isnan(a), np.isnan(e)
    nan = nan_a != nan_e
    inf = (np.isinf(a) | np.isinf(e)) & ~nan_a & ~nan_e & (a != e)
    totals.n_nan += int(np.count_nonzero(nan))
    totals.n_inf += int(np.count_nonzero(inf))
    if not totals.worst_is_class and (nan | inf).any():
        totals.worst, totals.worst_is_class = start + int((nan | inf).argmax()), True
    patterns = xor.view(_UNSIGNED[xor.itemsize])
    totals.greatest_xor = max(totals.greatest_xor, int(patterns.max(initial=0, where=~(nan_a & nan_e))))


def _add_bits(totals: Totals, bits_a: Ints, bits_e: Ints, xor: Ints, fmt: FloatFormat) -> bool:
    """Add the distances in bits of finite elements; returns whether no element differs in sign."""
    unsigned, width = _UNSIGNED[xor.itemsize], 8 * xor.itemsize
    greatest = int(xor.view(unsigned).max())
    totals.greatest_xor = max(totals.greatest_xor, greatest)
    one_sign = not fmt.signed or greatest < 1 << (width - 1)
    if not one_sign:
        ulp = ulp_distance(bits_a, bits_e, width)
    elif fmt.signed:  # numbers of one sign order as their bits do, or in reverse
        # No int64 copies are needed: bits of one sign differ by less than the range of their integer dtype.
        steps = bits_a - bits_e
        ulp = max(int(steps.max()), -int(steps.min()))
    else:
        ulp = int(np.abs(bits_a.view(unsigned).astype(np.int64) - bits_e.view(unsigned)).max())
    totals.max_ulp = max(totals.max_ulp, ulp)
    return one_sign


def _add_ratios(totals: Totals, a: Floats, e: Floats, gap: Floats) -> None:
    """Add the relative differences of finite elements, in the dtype of the arrays if that holds them."""
    # `fmax` ignores 0 / 0: equal zeros have no relative difference.
    relative = float(np.fmax.reduce(gap / np.abs(e)))
    if not np.isfinite(relative):  # a division by zero, or a quotient that only float64 holds
        wide_a, wide_e = a.astype(np.float64, copy=False), e.astype(np.float64, copy=False)
        gap = np.abs(wide_a - wide_e)
        relative = float(np.divide(gap, np.abs(wide_e), where=wide_e != 0, out=np.zeros_like(gap)).max())
    totals.max_rel = max(totals.max_rel, relative)


def _scaled_squares(gap: Floats) -> float:
    """Sum of squares that overflow or underflow."""
    scale = float(gap.max()) or 1.0
    return _sum_of_squares(gap / scale) * scale * scale if np.isfinite(scale) else np.inf


def _sum_of_squares(values: npt.NDArray[np.floating[Any]]) -> float:
    # Not np.dot: OpenBLAS runs long float64 products on its own threads, and waiting for those takes milliseconds on a
    # busy machine, where the sum takes microseconds.
    return float(np.sum(np.square(values, dtype=np.float64)))


def _add_zeros(totals: Totals, a: Floats, e: Floats, normal: float) -> None:
    """Count zeros on one side, against subnormal numbers and, on the reference's side, against any number."""
    zero_a, zero_e = a == 0, e == 0
    totals.n_from_zero += int(np.count_nonzero(zero_e & ~zero_a))
    tiny = (np.abs(a) < normal) & (np.abs(e) < normal)
    totals.n_subnormal += int(np.count_nonzero(tiny & (zero_a != zero_e)))


def _add_integers(totals: Totals, actual: torch.Tensor, expected: torch.Tensor, start: int) -> None:
    boolean = actual.dtype is torch.bool
    if boolean:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    a, e = actual.numpy(), expected.numpy()
    totals.n_finite += a.size
    n_different = int(np.count_nonzero(a != e))
    if not n_different:
        return
    totals.n_different += n_different
    # Wrapped differences of equal-width integers are exact when read as unsigned.
    gap = (np.maximum(a, e) - np.minimum(a, e)).view(_UNSIGNED[a.itemsize])
    worst = int(gap.argmax())
    if not boolean:
        totals.max_ulp = max(totals.max_ulp, int(gap[worst]))
    totals.keep_worst(float(gap[worst]), start + worst)
    # Squares of int64 differences overflow an integer.
    wide = gap.astype(np.float64)
    totals.squares += _sum_of_squares(wide)
    size = np.abs(e.astype(np.float64))
    totals.n_from_zero += int(np.count_nonzero((size == 0) & (gap > 0)))
    ratio = np.divide(wide, size, where=size > 0, out=np.zeros_like(wide))
    totals.max_rel = max(totals.max_rel, float(ratio.max()))
