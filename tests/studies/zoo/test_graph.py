import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowrun.studies.zoo.graph import DEVICE, Fill, Graph, Input, Node, Ref, Runner, from_json, to_json
from shadowrun.studies.zoo.input_values import EXCEPTIONAL, make_input, make_inputs

aten = torch.ops.aten
X, W = Input("x", (2, 3)), Input("w", (3, 4), role="parameter", requires_grad=True)
GOLDEN = ["-0x1.c81f820000000p-2", "-0x1.24c6e00000000p+0", "0x1.24d53a0000000p-1", "0x1.1dd56a0000000p+0"]
MM, RELU, ADD = aten.mm.default, aten.relu.default, aten.add.Tensor
MLP = Graph((X, W), (Node(MM, (Ref(-1), Ref(-2)), module="net.0"), Node(RELU, (Ref(0),))), (Ref(1),))


def test_a_graph_runs_as_its_calls_do():
    x, w = make_inputs(MLP.inputs)
    (out,) = Runner(MLP)([x, w])
    assert torch.equal(out, torch.relu(x @ w))


def test_lists_several_results_and_the_device_of_the_run():
    nodes = (
        Node(aten.split.Tensor, (Ref(-1), 1, 1)),
        Node(aten.cat.default, ((Ref(0, 2), Ref(0, 0)), 1)),
        Node(aten.arange.default, (2,), (("device", DEVICE),)),
        Node(ADD, (Ref(1), Ref(2)), (("alpha", 2),)),
    )
    graph = Graph((X,), nodes, (Ref(3),))
    (x,) = make_inputs(graph.inputs)
    (out,) = Runner(from_json(json.loads(json.dumps(to_json(graph)))))([x])
    assert torch.equal(out, torch.cat([x[:, 2:], x[:, :1]], 1) + 2 * torch.arange(2))


def test_gradients_flow():
    x, w = make_inputs(MLP.inputs)
    w.requires_grad_()
    Runner(MLP)([x, w])[0].sum().backward()
    assert w.grad is not None


def test_json_holds_all_of_a_graph():
    assert from_json(json.loads(json.dumps(to_json(MLP)))) == MLP


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g[1][0].__setitem__(0, "aten::from_file"),
        lambda g: g[1][0].__setitem__(0, "os::system"),
        lambda g: g[1][0].__setitem__(0, "aten::no_such"),
        lambda g: g[1][0][1].__setitem__(0, {"ref": [1, 0]}),
        lambda g: g[1][0][1].__setitem__(0, {"ref": [-9, 0]}),
        lambda g: g[1][0][1].__setitem__(0, {"eval": "1"}),
        lambda g: g[1][0][1].__setitem__(0, "/etc/passwd"),
        lambda g: g[0][0].__setitem__(1, [1 << 40]),
        lambda g: g[0][0].__setitem__(1, [-1]),
        lambda g: g[0][0].__setitem__(2, "Tensor"),
        lambda g: g[0][0].__setitem__(4, [1 << 28, 1]),
        lambda g: g.pop(),
        lambda g: g[1].clear(),
    ],
)
def test_a_hostile_graph_is_refused(change):
    data = json.loads(json.dumps(to_json(MLP)))
    change(data)
    with pytest.raises(ValueError, match=r"."):
        from_json(data)


def test_a_graph_that_nests_too_deep_is_refused():
    data = json.loads(json.dumps(to_json(MLP)))
    deep = []
    for _ in range(100_000):
        deep = [deep]
    data[1][0][1][0] = deep
    with pytest.raises(ValueError, match="not a graph"):
        from_json(data)


def test_identity_leaves_out_names_modules_and_the_order_of_independent_calls():
    renamed = Graph((Input("y", (2, 3)), W), MLP.nodes, MLP.outputs)
    assert renamed.identity() == MLP.identity()
    a, b = Node(RELU, (Ref(-1),)), Node(aten.neg.default, (Ref(-1),))
    one = Graph((X,), (a, b, Node(ADD, (Ref(0), Ref(1)))), (Ref(2),))
    other = Graph((X,), (b, a, Node(ADD, (Ref(1), Ref(0)))), (Ref(2),))
    assert one.identity() == other.identity()


@pytest.mark.parametrize(
    "other",
    [
        Graph((X, Input("w", (3, 5), role="parameter", requires_grad=True)), MLP.nodes, MLP.outputs),
        Graph((X, Input("w", (3, 4), torch.float64, requires_grad=True)), MLP.nodes, MLP.outputs),
        Graph((X, Input("w", (3, 4), strides=(1, 3), requires_grad=True)), MLP.nodes, MLP.outputs),
        Graph((X, Input("w", (3, 4), fill=Fill("nan"), requires_grad=True)), MLP.nodes, MLP.outputs),
        Graph((X, W), (MLP.nodes[0], Node(aten.tanh.default, (Ref(0),))), MLP.outputs),
        Graph((X, W), MLP.nodes, (Ref(0), Ref(1))),
    ],
)
def test_identity_tells_graphs_apart(other):
    assert other.identity() != MLP.identity()


def test_the_order_of_writes_counts():
    add_, mul_ = aten.add_.Scalar, aten.mul_.Scalar
    one = Graph((X,), (Node(add_, (Ref(-1), 1)), Node(mul_, (Ref(-1), 2))), (Ref(-1),))
    other = Graph((X,), one.nodes[::-1], one.outputs)
    assert one.identity() != other.identity()
    assert len(one.without_dead_code().nodes) == 2


def test_dead_code_goes():
    graph = Graph((X, W), (*MLP.nodes, Node(aten.neg.default, (Ref(0),))), MLP.outputs)
    assert graph.without_dead_code() == MLP
    assert graph.identity() == MLP.identity()


def test_values_are_the_same_everywhere():
    # Golden bits: computed once; every machine, ISA and version of torch must give them.
    x = make_input(Input("x", (4,)), 7)
    assert [v.hex() for v in x.double().tolist()] == GOLDEN
    assert make_input(Input("i", (5,), torch.int64, Fill("integers", 0, 9))).tolist() == [8, 8, 5, 6, 6]


@given(st.sampled_from(["normal", "uniform", *EXCEPTIONAL]), st.integers(0, 3), st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_values_depend_on_name_and_seed_only(kind, n_dims, seed):
    one = Input("x", (3,) * n_dims, fill=Fill(kind))
    assert torch.equal(make_input(one, seed).nan_to_num(9), make_input(copy.copy(one), seed).nan_to_num(9))
    transposed = Input("x", (3,) * n_dims, fill=Fill(kind), strides=tuple(3**k for k in range(n_dims)), offset=2)
    laid = make_input(transposed, seed)
    assert torch.equal(make_input(one, seed).nan_to_num(9), laid.nan_to_num(9))
    assert laid.storage_offset() == 2


def test_normal_values_are_roughly_normal():
    x = make_input(Input("big", (100_000,), torch.float64, Fill("normal", 1.0, 2.0)))
    assert abs(x.mean() - 1) < 0.03
    assert abs(x.std() - 2) < 0.03


def test_expanded_inputs_have_one_element_in_several_places():
    x = make_input(Input("x", (3, 4), strides=(0, 1)))
    assert torch.equal(x[0], x[1])
    assert x.stride() == (0, 1)


def test_exceptional_values_are_there():
    for kind, test in (("nan", torch.isnan), ("infinities", torch.isinf), ("largest", lambda t: t.abs() > 1e38)):
        assert test(make_input(Input("x", (100,), fill=Fill(kind)))).any(), kind
    tiny = make_input(Input("x", (100,), fill=Fill("subnormals")))
    assert ((tiny != 0) & (tiny.abs() < torch.finfo(torch.float32).smallest_normal)).any()


def test_an_unknown_kind_of_values_is_named():
    with pytest.raises(ValueError, match="unknown kind 'zipf'"):
        make_input(Input("x", (1,), fill=Fill("zipf")))
