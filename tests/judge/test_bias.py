"""Errors far below the bound of any element that are the same everywhere are found; right kernels have none."""

from __future__ import annotations

import itertools

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.judge.rounding.bias import error_factor
from shadowrun.types import Cause, Status
from tests.ground_truth.sensitivity import (
    ROWS,
    found,
    in_blocks,
    in_turn,
    lanes,
    layer_norm,
    one_by_one,
    right,
    softmax,
)
from tests.judge.test_hypotheses import normal

aten = torch.ops.aten
SMALL = [name for name in ROWS if not name.startswith("sum")]


def rounded(x, dtype=torch.bfloat16):
    return x.to(dtype).float()


def truncated(op):
    def run(*args):
        out = op(*(t.float() if isinstance(t, torch.Tensor) else t for t in args))
        first, *others = out if isinstance(out, tuple) else (out,)
        first = (first.contiguous().view(torch.int32) & -65536).view(torch.float32).bfloat16()
        return (first, *(t.bfloat16() for t in others)) if others else first

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
    dtype, x = x.dtype, x.float()
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)
    y = rounded(rounded(x - mean, dtype) * rstd, dtype)
    y = y if w is None else rounded(y * w.float(), dtype) + b.float()
    return y.to(dtype), mean.to(dtype), rstd.to(dtype)


@pytest.mark.parametrize("name", SMALL)
def test_five_times_the_error_of_a_right_kernel_is_found(name):
    row = ROWS[name]
    assert not found(row, 0.0, calls=2)
    assert found(row, 5 * right(row), calls=1)


@pytest.mark.parametrize("sign", ["any sign", "positive"])
def test_a_bias_of_one_number_is_found_over_many_calls(sign):
    row = ROWS[f"sum float32 1e6, {sign}"]
    assert not found(row, 0.0, calls=1)
    assert not found(row, 5e-7, calls=1)
    assert found(row, 5e-7, calls=48)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 4, 10, 40])
def test_statistics_in_bfloat16(make_case, shift, affine):
    x = (normal(8, 128) + shift).bfloat16()
    w, b = (normal(128, seed=s).bfloat16() if affine else None for s in (1, 2))
    verdict, _ = Judge()(make_case(aten.native_layer_norm.default, norm_in_bfloat16, x, [128], w, b, 1e-5))
    assert (verdict.cause, verdict.explanation) == (Cause.REDUCED_PRECISION, "statistics of the rows rounded"), verdict
    verdict, _ = Judge()(make_case(aten.native_layer_norm.default, norm_in_steps, x, [128], w, b, 1e-5))
    assert verdict.status is Status.MATCH, verdict


def group_statistics(x, n, groups, eps=1e-5):
    rows = x.float().reshape(n * groups, -1)
    mean = rows.mean(1, keepdim=True)
    return rows, mean, torch.rsqrt(((rows - mean) ** 2).mean(1, keepdim=True) + eps)


def group_norm_by_channels(x, w, b, n, c, _hw, groups, eps):
    """A factor and a shift of each channel, rounded."""
    _, mean, rstd = (t.view(n, groups, -1) for t in group_statistics(x, n, groups, eps))
    factor = (rstd * w.float().view(groups, -1)).to(x.dtype)
    shift = (b.float().view(groups, -1) - mean * factor.float()).to(x.dtype)
    y = x.float().view(n, c, -1) * factor.float().view(n, c, 1) + shift.float().view(n, c, 1)
    return y.view(x.shape).to(x.dtype), mean.view(n, groups).to(x.dtype), rstd.view(n, groups).to(x.dtype)


def group_norm_in_steps(x, w, b, n, c, _hw, groups, eps):
    """Right statistics; what follows is rounded at each step."""
    rows, mean, rstd = group_statistics(x, n, groups, eps)

    def step(t):
        return t.to(x.dtype).float()

    y = step(step(step(rows - mean) * rstd).view(n, c, -1) * w.float()[:, None]) + b.float()[:, None]
    return y.view(x.shape).to(x.dtype), mean.view(n, groups).to(x.dtype), rstd.view(n, groups).to(x.dtype)


def in_groups(x, groups=4):
    """Arguments of a group norm of 16 channels."""
    w, b = (normal(16, seed=s).to(x.dtype) for s in (1, 2))
    return x, w, b, x.shape[0], 16, x[0, 0].numel(), groups, 1e-5


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
    "gelu": (aten.gelu.default, A),
    "silu": (aten.silu.default, A),
    "tanh": (aten.tanh.default, A),
    "var": (aten.var.dim, normal(64, 512).bfloat16(), [0], True),
    "sqrt": (aten.sqrt.default, A.abs()),
    "group norm": (aten.native_group_norm.default, *in_groups(normal(4, 16, 12, 12).bfloat16())),
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


def softmax_in_turn(x, dim, _half):
    e = torch.exp(x.float() - x.float().amax(dim, keepdim=True))
    return (e / in_turn(e, dim).unsqueeze(dim)).to(x.dtype)


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
        cases[shape, "in turn"] = (aten._softmax.default, softmax_in_turn, x, -1, False)
        if dtype is torch.float32:
            cases[shape, "ulps"] = (aten._softmax.default, ulps_off(aten._softmax.default, 3), x, -1, False)
    for name, (op, target, *args) in cases.items():
        verdict, _ = Judge(hypotheses=False)(make_case(op, target, *args))
        together = "a factor of" in verdict.evidence or "of each row" in verdict.evidence
        assert not together, (name, verdict)


def gelu_with_a_rounded_root(x):
    root = torch.tensor(2**-0.5).to(x.dtype).float()
    return (0.5 * x.float() * (1 + torch.erf(x.float() * root))).to(x.dtype)


ELEMENTS = {
    aten.gelu.default: (lambda x: x * (0.5 * (1 + torch.erf(x * 2**-0.5))), gelu_with_a_rounded_root),
    aten.silu.default: (lambda x: x * torch.sigmoid(x), lambda x: x / (1 + torch.exp(-x))),
    aten.sigmoid.default: (lambda x: 1 / (1 + torch.exp(-x)), lambda x: 0.5 * torch.tanh(0.5 * x) + 0.5),
    aten.tanh.default: (lambda x: 2 * torch.sigmoid(2 * x) - 1, lambda x: 1 - 2 / (torch.exp(2 * x) + 1)),
    aten.mish.default: (lambda x: x * torch.tanh(torch.nn.functional.softplus(x)),),
    aten.hardswish.default: (lambda x: x * (x + 3).clamp(0, 6) / 6, lambda x: x * ((x + 3).clamp(0, 6) * (1 / 6))),
    aten.hardsigmoid.default: (lambda x: (x + 3).clamp(0, 6) / 6, lambda x: (x + 3).clamp(0, 6) * (1 / 6)),
    aten.sqrt.default: (lambda x: 1 / torch.rsqrt(x), lambda x: x * torch.rsqrt(x)),
    aten.exp.default: (lambda x: torch.exp2(x * 1.4426950408889634),),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_that_round_their_steps_are_not_systematic(make_case, kind, dtype):
    """In 16 bits, one unit of rounding may be the constant's of a right kernel."""
    for shape in ((64, 64), (5, 2000)):
        x = values(kind, *shape).to(dtype)
        for op, kernels in ELEMENTS.items():
            for i, kernel in enumerate(kernels):
                verdict, _ = Judge(hypotheses=False)(make_case(op, kernel, x))
                together = "a factor of" in verdict.evidence or "are truncated" in verdict.evidence
                assert not together, (op, i, shape, verdict)
    for n, one in ((128, False), (256, False), (128, True), (256, True)):
        x, ones = values(kind, 8192 // n, n).to(dtype), torch.ones(n, dtype=dtype)
        w, b = (ones, 0 * ones) if one else (normal(n, seed=s).to(dtype) for s in (0, 1))
        if torch.isfinite(x).all():
            verdict, _ = Judge(hypotheses=False)(
                make_case(aten.native_layer_norm.default, norm_in_steps, x, [n], w, b, 1e-5)
            )
            assert "of each row" not in verdict.evidence, (n, one, verdict)
    for groups in (1, 2, 4, 8, 16):
        args = in_groups(values(kind, 2, 16, 160).to(dtype), groups)
        for kernel in (group_norm_by_channels, group_norm_in_steps):
            verdict, _ = Judge(hypotheses=False)(make_case(aten.native_group_norm.default, kernel, *args))
            together = any(s in verdict.evidence for s in ("a factor of", "of each row", "are truncated"))
            assert not together, (kernel, groups, verdict)


@pytest.mark.parametrize("same", [False, True])
def test_many_sums_of_a_poor_kernel_that_is_right(make_case, same):
    judge, seeds = Judge(hypotheses=False), itertools.count()
    fixed = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    for _ in range(60):
        x = fixed if same else torch.rand(20000, generator=torch.Generator().manual_seed(next(seeds)))
        verdict, _ = judge(make_case(aten.sum.default, lambda x: lanes(x, 1), x))
        assert verdict.status is Status.MATCH, verdict


@pytest.mark.parametrize("factor", [0.0, 0.3, 4.5, -5.0])
def test_a_factor_below_the_limit_is_left_out_and_no_other(factor):
    """The early exit, which saves the sort of every result, changes no factor that is reported."""
    result = normal(64, 32).flatten().double().numpy()
    errors = result * factor * 2**-24 + normal(64, 32, seed=1).flatten().double().numpy() * 2**-26
    args = (errors, result, (64, 32), 2**-24)
    full = error_factor(*args)
    assert full is not None
    assert abs(full.factor - factor) < 0.05
    assert error_factor(*args, at_least=4.0) == (full if abs(factor) > 4.0 else None)
    # Nor is a factor that chance may make.
    assert error_factor(*args, at_least=abs(full.factor) - 5 * full.error) is None
    assert error_factor(*args, at_least=abs(full.factor) - 7 * full.error) == full
