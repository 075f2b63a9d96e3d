"""Sizes of rounding errors of norms and softmaxes: as the oracle's perturbed runs measure them, and no fault passes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shadowrun import Status
from shadowrun.judge.judge import Judge
from shadowrun.judge.oracle import MANY_RUNS, Oracle, n_terms
from shadowrun.judge.rounding import attention_sizes
from shadowrun.judge.rounding.closeness import MAX_TERMS, ClosenessCheck
from shadowrun.judge.rounding.row_sizes import has_row_sizes, row_sizes
from shadowrun.numerics.diff import diff
from shadowrun.numerics.input_roundings import to_tf32
from shadowrun.operators.vendor_ops import COUNTERPARTS
from tests.case_kit import make_case

aten = torch.ops.aten
MANY_BYTES = 1 << 30
# Standard deviation of a factor of the oracle's, and the greatest of 16 normal deviates.
DEVIATION = (7 / 12) ** 0.5 * 2.0 * 2.0**-24


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def masked(x):
    return x.masked_fill(torch.arange(x.shape[-1]) > x.shape[-1] // 2, float("-inf"))


def layer_norm_backward(x, shape, weight):
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, None, 1e-5)
    grad, bias = normal(*x.shape, seed=7), None if weight is None else torch.zeros_like(weight)
    wanted = [True, weight is not None, weight is not None]
    return aten.native_layer_norm_backward.default, (grad, x, shape, mean, rstd, weight, bias, wanted)


def batch_norm(*shape, training=True, weight=True, running=True):
    w, b = (normal(shape[1], seed=1), normal(shape[1], seed=2)) if weight else (None, None)
    means, variances = (normal(shape[1], seed=3), normal(shape[1], seed=4).abs() + 0.1) if running else (None, None)
    args = (normal(*shape) * 2 + 1, w, b, means, variances, training, 0.1, 1e-5)
    return aten.native_batch_norm.default, args


def batch_norm_backward(*shape, training=True, weight=True):
    (x, w, _, means, variances, *_), grad = batch_norm(*shape, weight=weight)[1], normal(*shape, seed=7)
    _, mean, rstd = aten.native_batch_norm(x, w, None, means.clone(), variances.clone(), training, 0.1, 1e-5)
    wanted = [True, weight, weight]
    return aten.native_batch_norm_backward.default, (grad, x, w, means, variances, mean, rstd, training, 1e-5, wanted)


def group_norm(groups, *shape, weight=True):
    w, b = (normal(shape[1], seed=1), normal(shape[1], seed=2)) if weight else (None, None)
    sizes = (shape[0], shape[1], shape[2] * shape[3], groups)
    return aten.native_group_norm.default, (normal(*shape) * 2 + 1, w, b, *sizes, 1e-5)


def group_norm_backward(groups, *shape, weight=True):
    x, w, _, *sizes, _ = group_norm(groups, *shape, weight=weight)[1]
    _, mean, rstd = aten.native_group_norm(x, w, None, *sizes, 1e-5)
    grad = normal(*shape, seed=7)
    return aten.native_group_norm_backward.default, (grad, x, mean, rstd, w, *sizes, [True, weight, weight])


def backward_of(softmax, backward, x, grad):
    return backward, (grad, softmax(x, -1), -1, torch.float32)


def rms_norm_backward(x, shape, weight):
    rstd = aten._fused_rms_norm(x, shape, weight, 1e-5)[1]
    wanted = [True, weight is not None]
    return aten._fused_rms_norm_backward.default, (normal(*x.shape, seed=7), x, shape, rstd, weight, wanted)


def attention(heads, n, m, d, causal=False):
    q, k, v = (normal(2, heads, rows, d, seed=i) for i, rows in enumerate((n, m, m)))
    return aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, 0.0, causal)


def attention_backward(*sizes, causal=False):
    op, args = attention(*sizes, causal=causal)
    q, k, v = args[:3]
    saved = op(*args)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward, (normal(*q.shape, seed=5), q, k, v, *saved, 0.0, causal)


CALLS = {
    "RMS norm": (aten._fused_rms_norm.default, (normal(16, 40) + 1, [40], normal(40, seed=1), 1e-5)),
    "RMS norm, backward": rms_norm_backward(normal(16, 40) + 1, [40], normal(40, seed=1)),
    "attention": attention(2, 30, 20, 8),
    "attention, causal": attention(2, 24, 24, 16, causal=True),
    "attention, backward": attention_backward(2, 30, 20, 8),
    "attention, causal, backward": attention_backward(2, 24, 24, 16, causal=True),
    "layer norm": (aten.native_layer_norm.default, (normal(16, 40) + 3, [40], normal(40, seed=1), normal(40), 1e-5)),
    "of two dimensions": (aten.native_layer_norm.default, (normal(64, 4, 8) * 1e-2, [4, 8], None, None, 1e-5)),
    "short rows": (aten.native_layer_norm.default, (normal(64, 3), [3], normal(3, seed=1), None, 1e-5)),
    "layer norm, backward": layer_norm_backward(normal(16, 40) + 3, [40], normal(40, seed=1)),
    "no weight, backward": layer_norm_backward(normal(9, 4, 8), [4, 8], None),
    "batch norm": batch_norm(8, 5, 6, 6),
    "of vectors": batch_norm(60, 7, running=False),
    "no affine": batch_norm(8, 5, 6, 6, weight=False),
    "in evaluation": batch_norm(8, 5, 6, 6, training=False),
    "in evaluation, no affine": batch_norm(8, 5, 30, training=False, weight=False),
    "batch norm, backward": batch_norm_backward(8, 5, 6, 6),
    "no affine, backward": batch_norm_backward(40, 5, weight=False),
    "in evaluation, backward": batch_norm_backward(8, 5, 6, 6, training=False),
    "group norm": group_norm(3, 4, 6, 5, 5),
    "group norm, no affine": group_norm(2, 4, 6, 5, 5, weight=False),
    "group norm, backward": group_norm_backward(3, 4, 6, 5, 5),
    "group norm, no affine, backward": group_norm_backward(2, 4, 6, 5, 5, weight=False),
    "tanh, backward": (aten.tanh_backward.default, (normal(16, 40), (normal(16, 40, seed=1) * 2).tanh())),
    "sigmoid, backward": (aten.sigmoid_backward.default, (normal(16, 40), (normal(16, 40, seed=1) * 2).sigmoid())),
    "silu, backward": (aten.silu_backward.default, (normal(16, 40), normal(16, 40, seed=1) * 3)),
    "softmax": (aten._softmax.default, (normal(16, 40) * 5, -1, False)),
    "first dimension": (aten._softmax.default, (normal(8, 5, 6), 0, False)),
    "safe softmax": (aten._safe_softmax.default, (masked(normal(16, 40)), -1)),
    "softmax, backward": backward_of(
        torch.softmax, aten._softmax_backward_data.default, normal(16, 40), normal(16, 40, seed=2)
    ),
    "log softmax": (aten._log_softmax.default, (normal(16, 40) * 3, -1, False)),
    "log softmax, backward": backward_of(
        torch.log_softmax, aten._log_softmax_backward_data.default, normal(16, 40), normal(16, 40, seed=3)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_oracle_measures_the_same(make_case, name):
    op, args = CALLS[name]
    case = make_case(op, op, *args)
    oracle = Oracle(case, MANY_BYTES)
    oracle.perturb(MANY_RUNS)
    for truth, size in zip(oracle.truths, row_sizes(case), strict=True):
        if not size.numel():
            continue
        found = truth.spread / DEVIATION
        some = found > 1e-6 * found.max()
        ratio = (size.reshape(-1).double().numpy()[some] + 1e-30) / found[some]
        # A sum of few terms of fixed size has no normal tail: the greatest of 16 is nearer to the deviation. What the
        # scores of a row have in common is left out, which makes the bound of attention smaller.
        least = 0.3 if "attention" in name else 0.7
        assert least < np.median(ratio) < 1.7, np.median(ratio)
        # A size that is too great would pass what the oracle does not.
        assert ratio.max() < 4.0, ratio.max()


@pytest.mark.parametrize("name", CALLS)
def test_the_tensors_of_the_call_stay_as_they_are(make_case, name):
    op, args = CALLS[name]
    case = make_case(op, op, *args)
    held = [t for t in (*case.args, *case.expected) if isinstance(t, torch.Tensor)]
    copies = [t.clone() for t in held]
    row_sizes(case)
    assert all(torch.equal(t, copy) for t, copy in zip(held, copies, strict=True))


def verdicts(case):
    check = ClosenessCheck(case, MANY_BYTES)
    diffs = [diff("", a, e) for a, e in zip(case.actual, case.expected, strict=True)]
    return [check.verdict(k, d) if d.n_different else "equal" for k, d in enumerate(diffs)]


@pytest.mark.parametrize("name", CALLS)
def test_another_order_of_the_same_sums_passes(make_case, name):
    op, args = CALLS[name]

    def wide(*args):
        double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        double = [torch.float64 if a is torch.float32 else a for a in double]
        out = COUNTERPARTS.get(op.name(), op)(*double)
        for mine, theirs in zip(args, double, strict=True):  # the statistics that it updates
            if isinstance(mine, torch.Tensor):
                mine.copy_(theirs)
        return tuple(None if t is None else t.float() for t in out) if isinstance(out, tuple) else out.float()

    case = make_case(op, wide, *args)
    assert not torch.equal(case.actual[0], case.expected[0])
    assert None not in verdicts(case)
    assert Judge()(case)[0].status is Status.MATCH


def changed(op, how):
    def target(*args):
        out = COUNTERPARTS.get(op.name(), op)(*args)
        first = out[0] if isinstance(out, tuple) else out
        first = how(first.clone())
        return (first, *out[1:]) if isinstance(out, tuple) else first

    return target


def one_element(size):
    def how(t):
        k = torch.unravel_index(t.abs().argmax(), t.shape)
        t[k] += 60 * 2.0**-24 * (t[k].abs() + size.reshape(t.shape)[k])
        return t

    return how


@pytest.mark.parametrize("name", CALLS)
def test_faults_do_not_pass(make_case, name):
    op, args = CALLS[name]
    size = row_sizes(make_case(op, op, *args))[0]
    faults = {
        "one element": one_element(size),
        "a factor": lambda t: t * (1 + 2.0**-20),
        "a row": lambda t: torch.cat([t[:1] * (1 + 2.0**-16), t[1:]]),
    }
    for fault, how in faults.items():
        case = make_case(op, changed(op, how), *args)
        assert verdicts(case)[0] is None, fault


def test_a_factor_of_the_small_elements_is_seen(make_case):
    """A few great elements must not hide what all others share."""
    x = normal(64, 64)
    x[:, 0] = 100
    op = aten.native_layer_norm.default
    target = changed(op, lambda t: torch.where(t.abs() < 2, t * (1 + 8 * 2.0**-24), t))
    assert verdicts(make_case(op, target, x, [64], None, None, 0.0))[0] is None


def test_channels_of_many_elements_need_no_oracle_and_tf32_does_not_pass(make_case):
    op, args = batch_norm_backward(16, 2, 256, 256)
    grad = args[0]

    def with_grad(change):
        return make_case(op, lambda *a: op(change(a[0]), *a[1:]), *args)

    assert n_terms(with_grad(lambda g: g), 2) > MAX_TERMS
    moved = with_grad(lambda g: g * (1 - 2.0**-24 * (normal(*grad.shape, seed=5) > 0)))
    assert None not in verdicts(moved)
    assert verdicts(with_grad(lambda g: to_tf32(g).float())) == [None, None, None]


def test_sixteen_bits_and_other_operators_have_no_sizes(make_case):
    assert not has_row_sizes("aten::mm")
    op, either = aten._softmax.default, normal(8, 64, seed=9).sign()
    case = make_case(op, changed(op, lambda t: (t * (1 + 2.0**-9 * either)).half()), normal(8, 64).half(), -1, False)
    assert verdicts(case) == [None]


def vendors(op, args, *kept):
    """A call of another device's operator, with the results that are compared."""
    case = make_case(op, op, *args)
    return replace(
        case,
        names=tuple(case.names[i] for i in kept),
        actual=tuple(case.actual[i] for i in kept),
        expected=tuple(case.expected[i] for i in kept),
    )


def test_operators_of_a_gpu_have_the_sizes_of_the_cpu_s():
    x, w, b, means, variances, training, *_ = batch_norm(8, 5, 6, 6)[1]
    own = vendors(aten.cudnn_batch_norm.default, (x, w, b, means, variances, training, 0.1, 1e-5), 0, 1, 2)
    assert all(map(torch.equal, row_sizes(own), row_sizes(make_case(*batch_norm_call()))))
    op, (grad, x, w, means, variances, mean, rstd, *_) = batch_norm_backward(8, 5, 6, 6)
    args = (x, grad, w, means, variances, mean, rstd, 1e-5, torch.empty(0, dtype=torch.uint8))
    own = vendors(aten.cudnn_batch_norm_backward.default, args, 0, 1, 2)
    assert all(map(torch.equal, row_sizes(own), row_sizes(make_case(op, op, *batch_norm_backward(8, 5, 6, 6)[1]))))


def batch_norm_call():
    op, args = batch_norm(8, 5, 6, 6)
    return op, op, *args


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_of_a_gpu_too(causal):
    op, (q, k, v, *_) = attention(4, 24, 24, 16, causal=causal)
    grad, seed = normal(*q.shape, seed=5), torch.zeros((), dtype=torch.int64)
    out, sums = op(q, k, v, 0.0, causal)
    size = row_sizes(make_case(op, op, q, k, v, 0.0, causal))[0]
    own = vendors(aten._scaled_dot_product_efficient_attention.default, (q, k, v, None, True, 0.0, causal), 0)
    assert torch.equal(row_sizes(own)[0], size)
    op, args = attention_backward(4, 24, 24, 16, causal=causal)
    wanted = row_sizes(make_case(op, op, *args))
    saved = (grad, q, k, v, None, out, sums, seed, seed, 0.0, [True, True, True, False], causal)
    own = vendors(aten._scaled_dot_product_efficient_attention_backward.default, saved, 0, 1, 2)
    assert all(map(torch.equal, row_sizes(own), wanted))
    # Heads of queries that share keys: as if each had its own.
    shared = (q, k[:, :2], v[:, :2], None, True, 0.0, causal)
    own = vendors(aten._scaled_dot_product_efficient_attention.default, shared, 0)
    apart = [t[:, :2].repeat_interleave(2, 1) for t in (k, v)]
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    each = row_sizes(make_case(forward, forward, q, *apart, 0.0, causal))[0]
    assert torch.allclose(row_sizes(own)[0], each)


def test_attention_of_many_scores_is_left_to_the_oracle(monkeypatch):
    op, args = attention(2, 30, 20, 8)
    monkeypatch.setattr(attention_sizes, "MAX_SCORES", 599)
    assert row_sizes(make_case(op, op, *args)) is None


@pytest.mark.parametrize("name", ["batch norm", "batch norm, backward", "group norm, backward"])
def test_float32_results_of_16_bit_inputs(make_case, name):
    """What autocast makes of a norm: statistics and gradients of the weight stay in float32."""
    op, args = CALLS[name]
    shape = next(a for a in args if isinstance(a, torch.Tensor)).shape
    short = [a.bfloat16() if isinstance(a, torch.Tensor) and a.shape == shape else a for a in args]

    def wide(*args):
        double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        right = op(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
        out = op(*double)
        for mine, theirs in zip(args, double, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(theirs)
        return tuple(None if t is None else t.to(r.dtype) for t, r in zip(out, right, strict=True))

    case = make_case(op, wide, *short)
    in_float32 = [k for k, e in enumerate(case.expected) if e.dtype is torch.float32]
    assert in_float32
    found = verdicts(case)
    assert all(found[k] is not None for k in in_float32)
    for k in in_float32:
        off = list(case.expected)
        worst = off[k].flatten().abs().argmax()
        off[k] = off[k].clone()
        off[k].view(-1)[worst] *= 1 + 2.0**-14
        assert verdicts(replace(case, actual=tuple(off)))[k] is None
