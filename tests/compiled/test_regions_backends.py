"""Regions of backends other than Inductor: each is compared as a whole, once, and nothing is compiled anew for it."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import shadowrun
from shadowrun import Status
from tests.compiled.backends import called, called_split, opaque, split, traced, without
from tests.compiled.regions import compare

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
RELU = (torch.relu, torch.ops.aten.relu.default)
BACKWARD_OF_RELU = torch.ops.aten.threshold_backward.default


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x):
        self.n_calls += 1
        return torch.relu(self.inner(x)) * 2


def train(model, x, steps=2):
    for _ in range(steps):
        out = model(x)
        out.sum().backward()
    return out


def compared(backend, **options):
    """A model trained for two steps inside of a comparison, and the run."""
    model, x = Net(), torch.randn(5, 4)
    with compare(**options) as run:
        train(torch.compile(model, backend=backend), x)
    return model, run


def rows(run):
    return [(str(r.phase), r.n_calls, r.status) for r in run.regions().rows]


def operators(run):
    return {s.op: s.n_calls for s in run.summary()}


def test_an_opaque_backend_is_one_region_and_what_runs_inside_of_it_no_operators():
    _, run = compared(traced)
    assert rows(run) == [("forward", 2, Status.MATCH)]
    (region,) = run.regions().rows
    assert region.backend == "traced"
    assert region.n_operators == 4
    assert "test_regions_backends.py" in region.site
    assert "in forward" in region.site
    assert not {"aten::addmm", "aten::relu", "aten::t"} & operators(run).keys()
    assert operators(run)["aten::sum"] == 2  # the program's, outside of it


def test_a_fault_of_it_is_seen():
    spoil = without(*RELU)
    _, run = compared(lambda m, i: traced(spoil(m), i))
    assert rows(run) == [("forward", 2, Status.MISMATCH)]
    assert run.gate().line.startswith("FAILED: 1 mismatch; 1 compiled region: 1 mismatch")
    assert "compile_check" in run.findings()[0].next_step


def test_a_graph_that_a_backend_rewrote_and_returned_is_compared_with_what_it_was():
    """Operators called one by one are each right; that they are others than the program's, only the region shows."""
    spoil = without(*RELU)
    _, run = compared(lambda m, _: spoil(m).forward)
    assert rows(run) == [("forward", 2, Status.MISMATCH)]


def test_a_graph_that_came_back_as_it_was_is_no_region():
    _, run = compared(lambda m, _: m.forward)
    assert rows(run) == []
    assert operators(run)["aten::relu"] == 2


@pytest.mark.parametrize(
    ("backend", "forward", "backward"),
    [
        (split(), Status.MATCH, Status.MATCH),
        (split(forward=without(*RELU)), Status.MISMATCH, Status.MATCH),
        (split(backward=without(BACKWARD_OF_RELU)), Status.MATCH, Status.MISMATCH),
    ],
)
def test_forward_and_backward_are_judged_each(backend, forward, backward):
    _, run = compared(backend)
    assert sorted(rows(run)) == [("backward", 2, backward), ("forward", 2, forward)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", called, called_split])
def test_operators_called_one_by_one_are_no_region(backend):
    _, run = compared(backend)
    assert rows(run) == []
    assert run.regions().line == ""
    plain, x = torch.compile(Net(), backend=backend), torch.randn(5, 4)
    with shadowrun.compare("cpu[threads=1]") as without_regions:
        train(plain, x)
    assert operators(run) == operators(without_regions)


@pytest.mark.parametrize("backend", [traced, split(), called, "eager", "aot_eager"])
def test_the_program_gets_what_it_would_have_got(backend):
    torch.manual_seed(0)
    model, run = compared(backend)
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone, x = Net(), torch.randn(5, 4)
    train(torch.compile(alone, backend=backend), x)
    assert torch.equal(model.n_calls, alone.n_calls)  # written once a call
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert run.internal_failures() == []


@pytest.mark.parametrize("backend", [traced, split(), called, "eager"])
def test_nothing_is_compiled_anew_and_what_was_compiled_before_is_counted(backend):
    model, x = torch.compile(Net(), backend=backend), torch.randn(5, 4)
    train(model, x, 1)
    gc.collect()  # code of earlier tests takes its names along when it goes
    before = {name for name in globals() if name.startswith("__compiled_fn")}
    frames = dict(counters["stats"])
    with compare() as run:
        train(model, x, 3)
    train(model, x, 1)
    assert dict(counters["stats"]) == frames
    assert before == {name for name in globals() if name.startswith("__compiled_fn")}
    assert not any("shadowrun" in (globals()[name].__module__ or "") for name in before)
    skipped = [(s.reason, s.n) for s in run.regions().skipped]
    one_by_one = backend in ("eager", called)
    assert skipped == ([] if one_by_one else [("compiled before the comparison began", 3)])
    if one_by_one:
        assert operators(run)["aten::addmm"] == 3


def test_what_was_compiled_in_one_comparison_is_compared_in_the_next():
    model, x = torch.compile(Net(), backend=split()), torch.randn(5, 4)
    with compare():
        train(model, x, 1)
    train(model, x, 1)
    frames = dict(counters["stats"])
    with compare() as run:
        train(model, x, 3)
    assert dict(counters["stats"]) == frames
    assert sorted(rows(run)) == [("backward", 3, Status.MATCH), ("forward", 3, Status.MATCH)]
    with shadowrun.compare("cpu[threads=1]") as plain:  # without the option: as before
        train(model, x, 1)
    assert plain.regions().rows == ()


def test_what_it_raises_is_the_programs():
    def broken(module, inputs):
        def run(*args):
            raise ArithmeticError("no such kernel")

        return run

    model = torch.compile(Net(), backend=broken)
    with compare() as run, pytest.raises(ArithmeticError, match="no such kernel"):
        model(torch.randn(5, 4))
    assert rows(run) == []


def test_other_draws_of_a_backend_are_no_fault():
    def redrawing(module, inputs):
        def begin_elsewhere_in_the_stream(*args):
            torch.rand(3)
            return module(*args)

        return opaque(begin_elsewhere_in_the_stream, inputs)

    compiled = torch.compile(lambda x: nn.functional.dropout(x, 0.5) * 2, backend=redrawing)
    with compare() as run:
        compiled(torch.ones(50))
    (region,) = run.regions().rows
    assert region.status is Status.UNVERIFIED
    assert region.cause == "randomness"
    assert "compile_check" in region.next_step
    assert "mismatch" not in run.gate().line


def test_inputs_that_would_not_fit_are_not_copied():
    _, run = compared(split(), max_bytes=8)
    assert {r.status for r in run.regions().rows} == {Status.UNVERIFIED}
    assert all("max_bytes" in r.explanation for r in run.regions().rows)
    assert "2 compiled regions: 2 unverified" in run.gate().line


def test_dynamic_sizes_are_one_region():
    compiled = torch.compile(Net(), backend=split(), dynamic=True)
    with compare() as run:
        for n in (3, 5, 8):
            compiled(torch.randn(n, 4)).sum().backward()
    assert sorted(rows(run)) == [("backward", 3, Status.MATCH), ("forward", 3, Status.MATCH)]


def test_inputs_that_share_memory_share_it_in_the_eager_run_too():
    def add_and_read(x, y):
        x.add_(1)
        return y * 2

    def no_add(module, inputs):
        return opaque(without("add_")(module), inputs)

    for backend, status in ((opaque, Status.MATCH), (no_add, Status.MISMATCH)):
        torch._dynamo.reset()
        x = torch.randn(4, 3)
        with compare() as run:
            out = torch.compile(add_and_read, backend=backend)(x, x[1:, 1])
        assert torch.equal(out, x[1:, 1] * 2)
        assert [r.status for r in run.regions().rows] == [status]
        if status is Status.MISMATCH:
            (record,) = run.records(status="mismatch")
            assert {d.name for d in record.diffs} >= {"l_x_", "l_y_"}
