"""Operators of an accelerator's own libraries: the CPU computes what they are defined to give."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shadowrun
from shadowrun import Status
from shadowrun.intercept.plan import make_plan
from shadowrun.operators.vendor_ops import COUNTERPARTS, for_reference

aten = torch.ops.aten


def seeded(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(s).to(dtype) for s in shapes]


def test_each_stands_for_an_operator_that_the_cpu_lacks():
    for name in COUNTERPARTS:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        assert getattr(aten, name.split("::")[1]).default.name() == name


@pytest.mark.parametrize("family", ["cudnn", "miopen"])
def test_batch_norm_forward_and_backward(family):
    (x, grad), (weight, bias) = seeded((4, 3, 5, 5), (4, 3, 5, 5)), seeded(3, 3)
    x.requires_grad_()
    weight.requires_grad_()
    bias.requires_grad_()
    mean, variance = torch.zeros(3), torch.ones(3)
    out = F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)
    wanted = torch.autograd.grad(out, (x, weight, bias), grad)
    own = [torch.zeros(3), torch.ones(3)]
    x, weight, bias = (t.detach() for t in (x, weight, bias))
    found = COUNTERPARTS[f"aten::{family}_batch_norm"](x, weight, bias, *own, True, 0.1, 1e-5)
    assert torch.equal(found[0], out)
    assert torch.equal(own[0], mean)
    assert torch.equal(own[1], variance)
    reserve = [torch.empty(0)] if family == "cudnn" else []
    args = (x, grad, weight, *own, found[1], found[2], 1e-5, *reserve)
    for a, b in zip(COUNTERPARTS[f"aten::{family}_batch_norm_backward"](*args), wanted, strict=True):
        torch.testing.assert_close(a, b)


def attention(causal, mask):
    q, k, v, grad = seeded(*[(2, 3, 8, 16)] * 4)
    bias = None if mask is None else mask.clone().requires_grad_()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, bias, is_causal=causal, scale=0.3)
    wanted = torch.autograd.grad(out, [*leaves, *([] if bias is None else [bias])], grad)
    return (q, k, v), grad, out.detach(), wanted


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention(causal):
    qkv, grad, out, wanted = attention(causal, None)
    found = COUNTERPARTS["aten::_scaled_dot_product_flash_attention"](*qkv, 0.0, causal, False, scale=0.3)
    assert torch.equal(found[0], out)
    assert found[1:] == (None,) * 8
    saved = (out, None, None, None, 8, 8, 0.0, causal, None, None)
    grads = COUNTERPARTS["aten::_scaled_dot_product_flash_attention_backward"](grad, *qkv, *saved, scale=0.3)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b)


def attention_backward(grad, q, k, v, out, causal, scale):
    """Algorithm 4 of FlashAttention, in float64, for as many heads of keys as of queries."""
    grad, q, k, v, out = (t.double() for t in (grad, q, k, v, out))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    p = scores.softmax(-1)
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ grad


def test_the_backward_of_flash_attention_starts_from_the_saved_output():
    """A query that sees one key has no gradient but that of the rounding of its output."""
    qkv, grad, out, _ = attention(True, None)
    q, k, v, grad, out = (t.bfloat16() for t in (*qkv, grad, out))
    saved = (out, None, None, None, 8, 8, 0.0, True, None, None)
    found = COUNTERPARTS["aten::_scaled_dot_product_flash_attention_backward"](grad, q, k, v, *saved, scale=0.3)
    for a, b in zip(found, attention_backward(grad, q, k, v, out, True, 0.3), strict=True):
        assert a.dtype is torch.bfloat16
        torch.testing.assert_close(a.double(), b, rtol=0.01, atol=1e-6)
    other = (out * 2, *saved[1:])
    again = COUNTERPARTS["aten::_scaled_dot_product_flash_attention_backward"](grad, q, k, v, *other, scale=0.3)
    assert not torch.equal(again[0], found[0])


def test_heads_of_queries_that_share_a_head_of_keys():
    q, k, v, grad = seeded((2, 6, 8, 16), *[(2, 3, 8, 16)] * 2, (2, 6, 8, 16))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
    wanted = torch.autograd.grad(out, leaves, grad)
    saved = (out.detach(), None, None, None, 8, 8, 0.0, False, None, None)
    qkv = [t.detach() for t in leaves]
    found = COUNTERPARTS["aten::_scaled_dot_product_flash_attention_backward"](grad, *qkv, *saved)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_attention_that_the_program_allows_other_kernels_for():
    (qkv, _, out, _) = attention(True, None)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*qkv, is_causal=True, scale=0.3)
        found = COUNTERPARTS["aten::_scaled_dot_product_cudnn_attention"](*qkv, None, True, 0.0, True, scale=0.3)
    torch.testing.assert_close(found[0], out)


def test_log_sigmoid_without_the_buffer_of_the_cpu():
    x, grad = seeded((4, 6), (4, 6))
    run = for_reference(make_plan(aten.log_sigmoid_backward.default, 0)).run
    for buffer in (torch.empty(0), aten.log_sigmoid_forward(x)[1]):
        torch.testing.assert_close(run(grad, x, buffer), grad * (-x).sigmoid())


@pytest.mark.parametrize("masked", [False, True])
def test_efficient_attention(masked):
    mask = torch.randn(2, 3, 8, 8) if masked else None
    qkv, grad, out, wanted = attention(False, mask)
    found = COUNTERPARTS["aten::_scaled_dot_product_efficient_attention"](*qkv, mask, True, 0.0, False, scale=0.3)
    torch.testing.assert_close(found[0], out)
    assert found[1:] == (None,) * 3
    backward = COUNTERPARTS["aten::_scaled_dot_product_efficient_attention_backward"]
    grads = backward(grad, *qkv, mask, out, None, None, None, 0.0, [True, True, True, masked], scale=0.3)
    assert (grads[3] is None) is not masked
    for a, b in zip(grads, wanted, strict=False):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("masked", [False, True])
def test_cudnn_attention(masked):
    mask = torch.randn(2, 3, 8, 8) if masked else None
    qkv, grad, out, wanted = attention(not masked, mask)
    forward = COUNTERPARTS["aten::_scaled_dot_product_cudnn_attention"]
    found = forward(*qkv, mask, True, 0.0, not masked, False, scale=0.3)
    torch.testing.assert_close(found[0], out)
    backward = COUNTERPARTS["aten::_scaled_dot_product_cudnn_attention_backward"]
    saved = (out, None, None, None, mask, None, None, 8, 8, 0.0, not masked)
    for a, b in zip(backward(grad, *qkv, *saved, scale=0.3), wanted[:3], strict=True):
        torch.testing.assert_close(a, b)


def test_a_backward_with_dropout_is_not_made_up():
    q, k, v, grad = seeded(*[(1, 2, 4, 8)] * 4)
    with pytest.raises(NotImplementedError):
        COUNTERPARTS["aten::_scaled_dot_product_flash_attention_backward"](
            grad, q, k, v, q, None, None, None, 4, 4, 0.1, False, None, None
        )


@pytest.mark.parametrize("shape", [[6], [4, 6]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_backward(shape, dtype):
    x, grad = seeded((5, 4, 6), (5, 4, 6), dtype=dtype)
    (weight,) = seeded(shape, dtype=dtype)
    x.requires_grad_()
    weight.requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(F.rms_norm(wide[0], shape, wide[1], 1e-5), wide, grad.double())
    rstd = (wide[0].square().mean(tuple(range(3 - len(shape), 3)), keepdim=True) + 1e-5).rsqrt().detach()
    backward = COUNTERPARTS["aten::_fused_rms_norm_backward"]
    found = backward(grad, x.detach(), shape, rstd.float(), weight.detach(), [True, True])
    for a, b, t in zip(found, wanted, (x, weight), strict=True):
        assert (a.dtype, a.shape) == (dtype, t.shape)
        torch.testing.assert_close(
            a.double(),
            b,
            rtol=2e-2 if dtype is torch.bfloat16 else 1e-5,
            atol=1e-2 if dtype is torch.bfloat16 else 1e-5,
        )
    assert backward(grad, x.detach(), shape, rstd.float(), weight.detach(), [True, False])[1] is None


def test_grid_sampler():
    x, grid, grad = seeded((1, 2, 4, 4), (1, 3, 3, 2), (1, 2, 3, 3))
    leaves = [t.requires_grad_() for t in (x, grid)]
    out = F.grid_sample(*leaves, align_corners=True)
    wanted = torch.autograd.grad(out, leaves, grad)
    (found,) = COUNTERPARTS["aten::cudnn_grid_sampler"](x.detach(), grid.detach())
    assert torch.equal(found, out)
    for a, b in zip(COUNTERPARTS["aten::cudnn_grid_sampler_backward"](x, grid, grad), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("make", "mode"), [(nn.LSTM, 2), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent_networks_forward_and_backward(make, mode, packed, bias):
    torch.manual_seed(0)
    net = make(4, 6, num_layers=2, bidirectional=True, bias=bias)
    x, lengths = torch.randn(5, 3, 4), torch.tensor([5, 4, 2])
    given = nn.utils.rnn.pack_padded_sequence(x, lengths) if packed else x.clone()
    data = given.data if packed else given
    data.requires_grad_()
    states = [torch.zeros(4, 3, 6).requires_grad_() for _ in range(2 if mode == 2 else 1)]
    out, last = net(given, tuple(states) if mode == 2 else states[0])
    out, last = out.data if packed else out, last if mode == 2 else (last,)
    grads = [torch.randn(t.shape) for t in (out, *last)]
    weights = list(net.parameters())
    wanted = torch.autograd.grad((out, *last), [data, *states, *weights], grads)
    sizes = given.batch_sizes.tolist() if packed else []
    how = (mode, 6, 0, 2, False, 0.0, True, True, sizes, None)
    hx, cx = states[0].detach(), states[1].detach() if mode == 2 else None
    stride0 = 4 if bias else 2
    held = [w.detach() for w in weights]
    found = COUNTERPARTS["aten::_cudnn_rnn"](data.detach(), held, stride0, None, hx, cx, *how)
    assert len(found) == 5
    for a, b in zip(found, (out, *last), strict=False):
        torch.testing.assert_close(a, b)
    grads += [None] * (3 - len(grads))
    args = (data.detach(), held, stride0, None, hx, cx, out.detach(), *grads, *how, torch.empty(0), [True] * 4)
    grad_x, grad_hx, grad_cx, grad_w = COUNTERPARTS["aten::_cudnn_rnn_backward"](*args)
    torch.testing.assert_close(grad_x, wanted[0])
    torch.testing.assert_close(grad_hx, wanted[1])
    assert (grad_cx is None) is (mode != 2)
    for a, b in zip(grad_w, wanted[1 + len(states) :], strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def cudnn_on_sim(give_sim):
    """The simulated device has `cudnn_batch_norm`, which it computes by its own operators, as the test wants it."""
    factor = [1.0]

    def forward(x, weight, bias, mean, variance, training, momentum, eps):
        out, save_mean, save_invstd = aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
        return out * factor[0], save_mean, save_invstd, torch.empty(7, device=x.device)

    give_sim("cudnn_batch_norm", forward)
    return factor


def normed():
    x = torch.rand(4, 3, 5, 5).to("sim")
    stats = [t.to("sim") for t in (torch.rand(3), torch.rand(3), torch.zeros(3), torch.ones(3))]
    return aten.cudnn_batch_norm(x, *stats, True, 0.1, 1e-5)


@pytest.mark.parametrize("lags", [False, True])
def test_a_call_of_the_device_s_own_is_compared(clean_sim, cudnn_on_sim, lags):
    for factor, status in ((1.0, Status.MATCH), (1.001, Status.MISMATCH)):
        cudnn_on_sim[0] = factor
        with clean_sim.asynchronous() if lags else nullcontext(), shadowrun.compare("sim") as run:
            normed()
        (record,) = run.records(op="aten::cudnn_batch_norm")
        assert record.verdict.status is status, record.verdict
        if factor != 1.0:
            assert record.verdict.explanation == "scaled by 1.001"
            assert record.diffs[0].n_mismatched > 290  # but those that are almost zero


def test_on_the_cpu_it_raises_as_it_did():
    args = (torch.rand(4, 3), *torch.rand(4, 3), True, 0.1, 1e-5)
    with pytest.raises(NotImplementedError) as plain:
        aten.cudnn_batch_norm(*args)
    with shadowrun.compare("cpu[threads=1]") as run, pytest.raises(NotImplementedError) as compared:
        aten.cudnn_batch_norm(*args)
    assert str(compared.value) == str(plain.value)
    assert [r for r in run.records(op="aten::cudnn_batch_norm") if r.verdict.status is Status.UNSUPPORTED] == []


def test_what_lies_on_the_cpu_stays_there_when_a_call_is_repeated(clean_sim, give_sim):
    """Attention's backward reads the seed of its dropout on the host: a copy on the device ends the process."""
    seen = []

    def sample(x, grid):
        seen.append(grid.device.type)
        return x + 1

    give_sim("cudnn_grid_sampler", sample)
    for behind in (nullcontext, clean_sim.asynchronous):
        for ref in ("cpu", "sim[deterministic=off]"):
            with behind(), shadowrun.compare("sim", ref=ref) as run:
                aten.cudnn_grid_sampler(torch.rand(1, 1, 3, 3).to("sim"), torch.rand(1, 3, 3, 2))
            status = Status.MISMATCH if ref == "cpu" else Status.MATCH
            assert [r.verdict.status for r in run.records(op="*grid*")] == [status]
    assert len(seen) > 7
    assert set(seen) == {"cpu"}


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_what_a_kernel_keeps_for_itself_is_not_compared(clean_sim, give_sim, lags, factor):
    def attend(q, k, v, p=0.0, causal=False, mask=False, *, scale=None):
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        none = torch.empty(2, dtype=torch.int64).to("sim")
        return scores.softmax(-1) @ v * factor, scores.logsumexp(-1) + 7, none, none, 4, 4, none, none, none.double()

    give_sim("_scaled_dot_product_flash_attention", attend)
    q, k, v = (t.to("sim") for t in seeded(*[(1, 2, 4, 8)] * 3))
    with clean_sim.asynchronous() if lags else nullcontext(), shadowrun.compare("sim") as run:
        out = aten._scaled_dot_product_flash_attention(q, k, v)
    assert len(out) == 9
    (record,) = run.records(op="*flash*")
    assert record.verdict.status is (Status.MATCH if factor == 1.0 else Status.MISMATCH), record.verdict
    if factor != 1.0:
        assert [d.name for d in record.diffs] == ["output 0"]


def test_results_without_a_gradient_asked_for_may_have_any_value(give_sim):
    """Gradients that are masked out come first here: what follows is compared with its like."""

    def backward(grad, x, shape, rstd, weight, mask):
        return grad * 7, (grad * x * rstd).sum((0, 1))

    give_sim("_fused_rms_norm_backward", backward)
    x, grad, rstd, weight = (t.to("sim") for t in seeded((3, 4, 6), (3, 4, 6), (3, 4, 1), (6,)))
    with shadowrun.compare("sim") as run:
        aten._fused_rms_norm_backward(grad, x, [6], rstd, weight, [False, True])
    (record,) = run.records(op="*rms_norm*")
    assert record.verdict.status is Status.MATCH, record.verdict


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_of_16_bits_into_float32(name):
    (x,) = seeded((4, 6), dtype=torch.float16)
    forward = for_reference(make_plan(getattr(aten, name).default, 0)).run
    out = forward(x, 1, True)
    assert out.dtype is torch.float32
    assert torch.equal(out, getattr(torch, name[1:])(x.float(), 1))
    assert forward(x, 1, False).dtype is torch.float16
    backward = for_reference(make_plan(getattr(aten, f"{name}_backward_data").default, 0)).run
    grad = torch.ones(4, 6) * torch.arange(6)
    found = backward(grad, out, 1, torch.float16)
    leaf = x.float().requires_grad_()
    (wanted,) = torch.autograd.grad(getattr(torch, name[1:])(leaf, 1), leaf, grad)
    assert found.dtype is torch.float16
    torch.testing.assert_close(found, wanted.half())
    # A mutated program or autocast leaves a float32 input's dtype with a 16-bit gradient.
    assert backward(grad.bfloat16(), out.bfloat16(), 1, torch.float32).dtype is torch.bfloat16


def test_counts_of_integers():
    x = torch.tensor([0, 1, 1, 3, 3, 3], dtype=torch.int32)
    found = for_reference(make_plan(aten.histc.default, 0)).run(x, 4, 0, 3)
    assert found.dtype is torch.int32
    assert found.tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize(
    "shapes", [((8, 8), (2, 8, 16)), ((2, 8, 8), (8, 16)), ((8, 16), (16, 8)), ((2, 8, 8), (2, 8, 8))]
)
def test_grouped_products_in_float64(shapes):
    a, b = seeded(*shapes, dtype=torch.float64)
    ends = {(2, 3): 8, (3, 2): 16, (2, 2): 16}.get((a.dim(), b.dim()))
    offs = None if ends is None else torch.tensor([ends // 2, ends], dtype=torch.int32)
    run = for_reference(make_plan(aten._grouped_mm.default, 0)).run
    found = run(a, b, offs)
    assert found.dtype is torch.float64
    narrow = run(a.bfloat16(), b.bfloat16(), offs)
    torch.testing.assert_close(found, narrow.double(), rtol=0.05, atol=0.1)
