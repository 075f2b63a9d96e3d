"""Regions of Inductor in the ways in which programs compile: compared, and nothing is compiled anew.

A compilation takes 7 to 30 s where its C++ is not cached, so all that can be seen in one program is; the rest is slow.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from torch.nn import functional as F

from shadowrun import Status
from shadowrun.compiled.regions import inductor_rng, torchregions
from tests.compiled.models import make
from tests.compiled.regions import CODE, Small, compare

# Dynamo itself asks for it where a graph breaks on a tensor that needs a gradient.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
MATCH, MISMATCH, UNVERIFIED = Status.MATCH, Status.MISMATCH, Status.UNVERIFIED


@pytest.fixture(autouse=True, scope="module")
def _caches(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def statuses(run):
    return [(str(r.phase), r.status) for r in sorted(run.regions().rows, key=lambda r: r.name)]


def n_frames():
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_where_torch_keeps_no_graphs_ours_are_kept(monkeypatch):
    """As torch 2.11 does; and what is compiled inside goes on outside."""
    monkeypatch.delattr(CompiledFxGraph, "_original_gm", raising=False)
    kept = []
    monkeypatch.setattr(torchregions, "CodeOfGraph", lambda code, graph: kept.append(graph) or CODE(code, graph))
    x = torch.randn(40) - 0.5
    compiled = torch.compile(lambda x: (x * 2).relu() + 1)
    with config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}), compare() as run:
        out = compiled(x)
    assert torch.equal(out, compiled(x))
    assert not torch.equal(out, (x * 2).relu() + 1)
    (row,) = run.regions().rows
    assert (row.status, row.n_operators, run.internal_failures()) == (MISMATCH, 3, [])
    assert [len(graph.graph.nodes) for graph in kept] == [5]
    with compare() as later:
        compiled(x)
    assert statuses(later) == [("forward", MISMATCH)]


class Dropped(nn.Module):
    """Draws, writes to a buffer, and has a graph break."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x):
        self.n_calls += 1
        h = F.dropout(self.inner(x), 0.5)
        torch._dynamo.graph_break()
        return (h * torch.rand_like(h)).relu().sum()


def test_draws_buffers_and_graph_breaks_match_and_nothing_is_compiled_anew():
    model, x = Dropped(), torch.randn(4, 6)
    compiled = torch.compile(model)
    with compare() as run:
        for _ in range(2):
            compiled(x).backward()
        inside = n_frames()
    assert inside == 2
    assert statuses(run) == [("forward", MATCH)] * 2 + [("backward", MATCH)] * 2
    assert run.regions().line == "4 compiled regions: 4 match"
    assert {r.n_calls for r in run.regions().rows} == {2}
    assert run.regions().skipped == ()
    assert all("test_regions_inductor.py" in r.site and r.backend == "inductor" for r in run.regions().rows)
    assert min(r.n_operators for r in run.regions().rows) > 2
    assert model.n_calls == 2  # each call wrote once
    # After the block: still compiled, and with the draws of a program that never was compared.
    torch.manual_seed(1)
    after, after_draw = compiled(x), torch.rand(1)
    assert n_frames() == inside
    torch.manual_seed(1)
    with compare():
        again, again_draw = compiled(x), torch.rand(1)
    assert torch.equal(after, again)
    assert torch.equal(after_draw, again_draw)
    assert n_frames() == inside
    # The masks are the very ones: with others, this would be found.
    original = inductor_rng.philox
    inductor_rng.philox = lambda seed, n: original(seed + 1, n)
    try:
        with compare() as other:
            compiled(x).backward()
    finally:
        inductor_rng.philox = original
    assert dict(statuses(other))["forward"] is MISMATCH


def test_philox_is_that_of_the_paper():
    # Known answer of Random123 for philox4x32-10 with key and counter 0 (kat_vectors).
    assert [int(w[0]) for w in inductor_rng.philox(0, 1)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.slow
def test_a_fault_of_a_pass_in_the_backward_only_is_seen():
    def spoil(graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten.mul.Tensor and "tangents_1" in str(graph):
                node.replace_all_uses_with(node.args[0])

    model, x = torch.compile(Small()), torch.randn(3, 4)
    with config.patch(post_grad_custom_pre_pass=_Pass(spoil)), compare() as run:
        model(x).sum().backward()
    with compare() as later:
        model(x).sum().backward()
    assert statuses(run) == statuses(later) == [("forward", MATCH), ("backward", MISMATCH)]


class _Pass:
    def __init__(self, change):
        self._change = change

    def __call__(self, graph):
        self._change(graph)

    def uuid(self):
        return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.11's tuning uses it
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes(mode):
    model, x = torch.compile(Small(), mode=mode), torch.randn(3, 4)
    with compare() as run:
        for _ in range(2):
            model(x).sum().backward()
    assert statuses(run) == [("forward", MATCH), ("backward", MATCH)]


@pytest.mark.slow
@pytest.mark.parametrize("marked", [True, False])
def test_dynamic_sizes(marked):
    compiled = torch.compile(Small(), fullgraph=True)
    with compare() as run:
        for n in (3, 5, 7, 9):
            x = torch.randn(n, 4)
            if marked:
                torch._dynamo.mark_dynamic(x, 0)
            compiled(x).sum().backward()
    assert n_frames() == (1 if marked else 2)  # not marked: the second size compiles anew, for all
    assert {status for _, status in statuses(run)} == {MATCH}
    assert sum(r.n_calls for r in run.regions().rows) == 8


@pytest.mark.slow
def test_recompiles_are_regions_of_their_own():
    compiled = torch.compile(lambda x, k: (x * k).sin() + k, dynamic=False)
    with compare() as run:
        for k in (2, 3, 2):
            compiled(torch.randn(5), k)
    assert n_frames() == 2
    assert [(r.n_calls, r.status) for r in sorted(run.regions().rows, key=lambda r: r.name)] == [(2, MATCH), (1, MATCH)]


@pytest.mark.slow
def test_nested_compile():
    inner = torch.compile(lambda x: x.sin() * 2)

    @torch.compile
    def outer(x):
        y = x.cos() + 1
        torch._dynamo.graph_break()
        return inner(y) + inner(x)

    with compare() as run:
        outer(torch.randn(6))
    assert {status for _, status in statuses(run)} == {MATCH}
    assert 2 <= len(run.regions().rows) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_compiled_optimizer(kind):
    model, x = Small(), torch.randn(3, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step)
    with compare() as run:
        for _ in range(3):
            model(x).sum().backward()
            step()
            optimizer.zero_grad()
    rows = run.regions().rows
    assert rows
    assert {r.status for r in rows} == {MATCH}
    assert {str(r.phase) for r in rows} == {"optimizer"}


@pytest.mark.slow
def test_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    compiled = torch.compile(flex_attention)
    alone = compiled(q, k, v)
    torch._dynamo.reset()
    with compare() as run:
        out = torch.compile(flex_attention)(q, k, v)
    assert torch.equal(out, alone)
    assert statuses(run) == [("forward", MATCH)]


@pytest.mark.slow
def test_what_is_drawn_in_other_ways_is_no_fault():
    compiled = torch.compile(lambda x: (torch.bernoulli(x) + torch.randn_like(x) + torch.randint(0, 9, x.shape)).sum())
    with compare() as run:
        for _ in range(3):
            compiled(torch.full((40, 3), 0.5))
    (row,) = run.regions().rows
    assert row.status in (MATCH, UNVERIFIED)


@pytest.mark.slow
def test_half_precision_is_nearer_the_truth_and_said_so():
    torch.manual_seed(0)
    compiled = torch.compile(lambda x: (x.exp() * 1.1 - x).sin().exp() * x)
    with compare() as run:
        compiled(torch.randn(4000).to(torch.bfloat16))
    (row,) = run.regions().rows
    assert (row.status, row.explanation) == (MATCH, "nearer the truth than eager")
    assert "nearer the truth than eager" in run.gate().line or "1 match" in run.gate().line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["perceptron", "convolutional", "transformer", "gated"])
def test_models_that_train_raise_no_false_alarm(name):
    model, x = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compiled = torch.compile(model, fullgraph=True)
    with compare() as run:
        for _ in range(4):
            compiled(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert statuses(run) == [("forward", MATCH), ("backward", MATCH)]
    assert {r.n_calls for r in run.regions().rows} == {4}
    assert run.gate().passed
