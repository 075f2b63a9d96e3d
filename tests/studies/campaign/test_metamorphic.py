import pytest
import torch

from shadowrun import sim
from shadowrun.platforms.device import resolve
from shadowrun.studies.campaign.metamorphic import RELATIONS, Metamorphic
from shadowrun.studies.campaign.variants.recipe_generator import Generator
from shadowrun.studies.zoo.graph import Graph, Input, Node, Ref, Runner
from shadowrun.studies.zoo.input_values import make_inputs
from tests.studies.campaign.programs import PROGRAMS

aten = torch.ops.aten


def program(graph):
    return lambda: Runner(graph)(make_inputs(graph.inputs))


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_correct_cpu_keeps_all_relations(relation):
    generator, checker, n = Generator(PROGRAMS, seed=3), Metamorphic(resolve("cpu")), 0
    for i in range(25):
        graph = generator.variant(i).graph
        # For some batch sizes oneDNN leaves the padding out: an infinite weight times 0 is NaN, or not.
        infinite = any(given.fill.kind == "infinities" for given in graph.inputs)
        if infinite and any(node.op is aten.convolution.default for node in graph.nodes):
            continue
        violations, n_pairs = checker.check(program(graph), relation)
        assert violations == []
        n += n_pairs
    assert n >= 20


@pytest.mark.parametrize(
    ("flaw", "relation", "op", "args"),
    [
        ("leaky-relu-ignores-strides", "layout", aten.leaky_relu.default, (Ref(-1),)),
        ("silu-tail", "permutation", aten.silu.default, (Ref(-1),)),
        ("silu-tail", "tail", aten.silu.default, (Ref(-1),)),
        ("mul-inplace-lost", "in-place", aten.mul.Tensor, (Ref(-1), Ref(-1))),
        ("log-softmax-stale", "slice", aten._log_softmax.default, (Ref(-1), 1, False)),
    ],
)
def test_a_relation_alone_finds_a_flaw(flaw, relation, op, args):
    sim.enable()
    checker = Metamorphic(resolve("sim"))
    graph = Graph((Input("x", (5, 7)),), (Node(op, args),), (Ref(0),))
    assert checker.check(program(graph), relation)[0] == []
    with sim.flaws(flaw):
        violations, _ = checker.check(program(graph), relation)
    assert [(v.op, v.relation) for v in violations] == [(op.name(), relation)]
    assert violations[0].dtype == "f32"
    assert violations[0].message
