"""What the sampled elements of results say: equality by value, differences, and groups by magnitude."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from shadowrun.numerics.hash_ladder import mantissa_of
from shadowrun.numerics.raw_numbers import decoded, ulps_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shadowrun.studies.classes.equivalence import Value

__all__ = ["are_complete", "difference", "groups_by_magnitude", "identity", "n_undecided", "ulp_difference"]

# Size of a float; a complex number is two.
_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 8, "complex64": 4, "complex32": 2,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
}  # fmt: skip


def identity(value: Value, *, by_value: bool) -> object:
    """What equal results have in common: dtype, shape and bytes, or values where all of them are known."""
    form = value.form.of_values
    if by_value and are_complete(value) and value.form.dtype in _BYTES:
        return (*form, "values", _canonical(value).tobytes())
    return (*form, int(value.ladder[0]))


def n_undecided(values: Sequence[Value]) -> int:
    """Pairs of classes that may be equal by value: hashes cannot show it, and samples and counts do not exclude it.

    Hashes of bytes differ for NaNs of other payloads and zeros of other sign. Where not all elements were sampled, two
    results may be equal by value only if their samples, ranges and counts of NaN, infinities and zeros are, and at
    least one of them has a NaN or a negative zero.
    """
    return sum(_may_be_equal(a, b) for i, a in enumerate(values) for b in values[:i])


def are_complete(value: Value) -> bool:
    """Whether all elements are sampled."""
    per_element = 2 if value.form.dtype.startswith("complex") else 1
    return len(value.bits) == per_element * value.form.n_elements


def difference(a: Value, b: Value) -> float:
    """Greatest difference of sampled elements, relative to the greatest magnitude in either.

    Returns:
        0 if they are equal by value; infinity if one is not finite where the other is, or forms differ; NaN if the
        dtype cannot be decoded here.
    """
    if a.form.of_values != b.form.of_values or len(a.bits) != len(b.bits):
        return math.inf
    # float64 holds every value of the shorter floats, so that differences are not rounded to their dtype.
    x, y = (decoded(v.bits, v.form.dtype) for v in (a, b))
    if x is None or y is None:
        return math.nan
    finite = np.isfinite(x) & np.isfinite(y)
    unequal = ~finite & ~((x == y) | (np.isnan(x) & np.isnan(y)))
    if unequal.any():
        return math.inf
    x, y = x[finite], y[finite]
    with np.errstate(over="ignore"):
        distance = float(np.abs(x - y).max(initial=0.0))
    if not distance:
        return 0.0
    # Of the whole results, where that is known: samples may miss the greatest element.
    ranges = [abs(float(v.row[name])) for v in (a, b) for name in ("min", "max")]
    scale = max([float(np.abs(x).max()), float(np.abs(y).max()), *(r for r in ranges if math.isfinite(r))])
    return distance / scale


def ulp_difference(a: Value, b: Value) -> int | None:
    """Greatest difference of sampled elements in ULP: adjacent floats are 1 apart. None for integers."""
    if (
        a.form.of_values != b.form.of_values
        or len(a.bits) != len(b.bits)
        or a.form.dtype not in _BYTES
        or not len(a.bits)
    ):
        return None
    return int(ulps_apart(a.bits, b.bits, 8 * _BYTES[a.form.dtype]).max())


def groups_by_magnitude(values: Sequence[Value]) -> list[int]:
    """Group of each class: those whose samples differ by rounding are together (single linkage), largest first seen.

    Two results differ by more than rounding could explain if a sampled element differs by more than
    2 ** -(mantissa bits / 2) of the greatest magnitude: half of the digits. Such platforms had other inputs or weights,
    or compute in a much shorter format, such as TF32 for float32.
    """
    group = list(range(len(values)))
    for i, a in enumerate(values):
        for j, b in enumerate(values[:i]):
            if group[i] != group[j] and difference(a, b) <= 2.0 ** -(mantissa_of(a.form.dtype) / 2):
                # Single linkage: a chain of small steps is one group. A union of sets would be faster; classes are few.
                group = [group[j] if g == group[i] else g for g in group]
    return group


def _may_be_equal(a: Value, b: Value) -> bool:
    if a.form.of_values != b.form.of_values or a.form.dtype not in _BYTES or are_complete(a):
        return False
    if not any(int(v.row[name]) for v in (a, b) for name in ("n_nan", "n_neg_zero")):
        return False
    counts = [
        (
            int(v.row["n_nan"]),
            int(v.row["n_pos_inf"]),
            int(v.row["n_neg_inf"]),
            int(v.row["n_zero"] + v.row["n_neg_zero"]),
        )
        for v in (a, b)
    ]
    ranges = [np.array([v.row["min"], v.row["max"]], np.float64) for v in (a, b)]
    return (
        counts[0] == counts[1]
        and bool(np.array_equal(ranges[0], ranges[1], equal_nan=True))
        and bool(np.array_equal(_canonical(a), _canonical(b)))
    )


def _canonical(value: Value) -> npt.NDArray[np.uint64]:
    """Bits with one NaN and one zero."""
    n_bits, mantissa = 8 * _BYTES[value.form.dtype], mantissa_of(value.form.dtype)
    sign = np.uint64(1 << (n_bits - 1))
    magnitude = value.bits & ~sign
    infinity = np.uint64((1 << (n_bits - 1)) - (1 << mantissa))
    if value.form.dtype.endswith("fnuz"):  # one NaN, where others have -0
        return value.bits.copy()
    nan = magnitude == ~sign & np.uint64((1 << n_bits) - 1) if value.form.dtype.endswith("fn") else magnitude > infinity
    return np.where(magnitude == 0, np.uint64(0), np.where(nan, infinity + np.uint64(1), value.bits))
