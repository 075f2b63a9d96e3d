"""Programs on a GPU are unchanged while they are compared, and nothing of theirs is reported."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shadowrun
from shadowrun import Cause, Status
from tests.models import assert_same, digits, tokens, train

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's, on what is not deterministic


def untimed(run):
    return [f for f in run.findings() if f.kind != "slow"]


def told(run):
    """What a failing test says, whole in what it printed."""
    found = [
        (r.call.op, r.call.inputs, r.verdict, r.diffs) for r in run.records(status=[Status.MISMATCH, Status.ERROR])
    ]
    for line in found:
        print(*line)
    return found


def assert_nothing_reported(run, at_least=50):
    counts = run.counts()
    assert told(run) == []
    assert untimed(run) == []
    assert counts[Status.MATCH] > at_least


@pytest.mark.parametrize("options", [{}, {"asynchronous": False}, {"drift": True}, {"budget": 1.2}], ids=str)
@pytest.mark.parametrize("make", [digits, tokens])
def test_training_is_unchanged_and_nothing_is_reported(make, options):
    plain = train(make, "cuda", steps=6)
    assert_same(train(make, "cuda", steps=6), plain)
    run = shadowrun.compare("cuda", **options)
    assert_same(train(make, "cuda", steps=6, run=run), plain)
    assert_nothing_reported(run, at_least=-1 if "budget" in options else 50)


def held():
    """Memory in use on the device, without the workspaces that torch keeps for each thread's products."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_memory_is_given_back():
    train(tokens, "cuda", steps=2)
    before = held()
    run = shadowrun.compare("cuda")
    train(tokens, "cuda", steps=3, run=run)
    del run
    assert held() == before


class Mixed(nn.Module):
    """Half precision by autocast."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Linear(16 * 16 * 16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_mixed_precision_with_a_scaler(dtype, channels_last, monkeypatch):
    # By default cuBLAS adds up the parts of a split product in 16 bits, which is reported.
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        monkeypatch.setattr(torch.backends.cuda.matmul, name, False)

    def steps(run=None):
        torch.manual_seed(0)
        model = Mixed().cuda()
        x, y = torch.randn(8, 3, 32, 32).cuda(), torch.randint(0, 10, (8,)).cuda()
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=dtype is torch.bfloat16)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        with run or contextlib.nullcontext():
            for _ in range(4):
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return [p.detach().cpu() for p in model.parameters()], scaler.state_dict()

    plain, again = steps(), steps()
    assert all(torch.equal(a, b) for a, b in zip(again[0], plain[0], strict=True))
    run = shadowrun.compare("cuda")
    weights, scaler = steps(run)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain[0], strict=True))
    assert scaler == plain[1]
    # CUDA's fused AdamW takes the betas in float32 (docs/found.md).
    wrong = [(r.call.op, r.verdict.cause) for r in run.records(status=[Status.MISMATCH, Status.ERROR])]
    assert set(wrong) <= {("aten::_fused_adamw_", Cause.IMPLEMENTATION)}, told(run)
    assert run.counts()[Status.MATCH] > 50


@pytest.mark.parametrize("allowed", [False, True])
def test_a_product_whose_parts_are_added_up_in_16_bits(allowed, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", allowed)
    torch.manual_seed(0)
    a, b = torch.rand(8, 10).sub(0.5).bfloat16().cuda(), torch.rand(10, 64).sub(0.5).bfloat16().cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        a @ b
    split = any("splitKreduce" in e.key and "int, __nv_bfloat16" in e.key for e in profile.key_averages())
    with shadowrun.compare("cuda") as run:
        a @ b
    found = [(r.call.op, r.verdict.cause) for r in run.records(status=Status.MISMATCH)]
    assert found == [("aten::mm", Cause.REDUCED_PRECISION)] * split, told(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_forward_and_backward(dtype, causal, backend, masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, 64).cuda().to(dtype).requires_grad_() for _ in range(3))
    mask = torch.randn(2, 4, 128, 128).cuda().to(dtype) if masked and not causal else None
    run = shadowrun.compare("cuda")
    torch.use_deterministic_algorithms(False)  # cuDNN's backward is not
    with run, sdpa_kernel([getattr(SDPBackend, backend)]):
        try:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        except RuntimeError as error:
            pytest.skip(str(error))
        (out.float() * torch.randn(out.shape).cuda()).sum().backward()
    assert told(run) == []
    wanted = [] if backend == "MATH" else [r.call.op for r in run.records() if "attention" in r.call.op]
    compared = [r.call.op for r in run.records(status=Status.MATCH) if "attention" in r.call.op]
    assert len(wanted) == 2 or backend == "MATH"
    assert compared == wanted, [(r.call.op, r.verdict) for r in run.records(status=Status.UNVERIFIED)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm(dtype, channels_last, training):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8).cuda().train(training)
    x = torch.randn(4, 8, 6, 6).cuda().to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    with shadowrun.compare("cuda") as run:
        # In evaluation CUDA's gradients are others indeed: of another layout, and in float16 rounded to that.
        out = norm(x.requires_grad_(training))
        if training:
            (out.float() * torch.randn(x.shape).cuda()).sum().backward()
    assert told(run) == []
    norms = {r.call.op: r.verdict.status for r in run.records() if "norm" in r.call.op}
    assert len(norms) == 1 + training
    assert set(norms.values()) == {Status.MATCH}


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]
)
def test_recurrent_networks(make, options, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    net = make(8, 16, **options).cuda()
    with shadowrun.compare("cuda") as run:
        out, _ = net(torch.randn(5, 3, 8).cuda().requires_grad_())
        (out * torch.randn(out.shape).cuda()).sum().backward()
    assert told(run) == []
    rnns = {
        r.call.op: r.verdict for r in run.records() if r.call.op in ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
    }
    assert {v.status for v in rnns.values()} == {Status.MATCH}, rnns
    assert len(rnns) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_and_samplers(dtype):
    torch.manual_seed(0)
    norm = nn.RMSNorm(64).cuda().to(dtype)
    x = torch.randn(4, 16, 64).cuda().to(dtype).requires_grad_()
    image, grid = (
        torch.randn(2, 3, 8, 8).cuda().requires_grad_(),
        (torch.rand(2, 5, 5, 2) * 2 - 1).cuda().requires_grad_(),
    )
    torch.use_deterministic_algorithms(False)
    with shadowrun.compare("cuda") as run:
        (norm(x).float() * torch.randn(x.shape).cuda()).sum().backward()
        F.grid_sample(image, grid, align_corners=True).square().sum().backward()
        F.logsigmoid(x).float().sum().backward()
        F.embedding_bag(
            torch.arange(6).cuda(), torch.randn(8, 4).cuda().requires_grad_(), torch.tensor([0, 2]).cuda()
        ).sum()
    assert told(run) == []
    assert [r.call.op for r in run.records(status=Status.UNVERIFIED) if "randn" not in r.call.op] == []


def test_dropout_draws_the_same_numbers():
    x = torch.ones(4096, device="cuda")

    def draw():
        torch.cuda.manual_seed(3)
        return (
            F.dropout(x, 0.3),
            torch.rand(5, device="cuda"),
            torch.randn(7, device="cuda"),
            torch.randperm(9, device="cuda"),
        )

    plain = draw()
    with shadowrun.compare("cuda") as run:
        compared = draw()
    assert all(torch.equal(a, b) for a, b in zip(compared, plain, strict=True))
    assert told(run) == []


@pytest.mark.parametrize("ref", ["cpu", "cuda[tf32=off]", "cuda[compute=float64]"])
def test_a_second_stream_is_not_waited_for_and_not_misread(ref):
    side = torch.cuda.Stream()
    x = torch.randn(1 << 20, device="cuda")
    with shadowrun.compare("cuda", ref=ref) as run:
        for _ in range(20):
            y = x * 2
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                z = (y + 1).tanh()
                y.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            x = z * 0.5
            del y
    assert_nothing_reported(run)


def test_a_graph_of_the_device_is_recorded_and_replayed():
    static = torch.randn(64, 64, device="cuda")
    weights = torch.randn(64, 64, device="cuda")
    warm = torch.cuda.Stream()
    with shadowrun.compare("cuda") as run:
        with torch.cuda.stream(warm):
            for _ in range(2):
                out = (static @ weights).relu()
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = (static @ weights).relu()
        static.copy_(torch.ones(64, 64, device="cuda"))
        graph.replay()
        result = out.clone()
    assert torch.equal(result, (torch.ones(64, 64, device="cuda") @ weights).relu())
    assert told(run) == []


def test_copies_between_host_and_device_without_waiting():
    host = torch.randn(1 << 16).pin_memory()
    with shadowrun.compare("cuda") as run:
        for _ in range(10):
            there = host.to("cuda", non_blocking=True)
            back = (there * 2).to("cpu", non_blocking=True)
            torch.cuda.synchronize()
            assert torch.equal(back, host * 2)
    assert told(run) == []


def test_an_operator_that_cuda_lacks_raises_as_it_did_and_is_named():
    x = torch.randn(8, 8, device="cuda").to_sparse_bsr((4, 4))
    with shadowrun.compare("cuda") as run, pytest.raises(Exception) as caught:
        torch.ops.aten.geqrf(x)
    with pytest.raises(type(caught.value)):
        torch.ops.aten.geqrf(x)
    assert run.counts()[Status.MISMATCH] == 0
