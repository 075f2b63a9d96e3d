"""What the ground-truth benchmark found: verdicts and causes that were taken for others."""

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.replay.drift import drift_error
from shadowrun.types import Cause, Status

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wrong_sign(grad, x):
    s = torch.sigmoid(x)
    return grad * s * (1 - x * (1 - s))


def rounded_truth(grad, x):
    s = torch.sigmoid(x.double())
    return (grad.double() * s * (1 + x.double() * (1 - s))).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8])
def test_a_wrong_gradient_is_seen_however_small(make_case, dtype, scale):
    grad, x = (normal(400) * scale).to(dtype), normal(400, seed=1).to(dtype)
    verdict, _ = Judge()(make_case(aten.silu_backward.default, wrong_sign, grad, x))
    assert verdict.status is Status.MISMATCH
    verdict, _ = Judge()(make_case(aten.silu_backward.default, rounded_truth, grad, x))
    assert verdict.status is Status.MATCH


def test_wrong_indices_of_wrong_values_have_the_cause_of_the_values(make_case):
    x = normal(4, 6)
    x[1, 2] = x[3, 0] = NAN
    case = make_case(aten.max.dim, lambda x, dim: torch.max(x.nan_to_num(-INF), dim), x, 1)
    verdict, _ = Judge()(case)
    assert (verdict.cause, verdict.explanation) == (Cause.EXCEPTIONAL_VALUES, "NaN treated as missing")


def test_wrong_indices_alone_are_a_fault(make_case):
    def off(x, dim):
        values, indices = torch.max(x, dim)
        return values, (indices + 1) % x.shape[dim]

    verdict, _ = Judge()(make_case(aten.max.dim, off, normal(4, 6), 1))
    assert (verdict.status, verdict.cause) == (Status.MISMATCH, Cause.IMPLEMENTATION)


def test_nan_that_comes_through_is_not_a_result_that_was_not_written(make_case):
    def through(c, a, b, *, beta=1, alpha=1):
        return c.copy_(alpha * torch.bmm(a, b) + beta * c)

    args = torch.full((2, 3, 3), NAN), normal(2, 3, 4), normal(2, 4, 3)
    verdict, _ = Judge()(make_case(aten.baddbmm_.default, through, *args, beta=0))
    assert (verdict.cause, verdict.explanation) == (Cause.EXCEPTIONAL_VALUES, "NaN produced")
    verdict, _ = Judge()(make_case(aten.baddbmm_.default, lambda c, *_, **__: c, *args, beta=0))
    assert (verdict.cause, verdict.explanation) == (Cause.IMPLEMENTATION, "result not written")


def test_nan_here_and_another_sign_of_zero_there_are_exceptional_values(make_case):
    x = normal(5, 5)
    x[0, 4] = INF
    verdict, _ = Judge()(make_case(aten.tril.default, lambda x: x * torch.ones_like(x).tril(), x))
    assert verdict.cause is Cause.EXCEPTIONAL_VALUES


def test_one_sign_of_zero_among_products_is_named(make_case):
    x = normal(64)
    x[3] = -0.0
    verdict, _ = Judge()(make_case(aten.mul.Tensor, lambda a, b: torch.mul(a, b) + 0.0, x, normal(64, seed=1).abs()))
    assert (verdict.cause, verdict.explanation) == (Cause.EXCEPTIONAL_VALUES, "sign of zero lost")


def in_halves(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for i in range(0, a.shape[1], 8):
        total = (total.float() + a[:, i : i + 8].float() @ b[i : i + 8].float()).to(a.dtype)
    return total


@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_sums_in_bf16_are_not_taken_for_a_missing_term(make_case, seed):
    a, b = normal(9, 1024, seed=seed).bfloat16(), normal(1024, 7, seed=seed + 1).bfloat16()
    verdict, _ = Judge()(make_case(aten.mm.default, in_halves, a, b))
    assert (verdict.cause, verdict.explanation) == (Cause.REDUCED_PRECISION, "accumulated in bfloat16")


def test_an_infinity_on_one_side_is_drift():
    assert drift_error(torch.tensor([1.0, INF]), torch.tensor([1.0, 3e38])) == (INF, INF)
    assert drift_error(torch.tensor([1.0, 3e38]), torch.tensor([1.0, -INF])) == (INF, INF)
    assert drift_error(torch.tensor([INF]), torch.tensor([-INF])) == (INF, INF)
    assert drift_error(torch.tensor([1.5, INF, NAN]), torch.tensor([1.0, INF, NAN]))[0] == 0.5


def test_one_wrong_sum_in_bf16_is_not_noise(make_case):
    def one(a, b):
        out = (a.double() @ b.double()).to(a.dtype)
        out[3, 2] += 4
        return out

    verdict, _ = Judge()(make_case(aten.mm.default, one, normal(9, 512).bfloat16(), normal(512, 7, seed=1).bfloat16()))
    assert (verdict.status, verdict.cause) == (Status.MISMATCH, Cause.IMPLEMENTATION)
