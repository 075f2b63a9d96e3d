"""The runner on the simulated device, clean and with planted flaws, and on the CPU in another process."""

import dataclasses

import pytest
import torch

from shadowrun import sim
from shadowrun.platforms.worker.client import WorkerDied
from shadowrun.studies.campaign.causes.root_causes import signature
from shadowrun.studies.campaign.metamorphic import Metamorphic
from shadowrun.studies.campaign.oracles import FIRED, from_mask
from shadowrun.studies.campaign.run_variants import REFERENCE, TARGET, RunnerSettings, VariantRunner, _reads_new_memory
from shadowrun.studies.campaign.variants.recipe import Recipe
from shadowrun.studies.campaign.variants.variant import Execution, Variant
from shadowrun.studies.sweep.cases import CaseFinding, Kind
from shadowrun.studies.sweep.run_case import AS_A_WHOLE, CaseRunner
from shadowrun.studies.zoo.graph import Fill, Graph, Input, Node, Ref
from shadowrun.types import Cause

pytestmark = pytest.mark.usefixtures("forked_processes")

aten = torch.ops.aten
X, W = Input("x", (4, 16)), Input("w", (16, 8), requires_grad=True)
MLP = Graph(
    (X, W),
    (
        Node(aten.mm.default, (Ref(-1), Ref(-2))),
        Node(aten.relu.default, (Ref(0),)),
        Node(aten._softmax.default, (Ref(1), -1, False)),
    ),
    (Ref(2),),
)
ADDMM = Graph((X, W, Input("b", (8,))), (Node(aten.addmm.default, (Ref(-3), Ref(-1), Ref(-2))),), (Ref(0),))


def variant(graph=MLP, seed=0, **execution):
    return Variant(Recipe("0a", (), seed), graph, Execution(**execution))


@pytest.fixture(scope="module")
def runner():
    return VariantRunner(RunnerSettings(("sim",), flaws=()))


def test_a_clean_device_agrees_in_every_bit(runner):
    result = runner.run(variant(backward=True))
    assert (result.status, result.findings, from_mask(result.oracles)) == ("ok", (), frozenset())
    assert result.ops["aten::mm"] == result.ops["aten::_softmax_backward_data"] == "ok"
    assert result.n_calls >= 5


def test_a_flaw_is_placed_and_seen_by_the_oracles_that_can(runner):
    with sim.flaws("matmul-in-bf16"):
        result = runner.run(variant())
    assert result.status == "finding"
    assert str(signature(result.findings[0])) == "mismatch aten::mm, float: reduced precision"
    assert {"shadowrun", "bitwise", FIRED} <= from_mask(result.oracles)
    assert "torchfuzz" not in from_mask(result.oracles)  # softmax sums to one


def test_a_flaw_in_the_backward_pass_has_its_phase(runner):
    with sim.flaws("matmul-in-bf16"):
        found = {(f.op, f.phase) for f in runner.run(variant(ADDMM, backward=True)).findings}
    assert found == {("aten::addmm", "forward"), ("aten::mm", "backward")}


def test_what_the_reference_refuses_is_invalid(runner):
    wrong = Graph((X, X), (Node(aten.mm.default, (Ref(-1), Ref(-2))),), (Ref(0),))
    result = runner.run(variant(wrong))
    assert result.status == "invalid"
    assert "RuntimeError" in result.reason
    assert result.oracles == -1


def test_a_missing_kernel_is_unsupported(runner):
    graph = Graph((X,), (Node(aten.cumsum.default, (Ref(-1), 1)),), (Ref(0),))
    with sim.flaws("missing-cumsum"):
        result = runner.run(variant(graph))
    assert result.status == "unsupported"
    assert result.ops["aten::cumsum"] == "unsupported"
    assert result.oracles == -1


def test_results_repeat_themselves(runner):
    with sim.flaws("matmul-in-bf16"):
        # Of the second call of a context, the fourth and so on, the ladder judges what it judged before.
        first, *others = (runner.run(variant(seed=5)) for _ in range(4))
    for other in others:
        assert (first.findings, first.oracles) == (other.findings, other.oracles)


def test_inputs_keep_their_layout_and_writes_stay_inside(runner):
    strided = Input("x", (4, 3), strides=(1, 5), offset=2)
    graph = Graph(
        (strided, Input("b", (3,), fill=Fill("uniform", 1, 2))),
        (Node(aten.add_.Tensor, (Ref(-1), Ref(-2))), Node(aten.mul.Tensor, (Ref(-1), Ref(-1)))),
        (Ref(1),),
    )
    first, second = (dataclasses.replace(runner.run(variant(graph)), cpu_ms=0) for _ in range(2))
    assert first == second
    assert first.status == "ok"


def test_autocast_runs_on_both(runner):
    assert runner.run(variant(autocast="bfloat16")).status == "ok"


def test_another_instruction_set_differs_in_bits_only():
    other = VariantRunner(RunnerSettings(("cpu[isa=default]",)))
    result = other.run(variant())
    assert result.status == "ok"
    assert from_mask(result.oracles) <= {"bitwise", FIRED}
    assert result.oracles > 0


@pytest.mark.slow
def test_compiled_code_is_a_target_of_its_own():
    compiled = VariantRunner(RunnerSettings(("cpu[threads=1]",), backends=("aot_eager",)))
    assert compiled.run(variant(backward=True), 1).status == "ok"


@pytest.mark.parametrize("execution", [{"backward": True}, {"autocast": "bfloat16"}])
def test_attention_that_each_device_computes_by_other_operators_is_no_finding(runner, execution):
    x = Input("x", (2, 4, 8, 16), requires_grad=True)
    attention = Node(aten.scaled_dot_product_attention.default, (Ref(-1), Ref(-1), Ref(-1)))
    graph = Graph((x,), (attention, Node(aten.mul.Tensor, (Ref(0), Ref(0)))), (Ref(1),))
    assert runner.run(variant(graph, **execution)).status == "ok"


LEAKY = Graph((Input("x", (5, 7)),), (Node(aten.leaky_relu.default, (Ref(-1),)),), (Ref(0),))


@pytest.mark.parametrize("reads", [True, False])
def test_only_what_depends_on_memory_that_no_kernel_writes_may_differ_as_a_whole(runner, monkeypatch, reads):
    new = Node(torch.ops.aten.new_empty.default, (Ref(-1), (6,)))
    nodes = (new, Node(torch.ops.aten.mul.Tensor, (Ref(0), 2.0)), Node(torch.ops.aten.neg.default, (Ref(-1),)))
    graph = Graph((Input("x", (6,)),), nodes, (Ref(1 if reads else 2),))

    run = CaseRunner.run

    def differs(*args):
        whole = CaseFinding(Kind.MISMATCH, "", "", Cause.IMPLEMENTATION, AS_A_WHOLE, "")
        return [*(run(*args) or []), whole]

    monkeypatch.setattr(CaseRunner, "run", differs)
    assert bool(runner.run(variant(graph)).findings) is not reads


def test_an_operator_that_refuses_nan_reads_the_new_memory():
    aten = torch.ops.aten
    new, half = Node(aten.new_empty.default, (Ref(-1), (6,))), Node(aten.full.default, ((6,), 0.5))
    loss = Node(aten.binary_cross_entropy.default, (Ref(0), Ref(1)))
    assert _reads_new_memory(variant(Graph((Input("x", (6,)),), (new, half, loss), (Ref(2),))))
    assert not _reads_new_memory(variant(Graph((Input("x", (6,)),), (new, half), (Ref(1),))))


def test_numbers_that_one_operator_makes_equal_are_told_apart():
    # Recipe 98770 of a campaign: heaviside is 0 where the memory holds NaN, and where it holds zeros.
    new, step = Node(aten.new_empty.default, (Ref(-1), (6,))), Node(aten.heaviside.default, (Ref(0), Ref(0)))
    assert _reads_new_memory(variant(Graph((Input("x", (6,)),), (new, step), (Ref(1),))))


@pytest.mark.parametrize("output", [0, 1])
def test_memory_that_a_kernel_takes_for_itself_may_agree_by_chance(monkeypatch, output):
    # Recipe 13725 of a campaign: both runs had the memory of a former variant, the device's run had not.
    monkeypatch.setattr("shadowrun.studies.campaign.run_variants.bits_equal", lambda *tensors: True)
    inputs = (
        Input("log_probs", (5, 2, 4)),
        *(
            Input(name, shape, torch.int64, Fill("integers", 1, 3))
            for name, shape in (("t", (2, 3)), ("n", (2,)), ("m", (2,)))
        ),
    )
    loss = Node(aten._ctc_loss.Tensor, tuple(Ref(-1 - k) for k in range(4)))
    taken = Graph(inputs, (loss, Node(aten.mul.Tensor, (Ref(0, output), 2.0))), (Ref(1),))
    assert _reads_new_memory(variant(taken)) is (output == 1)


def test_a_platform_is_compared_with_itself_where_the_recipe_asks_for_it(runner):
    with sim.flaws("leaky-relu-ignores-strides"):
        plain, itself = runner.run(variant(LEAKY)), runner.run(variant(LEAKY, metamorphic="layout"))
    assert plain.findings == ()
    assert [(f.op, f.explanation, f.role) for f in itself.findings] == [
        ("aten::leaky_relu", "strided and contiguous inputs differ", TARGET)
    ]
    assert "shadowrun" not in from_mask(itself.oracles)  # of the results of the whole program, none differs
    assert runner.run(variant(LEAKY, metamorphic="layout")).findings == ()


def test_a_platform_whose_process_dies_in_a_pair_is_a_finding(monkeypatch):
    def dies(_, program, relation, on_target=None, on_op=None):
        on_op("aten::leaky_relu")
        raise WorkerDied("worker died: signal 11 (SIGSEGV)")

    own = VariantRunner(RunnerSettings(("cpu[threads=1]",)))
    monkeypatch.setattr(Metamorphic, "check", dies)
    found = {(f.op, f.kind, f.role) for f in own.run(variant(LEAKY, metamorphic="slice")).findings}
    assert found == {("aten::leaky_relu", "crash", role) for role in (TARGET, REFERENCE)}


def test_what_the_reference_shows_against_itself_is_its_own():
    two = VariantRunner(RunnerSettings(("cpu", "cpu[threads=1]"), ref="sim"))
    with sim.flaws("leaky-relu-ignores-strides"):
        results = [two.run(variant(LEAKY, metamorphic="layout"), target) for target in (0, 1)]
    assert [[(f.op, f.role) for f in r.findings] for r in results] == [[("aten::leaky_relu", REFERENCE)], []]


def test_the_number_of_threads_is_that_of_the_recipe_for_its_time(runner, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    runner.run(variant(threads=3))
    assert seen == [3, 1]


@pytest.fixture(scope="module")
def lazy():
    return VariantRunner(RunnerSettings(("lazy",)))


def placed(op, *args):
    """Results of an operator that returns a list, and a sum of two of them, of which one is a product."""
    w = Input("w", (6, 3))
    nodes = (
        Node(op, (Ref(-1), *args)),
        Node(aten.mm.default, (Ref(0, 0), Ref(-2))),
        Node(aten.relu.default, (Ref(1),)),
    )
    return Graph((Input("x", (4, 6)), w), nodes, (Ref(2),))


def test_what_raises_because_of_a_result_elsewhere_is_counted_for_that_result(lazy):
    found = lazy.run(variant(placed(aten.split.Tensor, 2))).findings
    (one,) = [f for f in found if f.kind != "silent fallback"]
    assert (one.op, one.kind, one.explanation) == ("aten::split.Tensor", "wrong form", "device")
    assert "a result lies on cpu: aten::mm raises" in one.message


def test_a_result_that_is_only_wrapped_is_read(lazy):
    graph = Graph(
        (Input("x", (4, 6)),),
        (Node(aten.unbind.int, (Ref(-1), 0)), Node(aten.sigmoid.default, (Ref(0, 1),))),
        (Ref(1),),
    )
    result = lazy.run(variant(graph))  # on the CPU, where a wrapper has no memory: it ended the process
    assert result.status == "unsupported"
    assert {f.kind for f in result.findings} == {"silent fallback"}
    assert result.oracles == 0


def test_arguments_on_a_lazy_device_are_checked_there(lazy):
    """A check that took views of a lazy tensor raised, and the call was refused."""
    rows = Input("i", (4,), torch.int64, Fill("integers", 0, 4))
    bags = Input("o", (2,), torch.int64, Fill("arange", 0, 2))
    call = Node(aten._embedding_bag.default, (Ref(-1), Ref(-2), Ref(-3)))
    graph = Graph((Input("w", (5, 4)), rows, bags), (call,), (Ref(0, 0),))
    assert [f.kind for f in lazy.run(variant(graph)).findings if f.kind != "silent fallback"] == []


def test_a_device_without_autocast_lacks_it(lazy):
    result = lazy.run(variant(autocast="bfloat16"))
    assert result.status == "unsupported"
    assert [(f.op, f.kind) for f in result.findings] == [("torch.autocast", "unsupported operator")]


def test_what_is_raised_where_results_are_read_is_an_error(lazy):
    x = Input("x", (4, 5), requires_grad=True)
    graph = Graph(
        (x,),
        (
            Node(aten._log_softmax.default, (Ref(-1), 1, False)),
            Node(aten.sum.default, (Ref(0),)),
            Node(aten.mul.Scalar, (Ref(1), 0.1)),
        ),
        (Ref(2),),
    )
    result = lazy.run(variant(graph, backward=True))
    assert result.status == "finding"
    assert "TorchScript" in " ".join(f.message for f in result.findings)
    assert lazy.run(variant()).status == "ok"
