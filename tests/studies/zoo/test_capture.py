import warnings

import pytest
import torch
from torch import nn

from shadowrun.platforms.torchplatform import set_mkldnn_enabled
from shadowrun.studies.zoo.capture import NotCapturable, Recorder, capture, fill_with_generated, named_tensors
from shadowrun.studies.zoo.graph import DEVICE, Fill, Graph, Input, Node, Ref, Runner
from shadowrun.studies.zoo.infer_fill import fitted
from shadowrun.studies.zoo.input_values import make_input, make_inputs

aten = torch.ops.aten
INF = float("inf")


def names(graph):
    return [node.name for node in graph.nodes]


def same_as_recorded(function, *args):
    """Whether the graph gives the bits that the function gave while it was recorded."""
    recorder = Recorder(fill_with_generated(named_tensors(function, args)))
    with recorder:
        out = function(*args)
    flat = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]
    graph = recorder.graph(flat)
    set_mkldnn_enabled(False)
    try:
        again = Runner(graph)(make_inputs(graph.inputs))
    finally:
        set_mkldnn_enabled(True)
    return all(torch.equal(a, b) for a, b in zip(flat, again, strict=True))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), (2, 5, 16)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)), (2, 3, 8, 8)),
        (nn.Linear(6, 3), (4, 6)),
    ],
)
def test_a_module_gives_the_same_bits_as_its_graph(module, shape):
    assert same_as_recorded(module, torch.randn(shape))


def test_inputs_have_the_names_of_the_module_and_calls_their_module():
    net = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    graph = capture(net, torch.randn(4, 6))
    assert [(i.name, i.role, i.requires_grad) for i in graph.inputs] == [
        ("0.weight", "parameter", True),
        ("0.bias", "parameter", True),
        ("args.0", "input", True),
    ]
    assert [(n.name, n.module) for n in graph.nodes] == [("aten::t", "0"), ("aten::addmm", "0"), ("aten::tanh", "1")]


def test_views_writes_and_shared_memory_are_the_programs():
    def program(x):
        y = x * 2
        y[0] = 7
        y.view(-1)[3:5].add_(1)
        return y.t() + y.data.t()

    assert same_as_recorded(program, torch.randn(4, 4))


def test_a_tensor_on_the_memory_of_an_input_is_a_view_of_it():
    x = torch.randn(4, 6)

    def program(part, whole):
        part.mul_(2)
        return whole + 1

    graph = capture(program, x[:, 2:], x)
    assert names(graph) == ["aten::as_strided", "aten::mul_.Tensor", "aten::add.Tensor"]
    (out,) = Runner(graph)([torch.ones(4, 6)])
    assert torch.equal(out, torch.tensor([2.0, 2, 3, 3, 3, 3]).expand(4, 6))


def test_gradients_flow_where_the_program_has_them_and_not_behind_a_detach():
    def program(x, w):
        y = (x @ w).relu()
        return y * y.detach()

    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    graph = capture(program, x, w)
    assert names(graph).count("aten::detach") == 1
    inputs = [make_input(i).requires_grad_() for i in graph.inputs]
    Runner(graph)(inputs)[0].sum().backward()
    a, b = (make_input(i).requires_grad_() for i in graph.inputs)
    program(a, b).sum().backward()
    assert torch.equal(inputs[1].grad, b.grad)


def test_what_is_drawn_becomes_an_input():
    def program(x):
        noise = torch.rand(4)
        torch.nn.init.normal_(x, 1.0)
        return nn.functional.dropout(x + noise, 0.5)

    graph = capture(program, torch.zeros(4))
    assert {i.name: i.fill.kind for i in graph.inputs if i.name.startswith("random")}.keys() >= {"random.0", "random.1"}
    assert not any(torch.Tag.nondeterministic_seeded in n.op.tags for n in graph.nodes)
    inputs = make_inputs(graph.inputs)
    one, other = (Runner(graph)([t.clone() for t in inputs]) for _ in range(2))
    assert torch.equal(one[0], other[0])


def test_operators_of_one_backend_become_those_that_programs_call():
    q = torch.randn(1, 2, 4, 8)
    graph = capture(lambda q: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    assert names(graph) == ["aten::scaled_dot_product_attention"]
    lstm = nn.LSTM(4, 4)
    assert not any("mkldnn" in n for n in names(capture(lstm, torch.randn(3, 2, 4))))


def test_a_device_becomes_that_of_the_run_and_nothing_is_uninitialised():
    graph = capture(lambda x: x + torch.arange(3) + torch.empty(3).fill_(1), torch.zeros(3))
    assert "aten::empty.memory_format" not in names(graph)
    assert [dict(n.kwargs)["device"] for n in graph.nodes if dict(n.kwargs)] == [DEVICE] * 2


def test_what_no_graph_can_hold_is_refused_with_the_reason():
    sparse = torch.eye(3).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotCapturable, match="sparse"):
            capture(lambda x: torch.mm(sparse, x), torch.eye(3))
    with pytest.raises(NotCapturable, match="none of its results"):
        capture(lambda x: x, torch.eye(3))


def test_an_exception_of_the_program_is_its_own_and_modules_are_left_as_they_were():
    net = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        capture(net, torch.randn(2, 5))
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize(
    ("t", "fill"),
    [
        (torch.ones(3), Fill("constant", 1.0)),
        (torch.arange(2, 9, 2), Fill("arange", 2.0, 2.0)),
        (torch.tensor([2, 0, 1]), Fill("permutation")),
        (torch.tensor([5, 9, 7, 7]), Fill("integers", 1.0, 9.0)),
        (torch.ones(4, 4).tril(), Fill("triangle", 1.0, 0.0)),
        (torch.full((3, 3), -INF).triu(1), Fill("triangle", 0.0, -INF)),
        (torch.tensor([0.0, -INF, 0.0]), Fill("choice", -INF, 0.0)),
        (torch.tensor([True, False, True, True]), Fill("bools", 0.75)),
        (torch.tensor([0.3, 0.7, 0.9]), Fill("uniform", 0.25, 1.0)),
        (torch.tensor([1e38, 3e38, 2e38]), Fill("uniform", 2.0**126, torch.finfo(torch.float32).max)),
        (torch.tensor([-1.0, 1.1, -0.9, 1.0]), Fill("normal", 0.0, 1.0)),
        (torch.empty(0), Fill("constant", 0.0)),
    ],
)
def test_fills_are_fitted_to_what_was_seen(t, fill):
    assert fitted(t) == fill
    made = make_input(Input("x", tuple(t.shape), t.dtype, fill))
    if fill.kind in ("constant", "arange", "triangle"):
        assert torch.equal(made, t)
    assert torch.isfinite(made[torch.isfinite(made)]).all()


def test_dead_calls_and_the_order_of_results():
    def program(x):
        x.cos()
        return {"b": x.sin(), "a": [x.exp(), 3]}

    graph = capture(program, torch.randn(3))
    assert graph == Graph(
        (Input("args.0", (3,), fill=graph.inputs[0].fill, requires_grad=True),),
        (Node(aten.sin.default, (Ref(-1),)), Node(aten.exp.default, (Ref(-1),))),
        (Ref(0), Ref(1)),
    )


def test_a_view_is_a_reshape_that_other_strides_do_not_refuse():
    # Attention's output has other strides on another device.
    graph = capture(lambda x: x.view(6), torch.ones(2, 3))
    (out,) = Runner(graph)([torch.arange(6.0).reshape(3, 2).t()])
    assert out.tolist() == [0, 2, 4, 1, 3, 5]
    assert [n.name for n in capture(lambda x: x.view(torch.int32), torch.ones(2)).nodes] == ["aten::view.dtype"]
