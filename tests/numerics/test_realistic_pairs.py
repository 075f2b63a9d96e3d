"""Pairs that differ as results of operators do: C gives every figure of the specification in numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowrun.numerics.diff import CHUNK, diff
from shadowrun.numerics.precision import FORMATS
from tests.numerics.by_specification import by_specification, same

FLOATS = list(FORMATS)
OTHERS = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
SIZES = (1, 7, 300, CHUNK // 2 + 5, CHUNK + 1)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    same(diff("x", actual, expected), by_specification(actual, expected))


def values(dtype: torch.dtype, n: int, scale: float, rng: np.random.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, n).astype(bool))
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        low, high = max(info.min, int(-100 * scale)), min(info.max, 2**63 - 1, int(100 * scale) + 2)
        return torch.from_numpy(rng.integers(low, high, n).astype(str(dtype)[6:]))
    return torch.from_numpy(rng.standard_normal(n) * scale).to(dtype)


CHANGES = ["steps", "noise", "little noise", "other", "sign", "zeros", "relu", "lost", "classes", "same infinities"]
INTEGER_CHANGES = ["one", "some", "swapped"]
PAIRS = [*itertools.product(FLOATS, CHANGES), *itertools.product(OTHERS, INTEGER_CHANGES)]


def changed(e: torch.Tensor, change: str, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A pair that differs in one of the ways in which results do."""
    n, dtype = e.numel(), e.dtype
    where = torch.from_numpy(rng.integers(0, n, max(1, n // 50)))
    if not dtype.is_floating_point:
        a = e.clone()
        spot = where if change != "one" else where[:1]
        other = values(dtype, n, 1.0, rng).numpy() if change != "swapped" else e.numpy()[::-1]
        a.numpy()[spot.numpy()] = other[spot.numpy()]  # torch has no index_put for all of these
        return a, e
    fmt = FORMATS[dtype]
    if change == "steps":
        flips = torch.from_numpy(rng.integers(0, 4, n)).to(fmt.view)
        return (e.view(fmt.view) ^ flips).view(dtype), e
    right = e.double()
    noise = torch.from_numpy(rng.standard_normal(n))
    if change == "relu":
        right = right.clamp(min=0)
    elif change in {"zeros", "lost"}:
        right[where] = 0.0
    elif change == "same infinities":
        right[where] = -math.inf
    left = right.clone()
    if change in {"noise", "relu", "same infinities"}:
        left *= 1 + 3e-2 * noise
    elif change == "little noise":
        left *= 1 + 1e-5 * noise
    elif change == "other":
        left = noise * right.abs().max()
    elif change in {"sign", "zeros"}:
        left[where] *= -1
    elif change == "lost":
        left[where] = fmt.smallest
    else:
        for value in (math.nan, math.inf, -math.inf):
            (left if rng.integers(2) else right)[torch.from_numpy(rng.integers(0, n, 3))] = value
    return left.to(dtype), right.to(dtype)


@pytest.mark.parametrize(("dtype", "change"), PAIRS, ids=str)
def test_every_figure_is_that_of_the_specification(dtype, change):
    @settings(max_examples=8, deadline=None)
    @given(st.sampled_from(SIZES), st.sampled_from([1.0, 1e-9, 1e-20, 1e-40, 1e15, 1e30, 1e300]), st.integers(0, 99))
    def run(n, scale, seed):
        rng = np.random.default_rng(seed)
        a, e = changed(values(dtype, n, scale, rng), change, rng)
        check(a, e)
        check(e, a)

    run()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_bits(dtype):
    @settings(max_examples=30, deadline=None)
    @given(st.sampled_from(SIZES[:4]), st.integers(0, 10**6), st.sampled_from([1, 3, 0x7F, 0x80, 0xFF, -1]))
    def run(n, seed, mask):
        rng = np.random.default_rng(seed)
        width = 8 * dtype.itemsize
        bits = rng.integers(0, 1 << width, n, dtype=f"u{dtype.itemsize}")
        flips = rng.integers(0, 1 << width, n, dtype=bits.dtype) & np.array(mask % (1 << width), dtype=bits.dtype)
        left, right = (torch.from_numpy(b.view(f"i{dtype.itemsize}")).view(dtype) for b in (bits, bits ^ flips))
        check(left, right)

    run()


def test_the_worst_element_of_a_later_chunk_and_a_class():
    e = torch.ones(3 * CHUNK)
    a = e.clone()
    a[5], a[CHUNK + 7], a[2 * CHUNK + 9] = 1.5, 3.0, math.nan
    check(a, e)
    assert diff("x", a, e).worst_index == (2 * CHUNK + 9,)
    check(a[: 2 * CHUNK], e[: 2 * CHUNK])


def test_a_difference_that_overflows_hides_no_greater_quotient():
    e = torch.tensor([2e38, 1e36, 1.0])
    a = torch.tensor([-2e38, 3e38, 1.0])
    check(a, e)
    assert diff("x", a, e).max_rel == pytest.approx(299)
    far_e, far_a = torch.ones(CHUNK), torch.ones(CHUNK)
    far_e[[0, CHUNK - 1]], far_a[[0, CHUNK - 1]] = e[:2], a[:2]
    check(far_a, far_e)


def test_bools_of_other_bytes_than_0_and_1():
    bytes_a, bytes_e = (
        torch.tensor([0, 1, 2, 255, 1], dtype=torch.uint8),
        torch.tensor([0, 0, 1, 255, 2], dtype=torch.uint8),
    )
    check(bytes_a.view(torch.bool), bytes_e.view(torch.bool))
