"""Compiled variants: what is called right was compiled, also after comparisons in the same process."""

import contextlib
import dataclasses

import pytest
import torch

from shadowrun.compiled.rounding import filled_memory
from shadowrun.studies.campaign.run_variants import RunnerSettings, VariantRunner
from shadowrun.studies.campaign.variants import compiled_variant
from shadowrun.studies.campaign.variants.recipe import Recipe
from shadowrun.studies.campaign.variants.variant import Execution, Variant
from shadowrun.studies.zoo.graph import DEVICE, Fill, Graph, Input, Node, Ref, Runner
from shadowrun.studies.zoo.input_values import make_inputs
from tests.studies.campaign.programs import CONV, EMBEDDING, MLP, POINTWISE

pytestmark = [pytest.mark.usefixtures("clean_sim"), pytest.mark.filterwarnings("ignore")]
aten = torch.ops.aten
SEVERAL = Graph(
    (Input("x", (4, 6)),),
    (
        Node(aten.topk.default, (Ref(-1), 2)),
        Node(aten.split.Tensor, (Ref(-1), 3, 1)),
        Node(aten.zeros.default, ((4, 2),), (("dtype", torch.float32), ("device", DEVICE))),
        Node(aten.clamp.default, (Ref(0, 0), float("-inf"), 1.5)),
        Node(aten.cat.default, ((Ref(3), Ref(1, 1), Ref(2)), 1)),
        Node(aten.add_.Tensor, (Ref(4), Ref(4))),
    ),
    (Ref(5), Ref(0, 1)),
)


@pytest.mark.parametrize("graph", [MLP, CONV, EMBEDDING, POINTWISE, SEVERAL])
def test_a_module_computes_what_the_graph_does(graph):
    given = make_inputs(graph.inputs)
    expected = Runner(graph)([t.clone() for t in given])
    actual = compiled_variant.as_module(graph, torch.device("cpu"))(*given)
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


def test_a_variant_is_compiled_after_it_was_compared(monkeypatch):
    runner = VariantRunner(RunnerSettings(("cpu[threads=1]",), backends=("eager",)))
    variant = Variant(Recipe("0a"), MLP, Execution())
    assert runner.run(variant, 0).status == "ok"
    reports = []
    real = compiled_variant.compiled
    monkeypatch.setattr(compiled_variant, "compiled", lambda *args: reports.append(real(*args)) or reports[-1])
    result = runner.run(variant, 1)
    assert (result.status, result.reason) == ("ok", "")
    assert (reports[0].n_graphs, dict(reports[0].graph_breaks)) == (1, {})


def test_what_was_not_compiled_is_not_right(monkeypatch):
    real = compiled_variant.compiled

    def broken(*args):
        return dataclasses.replace(real(*args), n_graphs=0, graph_breaks={"marked as skipped": 1})

    monkeypatch.setattr(compiled_variant, "compiled", broken)
    runner = VariantRunner(RunnerSettings(("cpu[threads=1]",), backends=("eager",)))
    result = runner.run(Variant(Recipe("0a"), MLP, Execution()), 1)
    assert (result.status, result.reason) == ("unverified", "nothing was compiled: marked as skipped")


def test_a_graph_that_writes_to_what_requires_gradients_is_compiled():
    graph = Graph(
        (Input("x", (2, 3), requires_grad=True), Input("y", (2, 3)), Input("w", (2, 3), requires_grad=True)),
        (
            Node(aten.neg_.default, (Ref(-1),)),
            Node(aten.add_.Tensor, (Ref(-2), Ref(-3))),
            Node(aten.tanh.default, (Ref(1),)),
        ),
        (Ref(0), Ref(2)),
    )
    runner = VariantRunner(RunnerSettings(("cpu[threads=1]",), backends=("aot_eager",)))
    # A leaf cannot be written to, and an input without gradient gets one on the way: only on one side, it was said.
    result = runner.run(Variant(Recipe("0a"), graph, Execution(backward=True)), 1)
    assert (result.status, result.reason, result.findings) == ("ok", "", ())


# Only the first half of the result is written.
HALF = Graph(
    (Input("x", (3,)),),
    (
        Node(aten.new_empty.default, (Ref(-1), (6,))),
        Node(aten.slice.Tensor, (Ref(0), 0, 0, 3)),
        Node(aten.copy_.default, (Ref(1), Ref(-1))),
        Node(aten.mul.Tensor, (Ref(0), 2.0)),
    ),
    (Ref(3),),
)
# Rounded to the smallest subnormal, the mean of these is one of two numbers, and the results differ by 316 of these.
SMALL = Graph(
    (Input("x", (4, 64), fill=Fill("normal", 0.0, 2.0**-146)),),
    (Node(aten.native_layer_norm.default, (Ref(-1), (64,), None, None, 1e-5)),),
    (Ref(0),),
)


@pytest.mark.parametrize(
    ("graph", "change", "status"),
    [
        (HALF, lambda out: (out[0].index_fill(0, torch.tensor([3, 4, 5]), 7.0),), "ok"),
        (HALF, lambda out: (out[0].index_fill(0, torch.tensor([2, 3, 4]), 7.0),), "finding"),
        (SMALL, lambda out: (out[0] + 316 * 2.0**-149,), "ok"),
        (SMALL, lambda out: (out[0] * 8.0,), "finding"),
    ],
)
@pytest.mark.parametrize("memory", [filled_memory, contextlib.nullcontext])  # holds NaN, holds anything
def test_what_no_kernel_writes_and_what_rounding_decides_is_open(graph, change, status, memory):
    def backend(module, _):
        return lambda *inputs: change(module(*inputs))

    torch._dynamo.register_backend(backend, name="changed")
    try:
        with memory():
            found = compiled_variant.check_compiled(
                Variant(Recipe("0a"), graph, Execution()), "changed", torch.device("cpu")
            )
    finally:
        torch._dynamo.backends.registry._COMPILER_FNS.pop("changed")
        torch._dynamo.backends.registry._BACKENDS.pop("changed", None)
    assert found[0] == status
