"""The verdict on implementations that really differ: right ones by another order or formula, wrong ones by a fault."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.types import Cause, Status

aten = torch.ops.aten


def normal(*shape, seed=0, scale=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(1000 + seed + sum(shape))
    return (torch.randn(*shape, generator=g) * scale).to(dtype)


def in_blocks(x, dim, block=64):
    """Sum by another order: from the end, one element of each block after the other."""
    total = None
    for part in x.flip(dim).split(block, dim):
        lane = part.select(dim, 0)
        for i in range(1, part.shape[dim]):
            lane = lane + part.select(dim, i)
        total = lane if total is None else total + lane
    return total


def one_by_one(x, dim):
    return torch.from_numpy(np.add.accumulate(x.numpy(), axis=dim).take(-1, axis=dim))


def split_k(a, b, k=32):
    total = torch.zeros(a.shape[0], b.shape[1])
    for i in range(0, a.shape[1], k):
        total = total + a[:, i : i + k].float() @ b[i : i + k].float()
    return total.to(a.dtype)


def without_mkldnn(op):
    def run(*args):
        enabled = torch.backends.mkldnn.enabled
        torch._C._set_mkldnn_enabled(False)
        try:
            return op(*args)
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    return run


def ulps_up(op, n=1):
    return lambda *args: (op(*args).view(torch.int32) + n).view(torch.float32)


def softmax(x, dim, _half):
    e = torch.exp2((x - x.amax(dim, keepdim=True)) * 1.4426950408889634)
    return e * (1 / e.sum(dim, keepdim=True))


def log_softmax(x, dim, _half):
    top = x.amax(dim, keepdim=True)
    return x - (top + torch.log(torch.exp(x - top).sum(dim, keepdim=True)))


def softmax_backward(grad, y, dim, _dtype):
    return y * grad - y * in_blocks(y * grad, dim % y.dim(), 16).unsqueeze(dim)


def log_softmax_backward(off):
    """The gradient with the exponential off by some units in the last place, as vectorised ones are."""

    def run(grad, output, dim, _dtype):
        ulp = torch.finfo(output.dtype).eps / 2
        return grad - output.exp() * (1 + off * ulp) * grad.sum(dim, keepdim=True)

    return run


def likelihood(dtype, n=10):
    """Gradient of a cross-entropy, and log-probabilities of a model that is nearly sure of the right class."""
    output = torch.log_softmax(normal(64, n, seed=5).to(dtype) + 9 * torch.eye(n, dtype=dtype).repeat(7, 1)[:64], 1)
    grad = torch.zeros(64, n, dtype=dtype).scatter_(1, torch.arange(64)[:, None] % n, -1 / 64)
    return grad, output, 1, dtype


def layer_norm(x, _shape, w, b, eps):
    mean = in_blocks(x, -1, 8).unsqueeze(-1) / x.shape[-1]
    rstd = 1 / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)
    return (x * rstd - mean * rstd) * w + b, mean, rstd


def layer_norm_backward(grad, x, _shape, mean, rstd, w, _b, _mask):
    xhat, gw, n = (x - mean) * rstd, grad * w, x.shape[-1]
    first = in_blocks(gw, 1, 16).unsqueeze(1) / n
    second = xhat * (in_blocks(gw * xhat, 1, 16).unsqueeze(1) / n)
    return rstd * (gw - first - second), in_blocks(grad * xhat, 0, 16), in_blocks(grad, 0, 16)


def batch_norm(x, w, b, running_mean, running_var, _training, momentum, eps):
    n = x.numel() // x.shape[1]
    mean = x.transpose(0, 1).reshape(x.shape[1], -1).flip(1).mean(1)
    d = x - mean[None, :, None, None]
    var = (d * d).transpose(0, 1).reshape(x.shape[1], -1).sum(1) / n
    running_mean.mul_(1 - momentum).add_(mean * momentum)
    running_var.mul_(1 - momentum).add_(var * (n / (n - 1)) * momentum)
    rstd = 1 / torch.sqrt(var + eps)
    return x * (rstd * w)[None, :, None, None] + (b - mean * rstd * w)[None, :, None, None], mean, rstd


def variance(x, dim, correction=1):
    d = x - (in_blocks(x, dim[0], 8) / x.shape[dim[0]]).unsqueeze(dim[0])
    return in_blocks(d * d, dim[0], 8) / (x.shape[dim[0]] - correction)


def reversed_put(self, indices, values, accumulate):
    order = torch.arange(values.shape[0] - 1, -1, -1)
    return aten.index_put_(self, [indices[0][order]], values[order], accumulate)


def adam(params, grads, exp_avgs, exp_avg_sqs, _max, steps, *, lr, beta1, beta2, weight_decay, eps, **_flags):
    for p, g, m, v, s in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        grad = g + weight_decay * p
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (v.sqrt() / (1 - beta2 ** s.item()) ** 0.5).add_(eps)
        p.addcdiv_(m, denominator, value=-lr / (1 - beta1 ** s.item()))


def adam_args():
    lists = ([normal(1000)], [normal(1000, seed=1)], [normal(1000, seed=2, scale=0.1)], [normal(1000, scale=0.1) ** 2])
    flags = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False}
    return (*lists, [], [torch.tensor(3.0)]), {**flags, "maximize": False}


def conv_args():
    return normal(4, 16, 20, 20), normal(32, 16, 3, 3), normal(32), [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def conv_backward_args(*, cancelling=False):
    x, w, _b, *rest = conv_args()
    grad = normal(4, 32, 20, 20)
    grad = grad - grad.mean((0, 2, 3), keepdim=True) if cancelling else grad
    return grad, x, w, [32], *rest, [True, True, True]


def cancelling_rows():
    x = normal(64, 2048)
    return torch.cat([x * 1e3, -x.flip(1) * 1e3 + normal(64, 2048, seed=3, scale=1e-3)], 1)


BF16, F16 = torch.bfloat16, torch.float16
IDS = torch.randint(0, 50, (4000,), generator=torch.Generator().manual_seed(1))
LAYER_NORM = (normal(128, 512), [512], normal(512), normal(512, seed=1), 1e-5)
BATCH_NORM = (normal(16, 8, 12, 12) + 2, normal(8), normal(8, seed=1), normal(8), normal(8).abs(), True, 0.1, 1e-5)
SUM = aten.sum.dim_IntList
SOFTMAX = torch.softmax(normal(128, 200), -1)
_, MEAN, RSTD = aten.native_layer_norm.default(*LAYER_NORM)

RIGHT = {
    "sum in blocks": (SUM, lambda x, d: in_blocks(x, d[0]), normal(64, 4096), [1]),
    "sum of positive in blocks": (SUM, lambda x, d: in_blocks(x, d[0]), normal(64, 4096).abs(), [1]),
    "sum one by one": (SUM, lambda x, d: one_by_one(x, d[0]), normal(4, 65536).abs(), [1]),
    "sum cancelling": (SUM, lambda x, d: in_blocks(x, d[0]), cancelling_rows(), [1]),
    "sum bf16": (SUM, lambda x, d: in_blocks(x.float(), d[0]).bfloat16(), cancelling_rows().bfloat16(), [1]),
    "mean": (aten.mean.dim, lambda x, d: in_blocks(x, d[0]) / x.shape[1], normal(64, 1000), [1]),
    "mm split": (aten.mm.default, split_k, normal(128, 1024), normal(1024, 128)),
    "mm one by one": (aten.mm.default, lambda a, b: split_k(a, b, 1), normal(64, 1024), normal(1024, 64)),
    "mm bf16": (
        aten.mm.default,
        lambda a, b: split_k(a, b, 16),
        normal(256, 512, dtype=BF16),
        normal(512, 256, dtype=BF16),
    ),
    "mm f16": (aten.mm.default, lambda a, b: split_k(a, b, 16), normal(64, 512, dtype=F16), normal(512, 64, dtype=F16)),
    "mm f64": (
        aten.mm.default,
        lambda a, b: a[:, :99] @ b[:99] + a[:, 99:] @ b[99:],
        normal(64, 256, dtype=torch.float64),
        normal(256, 64, dtype=torch.float64),
    ),
    "convolution": (aten.convolution.default, without_mkldnn(aten.convolution.default), *conv_args()),
    "convolution backward": (
        aten.convolution_backward.default,
        without_mkldnn(aten.convolution_backward.default),
        *conv_backward_args(),
    ),
    "convolution backward, cancelling": (
        aten.convolution_backward.default,
        without_mkldnn(aten.convolution_backward.default),
        *conv_backward_args(cancelling=True),
    ),
    "softmax": (aten._softmax.default, softmax, normal(256, 1000, scale=4), -1, False),
    "log_softmax": (aten._log_softmax.default, log_softmax, normal(256, 1000, scale=4), -1, False),
    "log_softmax, sure": (aten._log_softmax.default, log_softmax, normal(256, 10, scale=30), -1, False),
    "softmax backward": (
        aten._softmax_backward_data.default,
        softmax_backward,
        normal(128, 200, seed=1),
        SOFTMAX,
        -1,
        torch.float32,
    ),
    "softmax backward, constant": (
        aten._softmax_backward_data.default,
        softmax_backward,
        torch.full((128, 200), 0.37),
        SOFTMAX,
        -1,
        torch.float32,
    ),
    "log_softmax backward, sure": (
        aten._log_softmax_backward_data.default,
        log_softmax_backward(1),
        *likelihood(torch.float32),
    ),
    "log_softmax backward, sure, float64": (
        aten._log_softmax_backward_data.default,
        log_softmax_backward(1),
        *likelihood(torch.float64),
    ),
    "layer_norm": (aten.native_layer_norm.default, layer_norm, *LAYER_NORM),
    "layer_norm with an offset": (aten.native_layer_norm.default, layer_norm, LAYER_NORM[0] + 100, *LAYER_NORM[1:]),
    "layer_norm of a constant": (
        aten.native_layer_norm.default,
        layer_norm,
        torch.full((8, 512), 3.3),
        *LAYER_NORM[1:],
    ),
    "layer_norm backward": (
        aten.native_layer_norm_backward.default,
        layer_norm_backward,
        normal(128, 512, seed=5),
        LAYER_NORM[0],
        [512],
        MEAN,
        RSTD,
        *LAYER_NORM[2:4],
        [True] * 3,
    ),
    "batch_norm": (aten.native_batch_norm.default, batch_norm, *BATCH_NORM),
    "variance": (aten.var.correction, variance, normal(64, 1000) + 50, [1]),
    "variance of a constant": (aten.var.correction, variance, torch.full((64, 1000), 3.3), [1]),
    "exp up": (aten.exp.default, ulps_up(aten.exp.default), normal(10000, scale=5)),
    "add up": (aten.add.Tensor, ulps_up(aten.add.Tensor), normal(10000), normal(10000, seed=1)),
    "gelu": (aten.gelu.default, lambda x: 0.5 * x * (1 + torch.erf(x * 0.70710678)), normal(50000, scale=3)),
    "gelu by erfc": (
        aten.gelu.default,
        lambda x: (0.5 * x.double() * torch.erfc(-x.double() / 2**0.5)).float(),
        normal(50000, scale=3),
    ),
    "lerp": (aten.lerp.Scalar, lambda s, e, w: s * (1 - w) + e * w, normal(10000), normal(10000, seed=1), 0.1),
    "addcmul bf16 in steps": (
        aten.addcmul.default,
        lambda s, a, b: s + a * b,
        *(normal(9999, seed=i, dtype=BF16) for i in range(3)),
    ),
    "index_put": (aten.index_put_.default, reversed_put, torch.zeros(100), [IDS], normal(4000), True),
    "cumsum": (
        aten.cumsum.default,
        lambda x, d: torch.cat([x[:, :500].cumsum(d), x[:, :500].sum(d, keepdim=True) + x[:, 500:].cumsum(d)], d),
        normal(64, 1000),
        1,
    ),
    "norm": (
        aten.linalg_vector_norm.default,
        lambda x, _o, d: torch.sqrt(in_blocks(x * x, d[0])),
        normal(64, 1000),
        2,
        [1],
    ),
    "logsumexp": (aten.logsumexp.default, lambda x, d: torch.log(torch.exp(x).sum(d)), normal(64, 1000), [1]),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        lambda g, i, *r: aten.embedding_dense_backward(g.flip(0), i.flip(0), *r),
        normal(4000, 32),
        IDS,
        50,
        -1,
        False,
    ),
    "cholesky": (
        aten.linalg_cholesky_ex.default,
        lambda a: (torch.linalg.cholesky(a.double()).float().mT.contiguous().mT, torch.tensor(0, dtype=torch.int32)),
        torch.eye(32) * 9 + normal(32, 32) @ normal(32, 32).T,
    ),
    "bilinear": (
        aten.upsample_bilinear2d.default,
        lambda x, *r: aten.upsample_bilinear2d.default(x.double(), *r).float(),
        normal(2, 3, 30, 30),
        [211, 211],
        False,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_implementations_match(make_case, name):
    op, target, *args = RIGHT[name]
    verdict, diffs = Judge()(make_case(op, target, *args))
    assert verdict.status is Status.MATCH, verdict
    assert verdict.cause is Cause.ROUNDING, "the case proves nothing if the bits are equal"
    assert diffs
    assert all(d.n_mismatched == 0 for d in diffs)


def test_adam_by_other_steps_matches(make_case):
    args, kwargs = adam_args()
    verdict, _ = Judge()(make_case(aten._fused_adam_.default, adam, *args, **kwargs))
    assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.ROUNDING)


def poked(op, place, change, result=None):
    def run(*args):
        out = op(*args)
        flat = (out if result is None else out[result]).view(-1)
        flat[place] = change(flat[place])
        return out

    return run


def tf32(t):
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def half_sums(a, b, dtype):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for i in range(a.shape[1]):
        total = total + (a[:, i : i + 1] * b[i : i + 1]).to(dtype)
    return total.to(a.dtype)


def biased_running_var(x, w, b, mean, var, *rest):
    n, before = x.numel() // x.shape[1], var.clone()
    out = aten.native_batch_norm.default(x, w, b, mean, var, *rest)
    var.copy_(before * 0.9 + (var - before * 0.9) * ((n - 1) / n))
    return out


def lost(self, indices, values, _accumulate):
    self[indices[0]] = self[indices[0]] + values
    return self


MM = (normal(64, 256), normal(256, 64))
WRONG = {
    "log_softmax backward, its exponential 1000 units off": (
        aten._log_softmax_backward_data.default,
        log_softmax_backward(1000),
        *likelihood(torch.float32),
    ),
    "log_softmax backward, its exponential 100 units off in float64": (
        aten._log_softmax_backward_data.default,
        log_softmax_backward(100),
        *likelihood(torch.float64),
    ),
    "one element in a million": (
        aten.exp.default,
        poked(aten.exp.default, 123456, lambda v: v * 1.0001),
        normal(1000000),
    ),
    "softmax off by 2e-4": (
        aten._softmax.default,
        lambda x, d, _h: torch.softmax(x, d) * (1 + 2e-4),
        normal(64, 100),
        -1,
        False,
    ),
    "tf32": (aten.mm.default, lambda a, b: tf32(a) @ tf32(b), *MM),
    "tf32, many positive terms": (
        aten.mm.default,
        lambda a, b: tf32(a) @ tf32(b),
        normal(64, 2048).abs(),
        normal(2048, 64).abs(),
    ),
    "bf16": (aten.mm.default, lambda a, b: a.bfloat16().float() @ b.bfloat16().float(), *MM),
    "accumulated in f16": (aten.mm.default, lambda a, b: half_sums(a, b, F16), *MM),
    "f16 accumulated in f16": (
        aten.mm.default,
        lambda a, b: half_sums(a, b, F16),
        normal(64, 512, dtype=F16),
        normal(512, 64, dtype=F16),
    ),
    "bf16 sum in bf16": (SUM, lambda x, d: in_blocks(x, d[0]), normal(64, 1000, dtype=BF16).abs(), [1]),
    "duplicates lost": (aten.index_put_.default, lost, torch.zeros(100), [IDS[:200]], normal(200), True),
    "last element": (aten.softplus.default, poked(aten.softplus.default, -1, lambda v: v * 0), normal(1001)),
    "running variance": (aten.native_batch_norm.default, biased_running_var, *BATCH_NORM),
    "epsilon": (
        aten.native_layer_norm.default,
        lambda x, s, w, b, _e: aten.native_layer_norm(x, s, w, b, 1e-6),
        *LAYER_NORM,
    ),
    "one weight gradient": (
        aten.convolution_backward.default,
        poked(aten.convolution_backward.default, 0, lambda v: v * 0.999, 1),
        *conv_backward_args(),
    ),
    "last term of a sum": (SUM, lambda x, d: x[:, :-1].sum(d), normal(64, 1000), [1]),
    "tanh gelu": (aten.gelu.default, lambda x: aten.gelu(x, approximate="tanh"), normal(10000)),
    "an index off": (aten.argmax.default, lambda x, d: aten.argmax(x, d) - 1, normal(8, 50), 1),
    "comparison": (aten.lt.Tensor, aten.le.Tensor, torch.ones(9), torch.ones(9)),
    "copy of one ULP more": (aten.clone.default, ulps_up(aten.clone.default), normal(9)),
    "integer": (aten.add.Tensor, lambda a, b: a + b + 1, torch.arange(9), torch.arange(9)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_implementations_mismatch(make_case, name):
    op, target, *args = WRONG[name]
    case = make_case(op, target, *args)
    verdict, diffs = Judge(hypotheses=False)(case)
    assert verdict.status is Status.MISMATCH, verdict
    assert verdict.cause is not Cause.REFERENCE
    assert any(d.n_mismatched for d in diffs)


def test_adam_a_thousandth_off_mismatches(make_case):
    args, kwargs = adam_args()

    def off(*a, **k):
        adam(*a, **{**k, "lr": k["lr"] * 1.001})

    verdict, diffs = Judge()(make_case(aten._fused_adam_.default, off, *args, **kwargs))
    assert (verdict.status, verdict.explanation) == (Status.MISMATCH, "update scaled by 1.001")
    assert {d.name for d in diffs if d.n_mismatched} == {"self[0]"}


def test_ties_of_sort_along_an_inner_dimension(make_case):
    x = torch.randint(0, 3, (4, 6, 5)).float()

    def unstable(t, dim, descending):
        values, indices = torch.sort(t.flip(dim), dim=dim, descending=descending, stable=True)
        return values, t.shape[dim] - 1 - indices

    verdict, _ = Judge()(make_case(aten.sort.default, unstable, x, 1, False))
    assert (verdict.status, verdict.explanation) == (Status.UNVERIFIED, "tie")


def test_classes_are_found_whatever_the_tolerance(make_case):
    x = torch.tensor([1.0, math.nan, 3.0, 4.0])
    case = make_case(aten.softplus.default, lambda t: torch.nn.functional.softplus(t).nan_to_num(), x)
    for judge in (Judge(), Judge(rtol=1e9, atol=1e9)):
        assert judge(case)[0].cause is Cause.EXCEPTIONAL_VALUES


def added_in_order(order):
    """A matrix product that adds up its terms in another order, one by one."""

    def run(a, b):
        terms = (a.unsqueeze(-1) * b).unbind(1)
        total = torch.zeros_like(terms[0])
        for k in order:
            total = total + terms[k]
        return total

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_partial_sums_overflow_in_one_order_only(make_case, dtype):
    large = 0.75 * torch.finfo(dtype).max
    a = torch.tensor([[large, -large, large, -large], [1.0, 2.0, 3.0, 4.0]], dtype=dtype)
    b = torch.ones(4, 3, dtype=dtype)
    overflows = added_in_order((0, 2, 1, 3))
    assert torch.isinf(overflows(a, b)[0]).all()
    verdict, _ = Judge()(make_case(aten.mm.default, overflows, a, b))
    assert verdict.status is Status.MATCH

    def wrong_below(a, b):
        out = overflows(a, b)
        out[1, 0] = math.inf  # whose terms are small
        return out

    verdict, (d,) = Judge()(make_case(aten.mm.default, wrong_below, a, b))
    assert verdict.status is Status.MISMATCH
    assert d.n_mismatched == 1


def fused(a, x, y, value=1.0):
    """With one rounding at the end, as a fused multiply-add has it."""
    return (a.double() + value * x.double() * y.double()).float()


INFINITE, LARGE, WIDE = torch.tensor([-math.inf, 1.0]), torch.tensor([1e20, 2.0]), torch.tensor([1e19, 3.0])
NEARLY = torch.tensor([-3e38, 1.0])
OVERFLOWING_PRODUCTS = {
    "addcmul": (aten.addcmul.default, (INFINITE, LARGE, WIDE), {}, fused, [math.nan, 7.0]),
    "its factor": (aten.addcmul.default, (NEARLY, LARGE, WIDE), {"value": 0.5}, fused, [math.inf, 4.0]),
    "addcdiv": (
        aten.addcdiv.default,
        (INFINITE, LARGE, 1 / WIDE),
        {},
        lambda a, x, y: fused(a, x, 1 / y),
        [math.nan, 7.0],
    ),
    "add": (
        aten.add.Tensor,
        (INFINITE, LARGE),
        {"alpha": 1e20},
        lambda a, x, alpha: fused(a, x, torch.ones(2), alpha),
        [math.nan, 2e20],
    ),
    "lerp": (
        aten.lerp.Scalar,
        (NEARLY, torch.tensor([3e38, 2.0]), 0.25),
        {},
        lambda a, b, w: a * (1 - w) + b * w,
        [math.inf, 1.25],
    ),
}


@pytest.mark.parametrize("name", OVERFLOWING_PRODUCTS)
def test_a_product_overflows_without_a_fused_step(make_case, name):
    op, inputs, named, run, unfused = OVERFLOWING_PRODUCTS[name]
    case = replace(make_case(op, run, *inputs, **named), expected=(torch.tensor(unfused),))
    assert Judge()(case)[0].status is Status.MATCH
    swapped = replace(case, actual=case.expected, expected=case.actual)
    assert Judge()(swapped)[0].status is Status.MATCH
    # Where no product overflows, NaN and infinity are as wrong as before.
    wrong = replace(swapped, actual=(torch.tensor([unfused[0], unfused[0]]),))
    assert Judge()(wrong)[0].status is Status.MISMATCH


def test_overflow_and_underflow_at_the_edge_are_rounding(make_case):
    top = torch.finfo(torch.float32).max
    case = make_case(SUM, lambda x, _d: torch.full((1,), top), torch.tensor([[top, top * 2.0**-25 * 2]]), [1])
    case = replace(case, actual=(torch.tensor([math.inf]),), expected=(torch.tensor([top]),))
    assert Judge()(case)[0].status is Status.MATCH
    far = replace(case, args=(torch.tensor([[top / 2, 1.0]]), [1]), expected=(torch.tensor([top / 2]),))
    assert Judge()(far)[0].status is Status.MISMATCH
    tiny = make_case(aten.silu.default, lambda x: x * 0, torch.tensor([2e-45]))
    assert Judge()(tiny)[0].status is Status.MATCH
    flushed = make_case(aten.silu.default, lambda x: x * 0, torch.tensor([2e-40]))
    assert Judge()(flushed)[0].cause is Cause.FLUSHED_SUBNORMALS


def test_the_sign_of_zero_counts_where_it_is_defined(make_case):
    zeros = torch.tensor([-0.0, 0.0])
    assert (
        Judge()(make_case(aten.mul.Tensor, lambda a, b: (a * b).abs(), zeros, torch.ones(2)))[0].status
        is Status.MISMATCH
    )
    assert Judge()(make_case(aten.relu.default, lambda x: x.clamp(min=0).abs(), zeros))[0].status is Status.MATCH
    assert Judge()(make_case(SUM, lambda x, d: -x.sum(d), torch.zeros(2, 3), [1]))[0].status is Status.MATCH


def test_a_product_that_underflows_before_it_is_added_leaves_either_zero(make_case):
    """0.0 + -0.001 * 2.8e-48: -0.0 where multiplication and addition are fused, else 0.0."""
    zeros, tiny = torch.zeros(3), torch.tensor([2.8e-45, 1e-44, 0.0])

    def unlike(x, y, alpha=1):
        return torch.add(x, y, alpha=alpha).neg()

    case = make_case(aten.add.Tensor, unlike, zeros[:2], tiny[:2], alpha=-0.001)
    assert Judge()(case)[0].status is Status.MATCH
    for wrong in (
        make_case(aten.add.Tensor, unlike, zeros, tiny, alpha=-0.001),  # 0 + -0.001 * 0 is 0.0, in any way
        make_case(aten.add.Tensor, unlike, zeros, zeros),
        make_case(aten.mul.Tensor, lambda a, b: (a * b).neg(), tiny, torch.full((3,), 0.001)),
    ):
        assert Judge()(wrong)[0].status is Status.MISMATCH


def test_a_wrong_reference_is_named(make_case):
    case = make_case(aten.softplus.default, torch.nn.functional.softplus, normal(100))
    off = replace(case, expected=(case.expected[0] * 1.01,))
    assert Judge()(off)[0].cause is Cause.REFERENCE


def test_form_comes_first(make_case):
    x = normal(4, 6)
    cases = {
        "dtype": make_case(aten.exp.default, lambda t: t.exp().double(), x),
        "shape": make_case(aten.exp.default, lambda t: t.exp()[:2], x),
        "stride": make_case(aten.exp.default, lambda t: t.exp().t().contiguous().t(), x),
    }
    for name, case in cases.items():
        verdict, diffs = Judge()(case)
        assert (verdict.status, verdict.cause, verdict.explanation) == (Status.MISMATCH, Cause.METADATA, name)
        assert diffs[0].detail.startswith(name)


def test_a_convolution_may_return_any_memory_format_and_no_other_strides(make_case):
    x, w = normal(2, 4, 6, 6).to(memory_format=torch.channels_last), normal(4, 5, 3, 3)
    args = (x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)

    def in_order(*dims):
        def slow(*_):
            y = aten.convolution.default(*args).permute(dims).contiguous()
            return y.permute([dims.index(k) for k in range(4)])

        return make_case(aten.convolution.default, slow, *args)

    for dims in ((0, 1, 2, 3), (0, 2, 3, 1)):
        assert Judge()(in_order(*dims))[0].status is Status.MATCH
    assert Judge()(in_order(1, 0, 2, 3))[0].explanation == "stride"


def test_user_tolerances_replace_bounds(make_case):
    case = make_case(aten.exp.default, lambda t: t.exp() * 1.01, normal(100))
    assert Judge(rtol=0.02)(case)[0].status is Status.MATCH
    assert Judge(rtol=0.005)(case)[0].status is Status.MISMATCH


def test_without_an_oracle_the_call_stays_unverified(make_case):
    case = make_case(SUM, lambda x, d: in_blocks(x, d[0]), normal(64, 4096), [1])
    verdict, _ = Judge(max_bytes=1000)(case)
    assert verdict.status is Status.UNVERIFIED
    assert verdict.explanation.startswith("no float64 oracle")


def test_random_operators_are_not_judged(make_case):
    case = make_case(aten.bernoulli.default, lambda p: 1 - aten.bernoulli.default(p), torch.full((50,), 0.5))
    assert Judge()(case)[0].cause is Cause.RANDOMNESS


def test_inputs_and_random_state_stay(make_case):
    op, target, *args = WRONG["tf32"]
    case = make_case(op, target, *args)
    before, state = [a.clone() for a in args], torch.get_rng_state()
    Judge()(case)
    assert all(torch.equal(a, b) for a, b in zip(case.args, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_conversions_to_short_dtypes_are_exact(make_case, dtype):
    def truncate(x, dtype):
        return (x.double() * (1 - 2.0**-4)).to(dtype)

    verdict, diffs = Judge()(make_case(aten._to_copy.default, truncate, normal(64), dtype=dtype))
    assert verdict.status is Status.MISMATCH
    assert diffs[0].n_mismatched == diffs[0].n_different > 0


def test_scalars_and_complex_results(make_case):
    item = make_case(aten._local_scalar_dense.default, lambda x: x.item() + 1, torch.tensor(2.0))
    assert Judge()(item)[0].status is Status.MISMATCH
    z = torch.complex(normal(100), normal(100, seed=1))
    product = lambda a, b: (a.to(torch.complex128) * b).to(torch.complex64)  # noqa: E731
    assert Judge()(make_case(aten.mul.Tensor, product, z, z.conj().resolve_conj() * 3))[0].status is Status.MATCH
    swapped = make_case(aten.mul.Tensor, lambda a, b: (a * b).conj().resolve_conj(), z, z * 3)
    assert Judge()(swapped)[0].status is Status.MISMATCH
