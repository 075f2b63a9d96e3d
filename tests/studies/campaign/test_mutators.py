"""Each mutator makes what it says, and nothing that torch leaves undefined."""

import json

import pytest
import torch

from shadowrun.studies.campaign.mutators import ALL, FAMILIES, MUTATORS
from shadowrun.studies.campaign.mutators.sizes import regrouped
from shadowrun.studies.campaign.variants import tracing
from shadowrun.studies.campaign.variants.counter_rng import CounterRng
from shadowrun.studies.campaign.variants.program_draft import Library
from shadowrun.studies.campaign.variants.recipe import Mutation, Recipe
from shadowrun.studies.campaign.variants.tracing import Invalid
from shadowrun.studies.campaign.variants.variant import build, run
from shadowrun.studies.zoo.graph import Fill, Graph, Input, Node, Ref, Runner
from shadowrun.studies.zoo.input_values import make_input, make_inputs
from tests.studies.campaign.programs import BY_ID, CONV, EMBEDDING, MLP, POINTWISE, PROGRAMS, Program

aten = torch.ops.aten
MLP_ID, CONV_ID, EMBEDDING_ID, POINTWISE_ID = (p.id for p in PROGRAMS)
LIBRARY = Library(BY_ID)


def made(program, *mutations):
    return build(Recipe(program, tuple(Mutation(name, params) for name, *params in mutations)), LIBRARY)


EDGES = Graph(
    (Input("x", (3, 4)), Input("y", (4, 4)), Input("w", (4, 4))),
    (Node(aten.exp.default, (Ref(-1),)), Node(aten.addmm.default, (Ref(-2), Ref(-3), Ref(-3)), (("beta", 0.5),))),
    (Ref(0), Ref(1)),
)


def results(graph, seed=0):
    return Runner(graph)(make_inputs(graph.inputs, seed))


def names(graph):
    return [n.name.removeprefix("aten::") for n in graph.nodes]


def refused(mutation, program=MLP_ID, match="."):
    with pytest.raises(Invalid, match=match):
        made(program, mutation)


@pytest.mark.parametrize("name", MUTATORS)
def test_every_mutator_finds_something_that_runs(name):
    mutator, found = MUTATORS[name], 0
    library = Library({**BY_ID, "bn": Program("bn", BATCH_NORM), "edges": Program("edges", EDGES)})
    for number in range(72):
        draft = library.draft(library.ids[number % 6])
        params = mutator.propose(draft, CounterRng(name, number))
        if params is None:
            continue
        assert json.loads(json.dumps(Recipe("0", (Mutation(name, params),)).to_json())), name
        try:
            after = mutator.apply(draft, params)
            _ = after.trace
        except Invalid:
            continue
        assert after.graph != draft.graph or after.execution != draft.execution, params
        found += 1
    assert found >= 8, (name, found)


def test_all_leaves_out_the_compiler_alone():
    assert set(MUTATORS) - set(ALL) == {"compile"}
    assert {m.family for m in MUTATORS.values()} == set(FAMILIES)


# Structure


def test_a_layer_is_inserted_with_its_weights():
    variant = made(MLP_ID, ("insert-layer", 1, 0, "linear", 3))
    assert len(variant.graph.inputs) > len(MLP.inputs)
    assert [t.shape for t in results(variant.graph)] == [t.shape for t in results(MLP)]


def test_a_removed_call_is_gone_and_its_weights_too():
    variant = made(MLP_ID, ("remove", 0, 1))
    assert "addmm" not in names(variant.graph)
    assert [i.name for i in variant.graph.inputs] == ["x"]


def test_swapped_calls_and_arguments():
    graph = made(MLP_ID, ("swap", 2, 0)).graph
    assert names(graph)[:3] == ["addmm", "native_layer_norm", "gelu"]
    assert made(POINTWISE_ID, ("swap", 0, -1)).graph.nodes[0].args == (Ref(-2), Ref(-1))


def test_an_operator_of_the_same_signature_takes_a_place():
    graph = made(MLP_ID, ("replace", 6, "amax")).graph
    assert names(graph)[-1] == "amax"
    refused(("replace", 6, "gelu"), match="does not take the place")


def test_a_program_is_grafted_behind_a_value():
    variant = made(CONV_ID, ("graft", 1, 0, POINTWISE_ID, 0, 0))
    assert "sigmoid" in names(variant.graph)
    assert [t.shape for t in results(variant.graph)] == [(2, 5)]
    assert "clamp" in names(variant.graph)


def test_weights_are_negated():
    (before,), (after,) = results(CONV), results(made(CONV_ID, ("weights", 3, "negated")).graph)
    assert torch.equal(before, -after)


def test_values_end_right_below_the_last_finite_result():
    draft = Library({"edges": Program("edges", EDGES)}).draft("edges")
    found = {MUTATORS["edge"].propose(draft, CounterRng(n)) for n in range(20)} - {None}
    assert found == {(0, 0.99 * 88.6875, 88.6875)}  # exp(88.72) is the last: of the numbers that are tried, it is this
    x = results(MUTATORS["edge"].apply(draft, found.pop()).graph)[0]
    assert x.isfinite().all()
    assert x.max() > 1e38
    for params in ((0, 1, 2.0), (0, 2.0, 1.0), (0, 0.0, float("inf")), (3, 1.0, 2.0)):
        with pytest.raises(Invalid):
            MUTATORS["edge"].apply(draft, params)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_edge_of_a_dtype(dtype):
    graph = Graph((Input("x", (3, 4), dtype),), (Node(aten.exp.default, (Ref(-1),)),), (Ref(0),))
    draft = Library({"exp": Program("exp", graph)}).draft("exp")
    (found,) = {MUTATORS["edge"].propose(draft, CounterRng(n)) for n in range(20)} - {None}
    (x,) = results(MUTATORS["edge"].apply(draft, found).graph)
    assert x.isfinite().all()
    assert x.max() > torch.finfo(dtype).max / 8


def test_the_edge_of_a_result_in_between():
    graph = Graph(
        (Input("x", (3, 4)),), (Node(aten.mul.Scalar, (Ref(-1), 3.0)), Node(aten.cosh.default, (Ref(0),))), (Ref(1),)
    )
    draft = Library({"cosh": Program("cosh", graph)}).draft("cosh")
    found = [p for n in range(40) if (p := MUTATORS["edge"].propose(draft, CounterRng(n))) and p[0] == 1]
    assert found  # else of the product, by its input
    for params in found:
        made = MUTATORS["edge"].apply(draft, params).graph
        assert names(made) == ["mul.Scalar", "tanh", "mul.Scalar", "add.Scalar", "cosh"]
        (x,) = results(made)
        assert x.isfinite().all()
        assert x.min() > 1e37
    for params in ((1, 1, 1.0, 2.0), (1, 0, 2.0, 1.0), (1, "0", 1.0, 2.0), (7, 0, 1.0, 2.0)):
        with pytest.raises((Invalid, TypeError)):
            MUTATORS["edge"].apply(draft, params)


def test_what_beta_zero_promises_not_to_read():
    draft = Library({"edges": Program("edges", EDGES)}).draft("edges")
    graph = MUTATORS["unread"].apply(draft, (1, "nan")).graph
    assert names(graph) == ["exp", "full_like", "sub.Tensor", "addmm"]
    w = make_inputs(graph.inputs)[[i.name for i in graph.inputs].index("w")]
    torch.testing.assert_close(results(graph)[1], w @ w)
    for params in ((0, "nan"), (1, "0"), (2, "nan")):
        with pytest.raises(Invalid):
            MUTATORS["unread"].apply(draft, params)


def test_what_decides_indices_is_left_alone():
    draft = LIBRARY.draft(EMBEDDING_ID)
    assert -1 in draft.index_sources  # the ids
    assert 5 not in draft.index_sources  # argmax is in range whatever its input
    for number in range(200):
        params = MUTATORS["insert"].propose(draft, CounterRng(number))
        assert params[0] not in (-1, 6), params


# Arguments


@pytest.mark.parametrize(
    ("program", "params", "at", "expected"),
    [
        (MLP_ID, (2, "eps", 1.0), 2, (Ref(1), (32,), None, None, 1.0)),
        (MLP_ID, (4, "dim", 0), 4, (Ref(3), 0, False)),
        (CONV_ID, (0, "stride", (2, 1)), 0, (Ref(-1), Ref(-2), Ref(-3), (2, 1), (1, 1), (1, 1), False, (0, 0), 1)),
    ],
)
def test_an_argument_gets_another_value(program, params, at, expected):
    graph = made(program, ("argument", *params)).graph
    assert graph.nodes[at].args == expected
    assert [t.shape for t in results(graph)]


def test_a_result_of_another_shape_is_fitted_where_a_call_reads_it():
    graph = made(CONV_ID, ("argument", 3, "keepdim", True)).graph
    assert names(graph)[3:] == ["mean.dim", "reshape", "view", "mm"]
    assert results(graph)[0].shape == (2, 5)


@pytest.mark.parametrize(
    "params",
    [
        (0, "beta", "rm -rf"),
        (0, "self", 1),
        (0, "beta", 1 << 40),
        (5, "size", (4096, 4096)),
        (0, "no_such", 1),
        (1, "approximate", "/etc/passwd"),
    ],
)
def test_a_hostile_argument_is_refused(params):
    refused(("argument", *params))


# Tensors


def test_a_size_changes_in_inputs_and_calls():
    graph = made(EMBEDDING_ID, ("size", 16, 20, "all")).graph
    assert [i.shape for i in graph.inputs] == [(2, 6), (10, 20), (20, 20)]
    assert [n.args[1] for n in graph.nodes if "view" in n.name] == [(12, 20), (2, 6, 20)]
    assert [t.shape for t in results(graph)] == [(2, 6, 10), (2, 6, 20)]


def test_indices_stay_below_a_table_that_got_smaller():
    graph = made(EMBEDDING_ID, ("size", 10, 8, "all")).graph
    assert graph.inputs[0].fill == Fill("integers", 0, 7)
    assert make_input(graph.inputs[0]).max() <= 7


def test_a_batch_slice_has_the_values_of_the_batch():
    variant = made(CONV_ID, ("batch-slice", 2, 1))
    assert variant.execution.batch_slice == 1
    x, part = make_input(CONV.inputs[0]), make_input(variant.graph.inputs[0])
    assert torch.equal(x[:1], part)


@pytest.mark.parametrize("new", [0, 1, 5])
def test_a_batch_of_another_size(new):
    assert results(made(CONV_ID, ("size", 2, new, "batch")).graph)[0].shape == (new, 5)


@pytest.mark.parametrize(
    ("had", "has", "out", "expected"),
    [
        ((2, 8, 32), (3, 8, 32), (16, 32), (24, 32)),
        ((16, 32), (24, 32), (2, 8, 32), (3, 8, 32)),
        ((2, 8, 32), (2, 8, 48), (2, 8, 4, 8), (2, 8, 4, 12)),
        ((4, 1), (6, 1), (4,), (6,)),
        ((4,), (6,), (1, 4, 1), (1, 6, 1)),
        ((2, 3, 4), (2, 3, 4), (24,), (24,)),
        ((2, 3), (0, 3), (6,), (0,)),
    ],
)
def test_a_view_is_worked_out_again(had, has, out, expected):
    assert regrouped(had, has, out, {2: 3, 32: 48} if 0 not in has else {2: 0}) == expected


def test_a_view_that_fits_no_shape_is_refused():
    with pytest.raises(Invalid, match="in no shape like"):
        regrouped((8,), (7,), (2, 4), {8: 7})


@pytest.mark.parametrize("shape", [(35,), (5, 1, 7), (1, 5, 1, 7), (5, 1, 1, 1, 7)])
def test_another_rank_gives_the_same_values(shape):
    graph = made(POINTWISE_ID, ("rank", 2, shape)).graph
    assert torch.equal(results(graph)[0], results(POINTWISE)[0])


def test_a_broadcast_operand():
    graph = made(POINTWISE_ID, ("broadcast", 2, 1, 2, 1)).graph
    x, y = make_inputs(POINTWISE.inputs)
    assert torch.equal(results(graph)[0], (torch.sigmoid(x * y) + 2 * x[:1]).clamp(-1, 1))


def test_another_dtype_everywhere():
    assert {t.dtype for t in results(made(MLP_ID, ("dtype", "float32", "bfloat16", -1)).graph)} == {torch.bfloat16}


@pytest.mark.parametrize("params", [(0, (1, 8), 0), (0, (64, 2), 0), (0, (32, 1), 3), (0, (0, 1), 0)])
def test_another_layout(params):
    (x, *_) = make_inputs(made(MLP_ID, ("layout", *params)).graph.inputs)
    assert (x.stride(), x.storage_offset()) == params[1:]
    if 0 not in params[1]:
        assert torch.equal(x, make_input(MLP.inputs[0]))


@pytest.mark.parametrize(
    "params", [(0, (1, 1), 0), (0, (3, 2), 0), (0, (1 << 40, 1), 0), (0, (1,), 0), (0, (-1, 1), 0)]
)
def test_elements_lie_on_each_other_by_expansion_alone(params):
    refused(("layout", *params))


@pytest.mark.parametrize("kind", ["copy", "value", "view"])
def test_in_place_forms_compute_the_same(kind):
    program = Program("p", Graph(MLP.inputs, (*MLP.nodes[:1], Node(aten.relu.default, (Ref(0),))), (Ref(1),)))
    graph = build(Recipe("p", (Mutation("in-place", (1, kind)),)), {"p": program}).graph
    assert "relu_" in names(graph)
    (before,), (after,) = results(program.graph), results(graph)
    kept = after[:, ::2] if kind == "view" else after
    assert torch.equal(kept, before[:, ::2] if kind == "view" else before)


def test_no_write_to_a_value_that_is_read_elsewhere_or_is_a_view():
    refused(("in-place", 1, "value"), match="read elsewhere")  # a result of the graph as well
    nodes = (Node(aten.neg.default, (Ref(-1),)), Node(aten.t.default, (Ref(0),)), Node(aten.relu.default, (Ref(1),)))
    views = Graph((Input("x", (3, 3)),), nodes, (Ref(0), Ref(2)))
    with pytest.raises(Invalid):
        build(Recipe("v", (Mutation("in-place", (2, "value")),)), {"v": Program("v", views)})


@pytest.mark.parametrize("kind", ["exact", "empty", "transposed"])
def test_out_forms_compute_the_same(kind):
    # Not gelu: torch's oneDNN kernel ignores the strides of a result that it is given.
    graph = made(POINTWISE_ID, ("out", 1, kind)).graph
    assert "sigmoid.out" in names(graph)
    torch.testing.assert_close(results(graph), results(POINTWISE))


def test_exceptional_values_and_edges():
    graph = made(POINTWISE_ID, ("exceptional", 0, "nan")).graph
    assert make_input(graph.inputs[0]).isnan().any()
    graph = made(POINTWISE_ID, ("scale", 0, 126)).graph
    assert make_input(graph.inputs[0]).abs().max() > 1e37
    refused(("scale", 0, 4000))
    refused(("exceptional", 0, "largest"), match="in a sum")


CAST = Graph((Input("x", (6,)),), (Node(aten._to_copy.default, (Ref(-1),), (("dtype", torch.int32),)),), (Ref(0),))


def test_floats_that_become_integers_keep_their_values():
    draft = Library({"c": Program("c", CAST)}).draft("c")
    assert MUTATORS["exceptional"].propose(draft, CounterRng(1)) is None
    with pytest.raises(Invalid, match="no such floating input"):
        build(Recipe("c", (Mutation("exceptional", (0, "nan")),)), {"c": Program("c", CAST)})
    wide = Graph((Input("x", (6,), fill=Fill("normal", 0.0, 1e20)),), CAST.nodes, CAST.outputs)
    with pytest.raises(Invalid, match="cannot hold"):
        _ = Library({"w": Program("w", wide)}).draft("w").trace


def test_attention_has_as_many_keys_as_values():
    """The kernel of the CPU does not check it, and reads behind the end of the keys."""
    q, k, v = (Input(name, (1, 2, n, 4)) for name, n in (("q", 4), ("k", 3), ("v", 6)))
    attention = Node(aten.scaled_dot_product_attention.default, (Ref(-1), Ref(-2), Ref(-3)))
    programs = {"a": Program("a", Graph((q, k, v), (attention,), (Ref(0),)))}
    with pytest.raises(Invalid, match="not as many keys as values"):
        _ = Library(programs).draft("a").trace


def test_a_call_that_returns_fewer_than_the_program_returns_is_refused():
    split = Node(aten.split.Tensor, (Ref(-1), 2))
    programs = {"s": Program("s", Graph((Input("x", (4, 3)),), (split,), (Ref(0, 0), Ref(0, 2))))}
    with pytest.raises(Invalid, match="fewer results"):
        Library(programs).draft("s").trace.is_finite_somewhere()


# Execution

BATCH_NORM = Graph(
    (
        Input("x", (4, 3, 2, 2)),
        *(Input(n, (3,), fill=Fill("uniform", 0.5, 1.5), role="buffer") for n in ("w", "b", "mean", "var")),
    ),
    (
        Node(aten.native_batch_norm.default, (Ref(-1), Ref(-2), Ref(-3), Ref(-4), Ref(-5), False, 0.1, 1e-5)),
        Node(aten.native_dropout.default, (Ref(0), 0.5, True)),
    ),
    (Ref(1),),
)


def test_train_and_eval():
    programs = {"bn": Program("bn", BATCH_NORM)}
    train = build(Recipe("bn", (Mutation("train", (1,)),)), programs)
    assert (train.graph.nodes[0].args[5], train.execution.train) == (True, True)
    evaluate = build(Recipe("bn", (Mutation("train", (1,)), Mutation("train", (0,)))), programs)
    assert names(evaluate.graph) == ["native_batch_norm"]


def test_gradients_and_autocast():
    variant = made(MLP_ID, ("backward",), ("autocast", "bfloat16"))
    *_, dw, db = run(variant.graph, variant.execution, make_input)
    assert (dw.shape, db.shape) == ((32, 32), (32,))
    variant = made(POINTWISE_ID, ("backward",))
    assert all(i.requires_grad for i in variant.graph.inputs)
    assert len(run(variant.graph, variant.execution, make_input)) == 3


@pytest.mark.parametrize(
    "mutation",
    [("backward", 1), ("autocast", "float64"), ("threads", 0), ("threads", 1 << 30), ("compile", "x"), ("train", 1)],
)
def test_an_execution_that_does_not_fit_is_refused(mutation):
    refused(mutation)


def test_the_trace_of_a_variant_starts_at_its_first_change(monkeypatch):
    draft = LIBRARY.draft(MLP_ID)
    _ = draft.trace
    ran = []
    plain = tracing.run_node
    monkeypatch.setattr(tracing, "run_node", lambda node, known: ran.append(node.name) or plain(node, known))
    after = MUTATORS["insert"].apply(draft, (4, 0, "tanh"))
    _ = after.trace
    assert ran == ["aten::tanh", "aten::view", "aten::mean.dim"]


def test_embeddings_run_as_written():
    assert [t.shape for t in results(EMBEDDING)] == [(2, 6, 8), (2, 6, 16)]


def test_values_of_inputs_are_kept_within_a_bound_that_small_tensors_count_in(monkeypatch):
    monkeypatch.setattr(tracing, "_MAX_BYTES", 1 << 16)
    values, kept = tracing.Values(), []
    for k in range(200):
        made = values(Input(f"x{k}", (3,)))
        assert values(Input(f"x{k}", (3,))) is made
        kept.append(len(values._made))
    # Twelve bytes each: by their values alone, all 200 would be kept.
    assert max(kept) == (1 << 16) // (tracing._ENTRY_BYTES + 12)
    assert kept[-1] < 200
