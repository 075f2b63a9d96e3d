# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-def"
"""The counts of `device_statistics` by one Triton kernel, which reads memory once. Imported on GPUs only."""
# ruff: noqa: ANN001, N803 - Triton reads annotations, and its constants are written in capitals

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from shadowrun.numerics.device_statistics import limits

if TYPE_CHECKING:
    import torch

    from shadowrun.numerics.precision import FloatFormat

__all__ = ["count_differences"]

_BLOCK: Final = 2048
_WARPS: Final = 8
# Each program adds its counts to the same four numbers: more programs would wait for each other.
_MAX_PROGRAMS: Final = 1024


def count_differences(actual: torch.Tensor, expected: torch.Tensor, row: torch.Tensor, fmt: FloatFormat) -> None:
    """Add the counts of `DeviceStatistics` to a row.

    Args:
        actual: Flat, without gaps.
        expected: Another of the same dtype and size.
        row: Four int32, at first 0.
        fmt: Their format, of 16 or 32 bits.
    """
    n = actual.numel()
    most, infinite, normal = limits(fmt)
    programs = min(triton.cdiv(n, _BLOCK), _MAX_PROGRAMS)
    bits = actual.view(fmt.view), expected.view(fmt.view)
    _count[(programs,)](*bits, row, n, programs * _BLOCK, most, infinite, normal, _BLOCK, num_warps=_WARPS)


@triton.jit(do_not_specialize=["n", "stride"])
def _count(
    actual,
    expected,
    row,
    n,
    stride,
    MOST: tl.constexpr,
    INFINITE: tl.constexpr,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    different = tl.zeros([BLOCK], tl.int32)
    greatest = tl.zeros([BLOCK], tl.int32)
    classes = tl.zeros([BLOCK], tl.int32)
    signs = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, stride):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(actual + at, mask=at < n, other=0).to(tl.int32)
        e = tl.load(expected + at, mask=at < n, other=0).to(tl.int32)
        m, k = a & MOST, e & MOST
        differs = a != e
        finite = (m < INFINITE) & (k < INFINITE)
        nan_a, nan_e = m > INFINITE, k > INFINITE
        other_class = (nan_a != nan_e) | ((nan_a | nan_e | finite) == 0) & differs
        other_class |= (m == 0) & (k != 0) & (k < NORMAL)
        other_class |= (k == 0) & (m != 0) & (m < NORMAL)
        # As int64: two numbers of other sign are up to 2**32 - 2**24 apart.
        wide_a, wide_e = m.to(tl.int64), k.to(tl.int64)
        gap = tl.abs(tl.where(a < 0, -wide_a, wide_a) - tl.where(e < 0, -wide_e, wide_e))
        gap = tl.minimum(gap, 0x7FFFFFFF).to(tl.int32)
        different += differs.to(tl.int32)
        greatest = tl.maximum(greatest, tl.where(finite, gap, 0))
        classes += other_class.to(tl.int32)
        signs += (differs & (m == 0) & (k == 0)).to(tl.int32)
    tl.atomic_add(row, tl.sum(different, 0))
    tl.atomic_max(row + 1, tl.max(greatest, 0))
    tl.atomic_add(row + 2, tl.sum(classes, 0))
    tl.atomic_add(row + 3, tl.sum(signs, 0))
