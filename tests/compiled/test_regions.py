"""`compare(compiled=True)`: what Inductor compiled is compared with eager as a whole, and runs compiled."""

import pytest
import torch
import torch._higher_order_ops.wrap as operators
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import shadowrun
from shadowrun import Cause, Status
from tests.compiled.regions import CODE, Small, compare, region


def records(run):
    return [(r.call.op, r.verdict.status) for r in run.records(op="compiled::*")]


def both(x, y):
    return (x @ y, (x * 2).relu())


def wrong(x, y):
    return (x @ y, x * 2)


def test_a_region_that_is_right_matches_and_its_own_result_is_given():
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    kept = both(x, y)
    call = region(both, lambda x, y: kept, x, y)
    with compare() as run:
        out = call()
        call()
    assert all(a is b for a, b in zip(out, kept, strict=True))
    assert records(run) == [("compiled::graph 0", Status.MATCH)] * 2
    assert run.counts()[Status.SKIPPED] == 0  # no "higher-order operator" in addition


def test_a_region_that_is_wrong_is_a_mismatch_with_its_figures():
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    right, bad = region(both, both, x, y), region(both, wrong, x, y)
    with compare() as run:
        right()
        bad()
    assert records(run) == [("compiled::graph 0", Status.MATCH), ("compiled::graph 1", Status.MISMATCH)]
    (record,) = run.records(status="mismatch")
    assert record.call.inputs == "f32[3, 4], f32[4, 2]"
    assert record.verdict.cause is Cause.IMPLEMENTATION
    assert [d.name for d in record.diffs] == ["relu"]
    assert record.diffs[0].n_mismatched == int((x < 0).sum())
    assert "compiled/regions.py" in record.call.site


def test_a_buffer_is_written_once_and_compared():
    def count(x, buffer):
        buffer.add_(x)
        return (x * 1,)

    def miscount(x, buffer):
        buffer.add_(x * 1.01)
        return (x * 1,)

    x, buffer = torch.ones(3), torch.zeros(3)
    right, bad = region(count, count, x, buffer), region(count, miscount, x, buffer)
    with compare() as run:
        right()
        assert torch.equal(buffer, torch.ones(3))
        bad()
    assert torch.allclose(buffer, torch.tensor(2.01))
    assert [s for _, s in records(run)] == [Status.MATCH, Status.MISMATCH]


def test_draws_are_the_same_and_the_stream_goes_on_as_without_us():
    def noisy(x):
        return (x * torch.rand_like(x),)

    x = torch.ones(8)
    call, other = region(noisy, noisy, x), region(noisy, lambda x: (x * 0.5,), x)
    torch.manual_seed(1)
    alone = call()[0], torch.rand(1)
    torch.manual_seed(1)
    with compare() as run:
        inside = call()[0]
    assert torch.equal(inside, alone[0])
    assert torch.equal(torch.rand(1), alone[1])
    with run:
        other()
    assert [s for _, s in records(run)] == [Status.MATCH, Status.UNVERIFIED]
    assert next(iter(run.records(status="unverified"))).verdict.cause is Cause.RANDOMNESS


@pytest.mark.parametrize(
    ("options", "graph", "status", "reason"),
    [
        ({}, False, Status.UNVERIFIED, "torch kept no graph of it"),
        ({"max_bytes": 8}, True, Status.UNVERIFIED, "more than max_bytes"),
    ],
)
def test_what_cannot_be_compared_is_counted(options, graph, status, reason):
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    call = region(both, both, x, y, graph=graph)
    with compare(**options) as run:
        call()
    (record,) = run.records(op="compiled::*")
    assert record.verdict.status is status
    assert reason in record.verdict.explanation


def test_steps_that_are_not_selected_are_skipped():
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    call = region(both, both, x, y)
    with compare(steps=1) as run:
        for _ in range(3):
            call()
            run.step()
    assert [r.call.step for r in run.records(op="compiled::*")] == [1]
    assert run.counts()[Status.SKIPPED] == 2


def test_without_the_option_regions_run_as_before():
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    call = region(both, wrong, x, y)
    with shadowrun.compare("cpu[threads=1]") as run:
        call()
    assert records(run) == []


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_compiles_nothing_anew_and_its_fault_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = Small(), torch.randn(3, 4)
    compiled = torch.compile(model, fullgraph=True)
    compiled(x[:1])  # before: not seen
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}), compare() as run:
        compiled(x[:1])
        for _ in range(2):
            out = compiled(x)
        out.sum().backward()
        graphs = counters["stats"]["unique_graphs"]
    assert not torch.allclose(out, model(x))  # it did run compiled
    found = [(r.call.phase, r.verdict.status) for r in run.records(op="compiled::*")]
    assert found == [("forward", Status.MISMATCH)] * 2 + [("backward", Status.MATCH)]
    (before,) = [s for s in run.coverage().skipped if s.op == "compiled::graph"]
    assert (before.reason, before.n) == ("compiled before the comparison began", 1)
    compiled(x)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("wrong", [False, True])
def test_saved_tensors_with_strides_of_inductors_own_are_no_obstacle(wrong):
    """Convolutions: the graph views what it was traced with as contiguous, and gets channels last."""

    def flattened(x):
        return (x.view(2, -1) * 2,)

    def compiled(x):
        return (x.reshape(2, -1) * (2.01 if wrong else 2),)

    x = torch.randn(2, 3, 4, 5)
    module = make_fx(flattened)(x)
    given = x.contiguous(memory_format=torch.channels_last)
    with compare() as run:
        operators.inductor_compiled_code(CODE(lambda args: compiled(*args), module), [given])
    assert records(run) == [("compiled::graph 0", Status.MISMATCH if wrong else Status.MATCH)]
