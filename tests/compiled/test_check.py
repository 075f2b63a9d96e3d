"""`compile_check`: what became of the program and of each graph; and nothing of the user's is touched."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import shadowrun
from shadowrun.compiled.outcome import RegionOutcome
from tests.compiled import models, planted


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()


def regions(report):
    return {r.name: r.outcome for r in report.regions}


@pytest.mark.parametrize("name", ["perceptron", "transformer"])
def test_a_right_backend_is_ok_and_leaves_no_trace(name):
    model, x = models.make(name)  # with dropout and batch norm, whose state each run changes
    model(x).sum().backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    stream = torch.get_rng_state()
    report = shadowrun.compile_check(model, x, backend="aot_eager")
    assert report.ok
    assert regions(report) == {"graph 0 forward": RegionOutcome.OK, "graph 0 backward": RegionOutcome.OK}
    assert report.verdict.cause is None  # bit by bit
    assert not report.ladder
    assert "equal bit by bit" in report.summary()
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


def test_a_fault_is_found_in_program_and_graph_and_placed_on_a_stage():
    model, x = models.make("gated")
    fault = planted.FAULTS["tanh a little too small"]
    told = []
    backend = planted.compiler(fault)
    report = shadowrun.compile_check(model, x, backend=backend, on_progress=lambda *what: told.append(what))
    assert report.outcome is RegionOutcome.MISMATCH
    assert not report.ok
    assert report.verdict.status is shadowrun.Status.MISMATCH
    assert [c.op for c in report.regions[0].localised.culprits] == ["aten.tanh.default"] * 2
    assert regions(report)["graph 0 backward"] is RegionOutcome.OK
    stages = {s.name: s.outcome for s in report.ladder}
    assert stages["aot_eager"] is stages["eager"] is RegionOutcome.OK
    assert list(stages.values())[-1] is RegionOutcome.MISMATCH
    text = report.summary()
    assert "wrong: aten.tanh.default (tanh), alone" in text
    assert list(report.seconds) == ["the whole program", "each graph", "search", "stages"]
    assert "seconds of this check: the whole program" in text
    assert "models.py" in text
    assert {what for what, _, _ in told} >= {"the whole program", "each graph", "each node alone", "stages"}


def test_only_the_forward_pass():
    model, x = models.make("gated")
    report = shadowrun.compile_check(model, x, backend="aot_eager", train=False)
    assert regions(report) == {"graph 0 forward": RegionOutcome.OK}


def test_buffers_that_are_wrong_are_seen():
    model, x = models.make("perceptron")
    backend = planted.compiler(planted.FAULTS["another momentum in batch norm"])
    report = shadowrun.compile_check(model, x, backend=backend, ladder=False)
    assert report.outcome is RegionOutcome.MISMATCH
    assert "norm.running" in report.verdict.evidence


def test_a_compile_error_names_its_class():
    def broken(module, inputs):
        raise NotImplementedError("no such kernel")

    report = shadowrun.compile_check(torch.sin, torch.ones(3), backend=broken)
    assert report.outcome is RegionOutcome.COMPILE_ERROR
    assert report.error == "NotImplementedError: no such kernel"
    assert regions(report) == {"graph 0 forward": RegionOutcome.COMPILE_ERROR}
    assert [s.outcome for s in report.ladder] == [RegionOutcome.OK] * 3 + [RegionOutcome.COMPILE_ERROR]


def refusing(op, stage):
    """A backend that has no kernel for one operator, which it notices when it compiles or when it runs."""

    def compile_graph(module, _inputs):
        missing = any(n.target is op for n in module.graph.nodes)
        if missing and stage == "compile":
            raise NotImplementedError(f"no lowering of {op}\nmore")

        def call(args):
            if missing:
                raise RuntimeError(f"no kernel of {op}")
            return planted.run(module)(args)

        call._boxed_call = True
        return call

    return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)


@pytest.mark.parametrize("stage", ["compile", "runtime"])
def test_the_node_that_fails_is_named(stage):
    model, x = models.make("transformer")
    op = torch.ops.aten.gelu_backward.default
    report = shadowrun.compile_check(model, x, backend=refusing(op, stage), ladder=False)
    assert report.outcome is {"compile": RegionOutcome.COMPILE_ERROR, "runtime": RegionOutcome.RUNTIME_ERROR}[stage]
    forward, backward = report.regions
    assert forward.outcome is RegionOutcome.OK
    (culprit,) = backward.localised.culprits
    assert (culprit.op, culprit.module, culprit.how) == ("aten.gelu_backward.default", "blocks.1", "alone")
    assert backward.localised.n_compiled <= 9
    assert "fails: aten.gelu_backward.default (gelu_backward), alone; blocks.1" in report.summary()
    assert report.summary().count("no lowering" if stage == "compile" else "no kernel") == 2


def test_a_backend_that_is_wrong_on_dynamos_own_graphs_only():
    def backend(module, inputs):
        for node in module.graph.nodes:
            if node.target is F.gelu:  # no plain operator
                node.target = F.silu
        module.recompile()
        return module.forward

    model, x = models.make("transformer")
    report = shadowrun.compile_check(model.eval(), x, backend=backend, train=False, ladder=False)
    assert report.outcome is RegionOutcome.MISMATCH
    plain, own = report.regions
    assert (plain.outcome, own.outcome) == (RegionOutcome.OK, RegionOutcome.MISMATCH)
    assert own.name == "graph 0 as Dynamo made it"
    assert [(c.op, c.module) for c in own.localised.culprits] == [("gelu", "blocks.0"), ("gelu", "blocks.1")]


def test_a_runtime_error_is_told_from_it():
    def broken(module, inputs):
        def run(*args):
            raise ValueError("bad launch")

        return run

    report = shadowrun.compile_check(torch.sin, torch.ones(3), backend=broken, ladder=False)
    assert report.outcome is RegionOutcome.RUNTIME_ERROR
    assert report.regions[0].error == "ValueError: bad launch"


def other_layout(x):
    """Decomposed, the result of `cat` is laid out as its second part."""
    return torch.cat([torch.zeros(2, 2, 0, 3), x.transpose(1, 2)], -2).reshape(4, 4, 3).exp()


def test_a_view_of_a_result_with_other_strides_after_decomposition_is_no_error():
    report = shadowrun.compile_check(other_layout, torch.randn(2, 4, 2, 3), backend="aot_eager_decomp_partition")
    assert report.ok, report.summary()
    assert set(regions(report).values()) == {RegionOutcome.OK}


def test_a_graph_that_fails_by_itself_only_is_unverified():
    made = []

    def once(module, inputs):
        made.append(module)
        if len(made) > 1:
            raise RuntimeError("only once")
        return planted.run(module)

    def backend(module, inputs):
        return aot_autograd(fw_compiler=once)(module, inputs)

    report = shadowrun.compile_check(torch.sin, torch.ones(3), backend=backend, ladder=False)
    assert report.ok
    assert set(regions(report).values()) == {RegionOutcome.UNVERIFIED}
    assert "does not compile by itself" in report.summary()
    assert "RuntimeError: only once" in report.summary()


def broken_in_two(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def test_what_is_not_known_to_be_right_comes_before_what_is_slow():
    """The worst of what was seen: a reader who stops at the outcome must not take it for right."""

    def with_other_random_numbers(module, inputs):
        def lower(graph, _inputs):
            return planted.run(graph)

        return aot_autograd(fw_compiler=lower, decompositions={torch.ops.aten.native_dropout.default: other})(
            module, inputs
        )

    def other(x, p, train):
        mask = torch.bernoulli(torch.full_like(x, 1 - p)).bool()
        return x * mask / (1 - p), mask

    def function(x):
        return torch.nn.functional.dropout(broken_in_two(x), 0.5)

    report = shadowrun.compile_check(function, torch.ones(64), backend=with_other_random_numbers, ladder=False)
    assert sum(report.graph_breaks.values()) >= 1
    assert not report.failed
    assert report.outcome is RegionOutcome.UNVERIFIED
    order = list(RegionOutcome)
    assert (
        order.index(RegionOutcome.UNVERIFIED)
        < order.index(RegionOutcome.RECOMPILE_STORM)
        < order.index(RegionOutcome.SLOWER)
    )


def test_graph_breaks_are_counted():
    report = shadowrun.compile_check(broken_in_two, torch.ones(3), backend="aot_eager", train=False)
    assert report.ok
    assert report.n_graphs == 2
    assert sum(report.graph_breaks.values()) >= 1
    assert set(regions(report)) == {"graph 0 forward", "graph 1 forward"}
    assert "graph break" in report.summary()
    whole = shadowrun.compile_check(broken_in_two, torch.ones(3), backend="aot_eager", fullgraph=True, ladder=False)
    assert whole.outcome is RegionOutcome.COMPILE_ERROR


def test_a_recompile_storm():
    state = {"n": 0}

    def counting(x):
        state["n"] += 1
        return x * state["n"]

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_int=True, assume_static_by_default=True):
        report = shadowrun.compile_check(counting, torch.ones(3), backend="aot_eager", train=False)
    assert report.n_recompiled == 3
    assert "compiled again" in report.summary()


def test_dynamic_sizes_keyword_arguments_and_captured_modules():
    norm = nn.BatchNorm1d(4)

    def run(x, *, scale):
        return {"out": norm(x) * scale, "size": x.shape[0]}

    before = norm.running_mean.clone()
    report = shadowrun.compile_check(run, torch.randn(5, 4), scale=2.0, backend="aot_eager", dynamic=True)
    assert report.ok
    assert torch.equal(norm.running_mean, before)
    assert norm.num_batches_tracked == 0


def test_a_compiled_optimizer():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    before = model.weight.clone()
    report = shadowrun.compile_check(optimizer.step, backend="aot_eager", train=False)
    assert report.ok
    assert report.n_graphs >= 1
    assert torch.equal(model.weight, before)


def test_other_draws_are_no_false_alarm_and_hide_no_fault():
    model, x = models.make("perceptron")
    report = shadowrun.compile_check(
        model, x, backend="aot_eager_decomp_partition"
    )  # decomposed, dropout has other random numbers
    assert report.outcome is RegionOutcome.UNVERIFIED
    forward = report.regions[0]
    assert forward.outcome is RegionOutcome.UNVERIFIED
    assert forward.verdict.cause is shadowrun.Cause.RANDOMNESS
    fault = planted.FAULTS["relu lets negatives through"]
    report = shadowrun.compile_check(model, x, backend=planted.compiler(fault, planted.OTHER_DRAWS), ladder=False)
    assert report.outcome is RegionOutcome.MISMATCH
    assert [c.op for c in report.regions[0].localised.culprits] == ["aten.relu.default"]


def test_what_is_not_compiled_at_all_is_told():
    report = shadowrun.compile_check(nn.LSTM(3, 4), torch.randn(2, 1, 3), backend="aot_eager", train=False)
    if report.n_graphs == 0:
        assert any("ran eagerly" in note for note in report.notes)


def test_an_update_that_is_wrong_is_seen():
    state = torch.zeros(4)
    wrong = planted.fault("", "", torch.ops.aten.add.Tensor, planted.scaled(torch.ops.aten.add.Tensor), "")

    def update(x):
        state.add_(x)
        return x.sum()

    report = shadowrun.compile_check(update, torch.rand(4), backend=planted.compiler(wrong), train=False, ladder=False)
    assert report.outcome is RegionOutcome.MISMATCH
    assert state.sum() == 0


def chain(x):
    for _ in range(8):
        x = (x * 1.7).exp().log1p()
    return x


def test_closer_to_the_truth_than_eager_is_no_fault():
    def sharper(module, inputs):
        def run(x):
            return (chain(x.double()).to(x.dtype),)

        return run

    x = torch.rand(64).bfloat16()
    report = shadowrun.compile_check(chain, x, backend=sharper, train=False, ladder=False)
    assert report.ok
    assert report.verdict.explanation == "nearer the truth than eager"
    assert report.verdict.evidence.startswith("output: root mean square error")


def test_what_fails_without_compiling_is_a_usage_error():
    with pytest.raises(shadowrun.UsageError, match="fails without compiling") as caught:
        shadowrun.compile_check(torch.mm, torch.ones(2), torch.ones(2), backend="aot_eager")
    assert caught.value.slug == "fails-in-eager"
    with pytest.raises(shadowrun.UsageError, match="takes a function"):
        shadowrun.compile_check(3)


def test_a_program_runs_eagerly_and_compiles_as_before_inside_and_after():
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return planted.run(module)

    def backend(module, inputs):
        return aot_autograd(fw_compiler=counting)(module, inputs)

    x = torch.rand(3)
    compiled = torch.compile(F.gelu, backend=backend)
    expected = compiled(x)
    with shadowrun.compare("cpu[threads=1]"):
        shadowrun.compile_check(F.silu, x, backend="aot_eager")
        assert torch.equal(F.gelu(x), expected)
        assert torch.equal(torch.compile(torch.sin, backend=backend)(x), x.sin())
    shadowrun.compile_check(F.silu, x, backend="aot_eager")
    graphs.clear()
    assert torch.equal(F.gelu(x), expected)
    assert graphs == []  # eager is not compiled
    assert torch.equal(compiled(x), expected)
    assert len(graphs) == 1  # compiled anew once, and then kept
    compiled(x)
    assert len(graphs) == 1


def test_it_runs_inside_a_comparison():
    x = torch.rand(3)
    with shadowrun.compare("cpu[threads=1]") as run:
        report = shadowrun.compile_check(F.gelu, x, backend="aot_eager", train=False)
    assert report.ok
    assert sum(run.counts().values()) == 0


@pytest.mark.slow
def test_inductor_is_right(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = models.make("perceptron")
    report = shadowrun.compile_check(model, x)
    assert report.ok, report.summary()
    assert all(r.outcome is RegionOutcome.OK for r in report.regions)


@pytest.mark.slow
def test_inductors_own_planted_fault_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = models.make("perceptron")
    report = shadowrun.compile_check(model, x, options={"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}, ladder=False)
    assert report.outcome is RegionOutcome.MISMATCH
    (culprit,) = report.regions[0].localised.culprits
    assert culprit.op == "aten.relu.default"


def other_scale(x, p, train):
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(7)) >= p
    return x * mask * p, mask


def test_a_dropout_with_another_scale_is_found_whatever_it_draws():
    model, x = models.make("perceptron")
    fault = planted.fault("", "", torch.ops.aten.native_dropout.default, other_scale, "")
    report = shadowrun.compile_check(model, x, backend=planted.compiler(fault), ladder=False)
    assert report.outcome is RegionOutcome.MISMATCH
    (culprit,) = report.regions[0].localised.culprits
    assert (culprit.op, culprit.module) == ("aten.native_dropout.default", "drop")
    assert culprit.how == "in the elements that it kept"
    assert "models.py" in culprit.site
