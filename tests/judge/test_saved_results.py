"""What a kernel saves for its own backward has a form of its own; what it returns to the user has not."""

import pytest
import torch

from shadowrun import Cause, Status
from shadowrun.judge.judge import Judge

aten = torch.ops.aten


def verdict_of(case):
    return Judge()(case)[0]


def layer_norm_in_float32(x, shape, weight, bias, eps):
    """As CUDA does it: statistics of 16-bit inputs stay float32."""
    out, mean, rstd = aten.native_layer_norm(x.float(), shape, weight.float(), bias.float(), eps)
    return out.to(x.dtype), mean, rstd


def test_statistics_in_another_precision(make_case):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 8).bfloat16(), torch.rand(8).bfloat16(), torch.rand(8).bfloat16()
    args = (x, [8], weight, bias, 1e-5)
    assert verdict_of(make_case(aten.native_layer_norm.default, layer_norm_in_float32, *args)).status is Status.MATCH

    def wrong(*args):
        out, mean, rstd = layer_norm_in_float32(*args)
        return out * 1.1, mean, rstd

    assert verdict_of(make_case(aten.native_layer_norm.default, wrong, *args)).status is Status.MISMATCH

    def wide(*args):
        out, mean, rstd = layer_norm_in_float32(*args)
        return out.float(), mean, rstd

    verdict = verdict_of(make_case(aten.native_layer_norm.default, wide, *args))
    assert (verdict.cause, verdict.explanation) == (Cause.METADATA, "dtype")


@pytest.mark.parametrize("empty", [True, False])
def test_statistics_that_are_not_saved_outside_training(make_case, empty):
    torch.manual_seed(0)
    args = (torch.randn(3, 2, 4), torch.rand(2), torch.rand(2), torch.rand(2), torch.rand(2), False, 0.1, 1e-5)

    def saves(*args):
        out, _, _ = aten.native_batch_norm(*args)
        return (out, torch.rand(2), torch.rand(2)) if empty else (out[:2], torch.rand(2), torch.rand(2))

    verdict = verdict_of(make_case(aten.native_batch_norm.default, saves, *args))
    assert verdict.status is (Status.MATCH if empty else Status.MISMATCH)


def test_the_magnitude_of_a_complex_number_is_rounded(make_case):
    torch.manual_seed(0)
    z = torch.randn(50, dtype=torch.complex64)
    rounded = make_case(aten.abs.default, lambda z: z.abs().nextafter(torch.tensor(9.0)), z)
    assert verdict_of(rounded).status is Status.MATCH
    assert verdict_of(make_case(aten.abs.default, lambda z: z.abs() * 1.0001, z)).status is Status.MISMATCH
    x = torch.randn(50)
    assert (
        verdict_of(make_case(aten.abs.default, lambda x: x.abs().nextafter(torch.tensor(9.0)), x)).status
        is Status.MISMATCH
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_of_equally_frequent_values_any_is_a_mode(make_case, dtype):
    x = torch.tensor([[1, 1, 2, 2, 3], [4, 5, 5, 4, 6]]).to(dtype)

    def other(x, dim=-1, keepdim=False):
        values = torch.tensor([2, 5]).to(dtype)
        return values, torch.tensor([3, 2])

    verdict = verdict_of(make_case(aten.mode.default, other, x))
    assert (verdict.status, verdict.explanation) == (Status.UNVERIFIED, "tie")

    def rare(x, dim=-1, keepdim=False):
        return torch.tensor([3, 5]).to(dtype), torch.tensor([4, 2])

    assert verdict_of(make_case(aten.mode.default, rare, x)).status is Status.MISMATCH


def test_log_softmax_near_zero(make_case):
    """(x - max) - log(sum) has an absolute error where the result is almost 0, under each of its names."""
    x, out = torch.tensor([20.0, -1.0, 0.5]), torch.empty(3, dtype=torch.float64)

    def other_order(x, dim, *, dtype=None, out):
        x = x.to(dtype)
        return out.copy_(x - ((x - x.max()).exp().sum().log() + x.max()))

    case = make_case(aten.log_softmax.int_out, other_order, x, 0, dtype=torch.float64, out=out)
    assert not torch.equal(case.actual[0], case.expected[0])
    assert verdict_of(case).status is Status.MATCH
