"""Errors far below the bound of any element that are the same everywhere are found; right kernels have none."""

from __future__ import annotations

import itertools

import pytest
import torch

from shadowrun.replay.judge import Judge
from shadowrun.types import Cause, Status
from tests.ground_truth.sensitivity import ROWS, found, in_blocks, lanes, layer_norm, one_by_one, right, softmax
from tests.replay.test_hypotheses import normal

aten = torch.ops.aten
SMALL = [name for name in ROWS if not name.startswith("sum")]


def rounded(x):
    return x.bfloat16().float()


def truncated(op):
    def run(*args):
        out = op(*(t.float() if isinstance(t, torch.Tensor) else t for t in args))
        return (out.view(torch.int32) & -65536).view(torch.float32).bfloat16()

    return run


def norm_in_bfloat16(x, _shape, w, b, eps):
    """Mean and variance rounded."""
    x = x.float()
    mean = rounded(x.mean(-1, keepdim=True))
    rstd = rounded(torch.rsqrt(rounded(((x - mean) ** 2).mean(-1, keepdim=True)) + eps))
    y = rounded(rounded(x - mean) * rstd)
    y = y if w is None else rounded(y * w.float()) + b.float()
    return y.bfloat16(), mean.bfloat16(), rstd.bfloat16()


def norm_in_steps(x, _shape, w, b, eps):
    """Right statistics; what follows is rounded at each step."""
    x = x.float()
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)
    y = rounded((x - mean) * rstd)
    y = y if w is None else rounded(y * w.float()) + b.float()
    return y.bfloat16(), mean.bfloat16(), rstd.bfloat16()


@pytest.mark.parametrize("name", SMALL)
def test_five_times_the_error_of_a_right_kernel_is_found(name):
    row = ROWS[name]
    assert not found(row, 0.0, calls=2)
    assert found(row, 5 * right(row), calls=1)


@pytest.mark.parametrize("sign", ["any sign", "positive"])
def test_one_number_tells_in_many_calls(sign):
    row = ROWS[f"sum float32 1e6, {sign}"]
    assert found(row, 5 * right(row), calls=48)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 4, 10, 40])
def test_statistics_in_bfloat16(make_case, shift, affine):
    x = (normal(8, 128) + shift).bfloat16()
    w, b = (normal(128, seed=s).bfloat16() if affine else None for s in (1, 2))
    verdict, _ = Judge()(make_case(aten.native_layer_norm.default, norm_in_bfloat16, x, [128], w, b, 1e-5))
    assert (verdict.cause, verdict.explanation) == (Cause.REDUCED_PRECISION, "statistics of the rows rounded"), verdict
    verdict, _ = Judge()(make_case(aten.native_layer_norm.default, norm_in_steps, x, [128], w, b, 1e-5))
    assert verdict.status is Status.MATCH, verdict


A, B = normal(48, 128).bfloat16(), normal(128, 40).bfloat16()
CONVOLUTION = (normal(2, 8, 12, 12).bfloat16(), normal(8, 8, 3, 3).bfloat16(), None, [1, 1], [1, 1], [1, 1], False)
TRUNCATED = {
    "mm": (aten.mm.default, A, B),
    "mm of 20 terms": (aten.mm.default, A[:, :20].clone(), B[:20].clone()),
    "mm of positive terms": (aten.mm.default, A.abs(), B.abs()),
    "baddbmm": (aten.baddbmm.default, normal(1, 48, 40).bfloat16(), A[None], B[None]),
    "mul": (aten.mul.Tensor, A, A.flip(0).clone()),
    "add": (aten.add.Tensor, A, A.flip(0).clone()),
    "softmax": (aten._softmax.default, A, 1, False),
    "convolution": (aten.convolution.default, *CONVOLUTION, [0, 0], 1),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncation_to_16_bits(make_case, name):
    op, *args = TRUNCATED[name]
    verdict, _ = Judge()(make_case(op, truncated(op), *args))
    assert verdict.cause is Cause.REDUCED_PRECISION, verdict
    assert verdict.explanation == "results truncated to bfloat16, not rounded", verdict


def values(kind, *shape):
    g = torch.Generator().manual_seed(sum(shape))
    uniform = torch.rand(*shape, generator=g)
    return {
        "any sign": normal(*shape),
        "positive": uniform,
        "shifted": normal(*shape) + 5,
        "few": (uniform * 8).floor() * 0.1,
        "sparse": normal(*shape).relu(),
        "one in each row": torch.nn.functional.one_hot((uniform[..., 0] * shape[-1]).long(), shape[-1]).float(),
        "of any size": normal(*shape) * torch.exp(3 * normal(shape[0], *[1] * (len(shape) - 1))),
        "one great element in each row": normal(*shape) * torch.exp(4 * normal(*shape, seed=3)),
        "nearly equal": 0.1 + 1e-3 * normal(*shape),
    }[kind]


KINDS = [
    "any sign",
    "positive",
    "shifted",
    "few",
    "sparse",
    "one in each row",
    "of any size",
    "one great element in each row",
    "nearly equal",
]


def split(n):
    """A product whose blocks are rounded to 16 bits and added there."""

    def run(a, b):
        parts = [(x.float() @ y.float()).to(a.dtype) for x, y in zip(a.chunk(n, 1), b.chunk(n, 0), strict=True)]
        return sum(parts[1:], parts[0])

    return run


def ulps_off(op, factor):
    return lambda *args: op(*args) * (1 + factor * 2.0**-24)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_kernels_have_no_systematic_error(make_case, kind, dtype):
    cases = {}
    for m, k, n in ((64, 128, 32), (9, 700, 17), (128, 33, 1), (1, 2000, 100)):
        a, b = values(kind, m, k).to(dtype), normal(k, n).to(dtype)
        if kind == "of any size":
            b = (b * torch.exp(3 * normal(1, n))).to(dtype)
        kernels = [in_blocks, one_by_one] + ([split(2), split(8)] if dtype is not torch.float32 and k > 512 else [])
        cases |= {(m, k, n, i): (aten.mm.default, f, a, b) for i, f in enumerate(kernels)}
    for shape in ((64, 256), (1, 3000), (7, 64, 33)):
        x = values(kind, *shape).to(dtype)
        cases |= {(shape, dim): (aten._softmax.default, softmax, x, dim, False) for dim in (0, -1)}
        if kind not in ("shifted", "nearly equal"):  # the square of the mean is all that is left there
            norm = [shape[-1]], normal(shape[-1]).to(dtype), normal(shape[-1], seed=1).to(dtype), 1e-5

            def wide(x, shape, w, b, eps):
                return tuple(t.to(x.dtype) for t in layer_norm(x.float(), shape, w.float(), b.float(), eps))

            cases[shape, "norm"] = (aten.native_layer_norm.default, wide, x, *norm)
        if dtype is torch.float32:
            cases[shape, "ulps"] = (aten._softmax.default, ulps_off(aten._softmax.default, 3), x, -1, False)
    for name, (op, target, *args) in cases.items():
        verdict, _ = Judge(hypotheses=False)(make_case(op, target, *args))
        together = "a factor of" in verdict.evidence or "of each row" in verdict.evidence
        assert not together, (name, verdict)


@pytest.mark.parametrize("same", [False, True])
def test_many_sums_of_a_poor_kernel_that_is_right(make_case, same):
    judge, seeds = Judge(hypotheses=False), itertools.count()
    fixed = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    for _ in range(60):
        x = fixed if same else torch.rand(20000, generator=torch.Generator().manual_seed(next(seeds)))
        verdict, _ = judge(make_case(aten.sum.default, lambda x: lanes(x, 1), x))
        assert verdict.status is Status.MATCH, verdict
