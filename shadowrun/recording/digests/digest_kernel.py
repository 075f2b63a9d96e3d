# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-def"
"""`digest_operators.digest_parts` by one Triton kernel: memory is read once. Imported where Triton is, on GPUs only.

Triton keeps what it compiled in its own cache, by default in ``~/.triton``.
"""
# ruff: noqa: ANN001, N803 - Triton reads annotations, and its constants are written in capitals

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from shadowrun.recording.digests.digest_operators import (
    FIRST_FACTOR,
    GAMMA,
    GROUP,
    N_CLASSES,
    N_ENDS,
    SCALE,
    SECOND_FACTOR,
    VANISHING,
    Found,
    Ints,
    Parts,
    pick_sums,
)
from shadowrun.recording.digests.number_formats import Encoding

if TYPE_CHECKING:
    from shadowrun.recording.digests.number_formats import NumberFormat

__all__ = ["digest_parts_by_kernel"]

# Elements of a step: the sums of their bits take 32 registers of 64 bits in each thread of four warps.
_SUMS = 4096
_GAMMA, _FIRST, _SECOND = (tl.constexpr(number) for number in (GAMMA, FIRST_FACTOR, SECOND_FACTOR))
_SCALE = tl.constexpr(SCALE)
_BFLOAT, _UNSIGNED = tl.constexpr(int(Encoding.BFLOAT)), tl.constexpr(int(Encoding.UNSIGNED))
_SMALL, _LARGE = (tl.constexpr(int(np.float64(number).view(np.int64))) for number in (VANISHING, 1 / VANISHING))


def digest_parts_by_kernel(
    memory: torch.Tensor, dtype: torch.dtype, form: NumberFormat, parts: Parts, samples: Ints
) -> Found:
    """See `digest_operators.digest_parts`; not for floats of 8 bits."""
    if form.encoding is Encoding.CODES:
        raise NotImplementedError(str(dtype))
    groups, n_groups = parts.split(GROUP)
    columns = (*groups, np.cumsum(n_groups) - 1, samples)
    tables = torch.from_numpy(np.concatenate(columns)).to(memory.device, non_blocking=True)
    n = len(groups.starts)
    last, positions = torch.split(tables[3 * n :], [len(parts.starts), len(samples)])
    n_classes = N_CLASSES if form.mantissa else 1
    sums = torch.empty((n, form.width + n_classes), dtype=torch.int64, device=memory.device)
    ends = torch.empty((n, N_ENDS), dtype=torch.int64, device=memory.device)
    step = _SUMS // max(32, form.width)
    _digest[(n,)](memory, tables, sums, ends, n, form.width, form.mantissa, int(form.encoding), n_classes, step)
    return Found(pick_sums(sums, last), ends, memory.index_select(0, positions).to(torch.int64))


@triton.jit(do_not_specialize=["n_groups"])
def _digest(
    memory,
    table,
    sums,
    ends,
    n_groups,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    ENCODING: tl.constexpr,
    CLASSES: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """One group: a row of `sums` and one of `ends`."""
    group = tl.program_id(0).to(tl.int64)
    start, size, first = (
        tl.load(table + group),
        tl.load(table + n_groups + group),
        tl.load(table + 2 * n_groups + group),
    )
    planes = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH, STEP], tl.int64)
    # One sum for all classes of a kind: no group has 2**16 elements.
    nan_and_zero = tl.zeros([STEP], tl.int64)
    infinite_and_subnormal = tl.zeros([STEP], tl.int64)
    least: tl.constexpr = -(1 << (WIDTH - 1))
    infinite: tl.constexpr = (1 << (WIDTH - 1)) - (1 << MANTISSA)
    greatest: tl.constexpr = infinite if MANTISSA else (1 << (WIDTH - 1)) - 1
    low = tl.full([STEP], greatest, tl.int64)
    high = tl.full([STEP], -greatest - 1, tl.int64)
    small = tl.zeros([STEP], tl.float64)
    middle = tl.zeros([STEP], tl.float64)
    large = tl.zeros([STEP], tl.float64)
    for at in range(0, size, STEP):
        place = at + tl.arange(0, STEP)
        there = place < size
        raw = tl.load(memory + start + place, mask=there, other=0)
        bits = raw.to(tl.int64) if WIDTH == 64 else raw.to(tl.int32)
        number = first + place
        key = (number >> 5) * _GAMMA + _GAMMA
        key = (key ^ ((key >> 30) & 0x3FFFFFFFF)) * _FIRST
        key = (key ^ ((key >> 27) & 0x1FFFFFFFFF)) * _SECOND
        key = (key ^ ((key >> 31) & 0x1FFFFFFFF)) | 1
        weight = key << (number & 31)
        set_bits = (bits[None, :] >> planes[:, None]) & 1
        total += tl.where(set_bits != 0, weight[None, :], 0)
        negative = bits < 0
        if MANTISSA == 0:
            nan_and_zero += ((bits == 0) & there).to(tl.int64)
            order = bits ^ least if ENCODING == _UNSIGNED else bits
            low = tl.minimum(low, tl.where(there, order.to(tl.int64), greatest))
            high = tl.maximum(high, tl.where(there, order.to(tl.int64), -greatest - 1))
            value = bits.to(tl.float64)
            if ENCODING == _UNSIGNED:
                value += tl.where(negative, 2.0**WIDTH, 0.0)
            middle += value * value
        else:
            absolute = bits & (-least - 1)
            zero = (absolute == 0) & there
            endless = absolute == infinite
            nan_and_zero += (absolute > infinite).to(tl.int64)
            nan_and_zero += tl.where(zero & (bits >= 0), 65536, 0).to(tl.int64)
            nan_and_zero += tl.where(zero & negative, 65536 * 65536, 0).to(tl.int64)
            infinite_and_subnormal += (endless & (bits >= 0)).to(tl.int64)
            infinite_and_subnormal += tl.where(endless & negative, 65536, 0).to(tl.int64)
            subnormal = (absolute < (1 << MANTISSA)) & (absolute != 0)
            infinite_and_subnormal += tl.where(subnormal, 65536 * 65536, 0).to(tl.int64)
            finite = (absolute < infinite) & there
            order = (bits ^ ((bits >> (WIDTH - 1)) & (-least - 1))).to(tl.int64)
            low = tl.minimum(low, tl.where(finite, order, greatest))
            high = tl.maximum(high, tl.where(finite, order, -greatest - 1))
            if WIDTH == 64:
                value = tl.where(finite, bits.to(tl.float64, bitcast=True), 0.0)
                is_small, is_large = absolute < _SMALL, absolute > _LARGE
                below = tl.where(is_small, value * _SCALE, 0.0)
                above = tl.where(is_large, value / _SCALE, 0.0)
                value = tl.where(is_small | is_large, 0.0, value)
                small += below * below
                large += above * above
            elif WIDTH == 32:
                value = tl.where(finite, bits.to(tl.float32, bitcast=True).to(tl.float64), 0.0)
            elif ENCODING == _BFLOAT:
                value = tl.where(finite, (bits << 16).to(tl.float32, bitcast=True).to(tl.float64), 0.0)
            else:
                value = tl.where(finite, raw.to(tl.float16, bitcast=True).to(tl.float32).to(tl.float64), 0.0)
            middle += value * value
    row = sums + group * (WIDTH + CLASSES)
    tl.store(row + planes, tl.sum(total, 1))
    first_counts, second_counts = tl.sum(nan_and_zero, 0), tl.sum(infinite_and_subnormal, 0)
    if MANTISSA == 0:
        tl.store(row + WIDTH, first_counts)
    else:
        tl.store(row + WIDTH, first_counts & 0xFFFF)
        tl.store(row + WIDTH + 1, second_counts & 0xFFFF)
        tl.store(row + WIDTH + 2, (second_counts >> 16) & 0xFFFF)
        tl.store(row + WIDTH + 3, (first_counts >> 16) & 0xFFFF)
        tl.store(row + WIDTH + 4, (first_counts >> 32) & 0xFFFF)
        tl.store(row + WIDTH + 5, (second_counts >> 32) & 0xFFFF)
    row = ends + group * 5
    tl.store(row, tl.min(low, 0))
    tl.store(row + 1, tl.max(high, 0))
    tl.store(row + 2, tl.sum(small, 0).to(tl.int64, bitcast=True))
    tl.store(row + 3, tl.sum(middle, 0).to(tl.int64, bitcast=True))
    tl.store(row + 4, tl.sum(large, 0).to(tl.int64, bitcast=True))
