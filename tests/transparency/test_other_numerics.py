"""Real other numerics on one machine: a CPU under other instruction sets differs by rounding, and nothing is wrong.

Each platform below runs operators in a process of its own (`shadowrun.platforms.worker.main`).
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shadowrun
from shadowrun import Cause, Status
from tests.models import assert_same, digits, tokens, train

pytestmark = pytest.mark.usefixtures("forked_processes")

GREATEST = "cpu[isa=default,mkl_cbwr=COMPATIBLE,onednn_isa=SSE41,threads=1]"
# Platform, and how many operators of the table at least differ there. Some libraries take the plainest kernels on some
# processors anyway, and then nothing can differ: a processor without AVX-512 runs everything with AVX2.
WIDEST_IS_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
PLATFORMS = {
    "cpu[isa=default]": 10,
    "cpu[isa=avx2]": 0 if WIDEST_IS_AVX2 else 1,
    "cpu[onednn_isa=SSE41]": 1,
    "cpu[mkl_cbwr=COMPATIBLE]": 5,
    GREATEST: 20,
}


def rand(*shape, dtype=torch.float32, scale=1.0, grad=True):
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_(grad)


def positive(*shape):
    return (torch.rand(*shape) + 0.1).requires_grad_()


def spd(n):
    a = torch.randn(n, n)
    return (a @ a.T + n * torch.eye(n)).requires_grad_()


def labels(n, k):
    return torch.randint(0, k, (n,))


OPERATORS = {
    "mm": lambda: rand(96, 200) @ rand(200, 64),
    "bmm": lambda: torch.bmm(rand(4, 33, 70), rand(4, 70, 20)),
    "mv": lambda: torch.mv(rand(100, 300), rand(300)),
    "dot": lambda: torch.dot(rand(5000), rand(5000)),
    "linear": lambda: F.linear(rand(32, 257), rand(65, 257), rand(65)),
    "linear bf16": lambda: F.linear(
        rand(32, 257, dtype=torch.bfloat16), rand(64, 257, dtype=torch.bfloat16), rand(64, dtype=torch.bfloat16)
    ),
    "mm bf16": lambda: rand(96, 200, dtype=torch.bfloat16) @ rand(200, 64, dtype=torch.bfloat16),
    "mm f16": lambda: rand(96, 200, dtype=torch.float16) @ rand(200, 64, dtype=torch.float16),
    "mm f64": lambda: rand(64, 100, dtype=torch.float64) @ rand(100, 64, dtype=torch.float64),
    "mm complex": lambda: rand(40, 60, dtype=torch.complex64) @ rand(60, 40, dtype=torch.complex64),
    "baddbmm": lambda: torch.baddbmm(rand(4, 33, 20), rand(4, 33, 70), rand(4, 70, 20), beta=0.5, alpha=2.0),
    "conv1d": lambda: F.conv1d(rand(8, 16, 100), rand(32, 16, 5), rand(32), padding=2),
    "conv2d": lambda: F.conv2d(rand(8, 16, 20, 20), rand(32, 16, 3, 3), rand(32), padding=1),
    "conv2d 1x1": lambda: F.conv2d(rand(8, 64, 14, 14), rand(32, 64, 1, 1), rand(32)),
    "conv2d depthwise": lambda: F.conv2d(rand(8, 32, 20, 20), rand(32, 1, 3, 3), rand(32), groups=32),
    "conv2d channels last": lambda: F.conv2d(
        rand(8, 16, 20, 20).to(memory_format=torch.channels_last), rand(32, 16, 3, 3), rand(32)
    ),
    "conv2d bf16": lambda: F.conv2d(
        rand(8, 16, 20, 20, dtype=torch.bfloat16), rand(32, 16, 3, 3, dtype=torch.bfloat16), None, padding=1
    ),
    "conv3d": lambda: F.conv3d(rand(2, 8, 8, 8, 8), rand(16, 8, 3, 3, 3), rand(16)),
    "conv transposed": lambda: F.conv_transpose2d(rand(4, 16, 10, 10), rand(16, 8, 3, 3), rand(8), stride=2),
    "batch_norm": lambda: F.batch_norm(
        rand(8, 16, 10, 10), torch.zeros(16), torch.ones(16), rand(16), rand(16), training=True
    ),
    "layer_norm": lambda: F.layer_norm(rand(64, 200), (200,), rand(200), rand(200)),
    "group_norm": lambda: F.group_norm(rand(8, 16, 12, 12), 4, rand(16), rand(16)),
    "instance_norm": lambda: F.instance_norm(rand(8, 16, 12, 12), weight=rand(16), bias=rand(16)),
    "rms_norm": lambda: F.rms_norm(rand(64, 200), (200,), rand(200)),
    "softmax": lambda: F.softmax(rand(64, 300, scale=4.0), 1),
    "softmax dim 0": lambda: F.softmax(rand(300, 64, scale=4.0), 0),
    "log_softmax": lambda: F.log_softmax(rand(64, 300, scale=4.0), 1),
    "cross_entropy": lambda: F.cross_entropy(rand(64, 100), labels(64, 100)),
    "attention": lambda: F.scaled_dot_product_attention(rand(2, 4, 50, 32), rand(2, 4, 50, 32), rand(2, 4, 50, 32)),
    "attention causal bf16": lambda: F.scaled_dot_product_attention(
        *(rand(2, 4, 50, 32, dtype=torch.bfloat16) for _ in range(3)), is_causal=True
    ),
    "exp": lambda: torch.exp(rand(3000, scale=5.0)),
    "expm1": lambda: torch.expm1(rand(3000)),
    "log": lambda: torch.log(positive(3000)),
    "log1p": lambda: torch.log1p(positive(3000)),
    "sin": lambda: torch.sin(rand(3000, scale=10.0)),
    "tan": lambda: torch.tan(rand(3000)),
    "tanh": lambda: torch.tanh(rand(3000)),
    "sigmoid": lambda: torch.sigmoid(rand(3000, scale=4.0)),
    "silu": lambda: F.silu(rand(3000, scale=4.0)),
    "mish": lambda: F.mish(rand(3000, scale=2.0)),
    "softplus": lambda: F.softplus(rand(3000, scale=4.0)),
    "elu": lambda: F.elu(rand(3000)),
    "gelu": lambda: F.gelu(rand(3000, scale=2.0)),
    "gelu tanh": lambda: F.gelu(rand(3000, scale=2.0), approximate="tanh"),
    "erf": lambda: torch.erf(rand(3000)),
    "erfinv": lambda: torch.erfinv(positive(3000) * 0.8),
    "lgamma": lambda: torch.lgamma(positive(3000) * 5),
    "atan2": lambda: torch.atan2(rand(3000), rand(3000)),
    "pow": lambda: torch.pow(positive(3000), rand(3000)),
    "rsqrt": lambda: torch.rsqrt(positive(3000)),
    "sinh": lambda: torch.sinh(rand(3000)),
    "acos": lambda: torch.acos(positive(3000) * 0.8),
    "hypot": lambda: torch.hypot(rand(3000), rand(3000)),
    "logaddexp": lambda: torch.logaddexp(rand(3000), rand(3000)),
    "addcmul": lambda: torch.addcmul(rand(3000), rand(3000), rand(3000), value=0.7),
    "addcdiv": lambda: torch.addcdiv(rand(3000), rand(3000), positive(3000), value=0.7),
    "lerp": lambda: torch.lerp(rand(3000), rand(3000), 0.3),
    "add with alpha": lambda: torch.add(rand(3000), rand(3000), alpha=0.3),
    "sum": lambda: rand(300, 400).sum(),
    "sum dim": lambda: rand(300, 400).sum(0),
    "mean bf16": lambda: rand(300, 400, dtype=torch.bfloat16).mean(1),
    "prod": lambda: positive(20, 30).prod(1),
    "var": lambda: rand(300, 400).var(1),
    "norm": lambda: torch.linalg.vector_norm(rand(300, 400), dim=1),
    "cumsum": lambda: rand(100, 300).cumsum(1),
    "logsumexp": lambda: torch.logsumexp(rand(100, 300), 1),
    "cdist": lambda: torch.cdist(rand(40, 20), rand(50, 20)),
    "interpolate": lambda: F.interpolate(rand(2, 3, 20, 20), scale_factor=1.7, mode="bilinear"),
    "interpolate bicubic": lambda: F.interpolate(rand(2, 3, 20, 20), scale_factor=1.7, mode="bicubic"),
    "grid_sample": lambda: F.grid_sample(rand(2, 3, 20, 20), rand(2, 15, 15, 2), align_corners=False),
    "avg_pool2d": lambda: F.avg_pool2d(rand(4, 8, 21, 21), 3),
    "max_pool2d": lambda: F.max_pool2d(rand(4, 8, 21, 21), 3),
    "adaptive pool": lambda: F.adaptive_avg_pool2d(rand(4, 8, 21, 21), 5),
    "embedding_bag": lambda: F.embedding_bag(labels(60, 30).view(10, 6), rand(30, 20), mode="mean"),
    "lstm": lambda: nn.LSTM(20, 30, batch_first=True)(rand(8, 12, 20))[0],
    "gru": lambda: nn.GRU(20, 30, batch_first=True)(rand(8, 12, 20))[0],
    "fft": lambda: torch.fft.rfft2(rand(4, 30, 36)).abs(),
    "inv": lambda: torch.linalg.inv(spd(24)),
    "solve": lambda: torch.linalg.solve(spd(24), rand(24, 5)),
    "cholesky": lambda: torch.linalg.cholesky(spd(24)),
    "svdvals": lambda: torch.linalg.svdvals(rand(20, 30)),
    "eigvalsh": lambda: torch.linalg.eigvalsh(spd(24)),
    "qr": lambda: torch.linalg.qr(rand(30, 20))[1],
    "mse": lambda: F.mse_loss(rand(300), rand(300)),
    "huber": lambda: F.huber_loss(rand(300), rand(300)),
    "bce": lambda: F.binary_cross_entropy_with_logits(rand(300), torch.rand(300)),
    "kl_div": lambda: F.kl_div(rand(30, 20), F.softmax(rand(30, 20), 1), reduction="batchmean"),
    "ctc": lambda: F.ctc_loss(
        F.log_softmax(rand(20, 4, 10), 2), torch.randint(1, 10, (4, 6)), torch.full((4,), 20), torch.full((4,), 6)
    ),
}
MODELS = {"digits": digits, "tokens": tokens}


def program():
    """All operators of the table, forward and backward: their results and the last random number."""
    torch.manual_seed(0)
    results = {}
    for name, operator in OPERATORS.items():
        out = operator()
        results[name] = out.detach().to(torch.float32 if out.dtype is torch.bfloat16 else out.dtype, copy=True)
        (out.real.float() if out.is_complex() else out.float()).square().sum().backward()
    results["random"] = torch.rand(1)
    return results


def judge(run, at_least):
    """No false alarm, and numerics that really differ; gives the operators that do."""
    wrong = [
        (r.call.op, r.call.inputs, r.verdict)
        for r in run.records()
        if r.verdict.status in (Status.MISMATCH, Status.ERROR)
    ]
    assert wrong == []
    differing = {r.call.op for r in run.records() if r.verdict.cause is Cause.ROUNDING}
    assert len(differing) >= at_least, sorted(differing)
    reasons = {r.verdict.explanation for r in run.records() if r.verdict.status is Status.UNVERIFIED}
    assert not [r for r in reasons if "cannot" in r or "worker" in r], reasons
    return differing


@pytest.mark.parametrize("platform", PLATFORMS)
def test_operators_differ_by_rounding_only(platform):
    plain = program()
    with shadowrun.compare(platform) as run:
        seen = program()
    assert_same(seen, plain)
    judge(run, PLATFORMS[platform])


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_training_differs_by_rounding_only(platform, make):
    plain = train(make, steps=3)
    run = shadowrun.compare(platform)
    assert_same(train(make, steps=3, run=run), plain)
    judge(run, 3 if platform == GREATEST else 0)


def test_such_a_platform_can_be_the_reference():
    plain = train(digits, steps=2)
    run = shadowrun.compare("cpu", ref="cpu[isa=default]", drift=True)
    assert_same(train(digits, steps=2, run=run), plain)
    judge(run, 3)
    assert max(r.drift_rel for r in run.records()) > 0


def test_both_platforms_can_have_a_process():
    with shadowrun.compare("cpu[isa=default]", ref="cpu[isa=avx2]") as run:
        F.softmax(torch.randn(64, 300), 1)
    judge(run, 1)
