"""`compare(compiled=True)`: Dynamo's graphs before any decomposition, forward and backward together."""

import contextlib

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from shadowrun import Status
from shadowrun.compiled.dynamo_graph import DynamoGraphRun
from tests.compiled.backends import opaque, split
from tests.compiled.regions import compare
from tests.compiled.test_dynamo_graph import other_joint_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
aten = torch.ops.aten
MATCH, MISMATCH = Status.MATCH, Status.MISMATCH


def compiled(module, inputs):
    return make_boxed_func(opaque(module, inputs))


def decomposed(op, function, **options):
    """A backend on AOT autograd that computes one operator by a function of its own."""
    return aot_autograd(fw_compiler=compiled, bw_compiler=compiled, decompositions={op: function}, **options)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, tokens):
        return torch.tanh(self.head(F.gelu(self.norm(self.embed(tokens))))).softmax(-1)


def lost_duplicates(grad, indices, n, padding, scale):
    out = grad.new_zeros(n, grad.shape[-1])
    return out.index_put((indices.reshape(-1),), grad.reshape(-1, grad.shape[-1]))


WRONG = {
    "gelu": (aten.gelu.default, lambda x, approximate="none": x * torch.sigmoid(1.702 * x)),
    "layer norm without epsilon": (
        aten.native_layer_norm.default,
        lambda x, shape, w, b, eps: (
            (x - x.mean(-1, True)) * (x.var(-1, correction=0, keepdim=True) + 1e-2).rsqrt() * w + b,
            x.mean(-1, True),
            (x.var(-1, correction=0, keepdim=True) + 1e-2).rsqrt(),
        ),
    ),
    "softmax": (aten._softmax.default, lambda x, dim, half: x.exp() / (x.exp().sum(dim, keepdim=True) + 0.01)),
    "embedding backward": (aten.embedding_dense_backward.default, lost_duplicates),
    "tanh backward": (aten.tanh_backward.default, lambda g, y: g * (1 - y)),
}


def train(backend, steps=3):
    model = torch.compile(Net(), backend=backend)
    with compare() as run:
        for _ in range(steps):
            model(torch.tensor([[1, 4, 4, 2], [4, 0, 6, 1]])).square().sum().backward()
    return run


def rows(run):
    return [(r.name, str(r.phase), r.n_calls, r.status) for r in sorted(run.regions().rows, key=lambda r: r.name)]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_decomposition_is_found(name):
    run = train(decomposed(*WRONG[name]))
    regions = rows(run)
    assert [status for *_, status in regions] == [MATCH, MATCH, MISMATCH]
    assert regions[-1][2] == 2  # the first calls
    (record, _) = run.records(status="mismatch")
    assert "decompositions" in record.verdict.explanation
    assert not run.gate().passed


def test_a_wrong_joint_graph_is_found():
    backend = aot_autograd(fw_compiler=compiled, bw_compiler=compiled, partition_fn=other_joint_graph)
    assert [status for *_, status in rows(train(backend))] == [MATCH, MATCH, MISMATCH]


def test_a_right_one_is_told_nothing_of():
    tanh = (aten.tanh_backward.default, lambda g, y: g * (1 - y * y))
    for backend in (split(), decomposed(*tanh)):
        torch._dynamo.reset()
        run = train(backend)
        assert [status for *_, status in rows(run)] == [MATCH, MATCH]
        assert run.regions().skipped == ()
        assert run.internal_failures() == []


def test_the_program_gets_what_it_would_have_got():
    def gradients(block):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, drawn = Net(), []
        dropped = torch.compile(lambda t: F.dropout(model(t), 0.5), backend=split())
        with block:
            for _ in range(3):
                dropped(torch.tensor([[1, 4], [4, 0]])).square().sum().backward()
                drawn.append(torch.rand(1))
        return [p.grad for p in model.parameters()] + drawn

    ours, plain = gradients(compare()), gradients(contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_hooks_of_the_users_are_told_of_nothing_more():
    def count(block):
        torch._dynamo.reset()
        packed = []
        model = torch.compile(Net(), backend=split())
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
        with block as run, hooks:
            model(torch.tensor([[1, 4], [4, 0]])).sum().backward()
        return len(packed), run

    (ours, run), (plain, _) = count(compare()), count(contextlib.nullcontext())
    assert ours == plain
    assert [(s.reason, s.n) for s in run.regions().skipped] == [
        ("decompositions not compared: hooks on saved tensors", 1)
    ]


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return F.dropout(torch.tanh(self.inner(x)), 0.25) * torch.rand_like(x)


@contextlib.contextmanager
def planted(op, function):
    """Inductor with another decomposition."""
    from torch._inductor import decomposition

    tables = [decomposition.decompositions, decomposition.extra_random_decomps]
    before = [dict(t) for t in tables]
    for table in tables:
        if op in table:
            table[op] = function
    decomposition.fast_random_decomps.cache_clear()
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.update(kept)
        decomposition.fast_random_decomps.cache_clear()


def other_scale(x, p, train):
    mask = torch.rand_like(x, dtype=torch.float32) > p
    return x * mask * p, mask


@pytest.mark.parametrize("wrong", [False, True])
def test_inductors_dropout_is_judged_by_what_it_drew(wrong, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    block = planted(aten.native_dropout.default, other_scale) if wrong else contextlib.nullcontext()
    with block, compare() as run:
        model = torch.compile(Dropped())
        for _ in range(2):
            model(torch.randn(4, 6)).sum().backward()
    found = [status for *_, status in rows(run)]
    assert found == [MATCH, MATCH, *([MISMATCH] if wrong else [])]
    assert run.regions().skipped == ()


def test_a_mask_that_rounding_decides_is_known_to_be_one():
    """0.09995 in bfloat16 is 0.1001: more than 0.1 in float32, and as much in bfloat16; so is 0.1003."""
    graph = fx.Graph()
    graph.output((graph.call_function(F.dropout, (graph.placeholder("x"), 0.1, True)),))
    x, module = torch.ones(2, 2).bfloat16(), fx.GraphModule(nn.Module(), graph)
    for number, is_tie in ((0.5, False), (0.09995, True), (0.1003, True)):
        whole = DynamoGraphRun(module, [x])
        assert whole.use_random_numbers([torch.tensor([[0.05, 0.7], [0.3, number]])])
        assert whole.has_ties is is_tie
