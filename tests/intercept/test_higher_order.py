"""Operators that take functions: what they call is compared and has a place, and the program notices nothing."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

import shadowrun
from shadowrun import Phase, Status

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def dynamo():
    """These operators compile themselves, and what Dynamo saw under one mode it would use under another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_both_branches_and_the_loop_around_them_are_seen():
    def body(i, x):
        return i + 1, torch.cond(i > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with shadowrun.compare("cpu[threads=1]") as run:
        while_loop(lambda i, x: i < 2, body, (torch.tensor(0), torch.ones(2)))
    ops = [r.call.op for r in run.records(status=Status.MATCH)]
    assert (ops.count("aten::cos"), ops.count("aten::sin"), ops.count("aten::lt.Scalar")) == (1, 1, 3)


def test_a_call_inside_has_the_place_of_the_operator_around_it():
    class Choice(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x.erf(), lambda x: -x, (x,))

    x = torch.ones(3, requires_grad=True)
    with shadowrun.compare("cpu") as run:
        Choice()(x).sum().backward()
    calls = {r.call.op: r.call for r in run.records()}
    assert (calls["aten::exp"].phase, calls["aten::gt.Scalar"].phase) == (Phase.BACKWARD, Phase.FORWARD)
    inside = [r.call for r in run.records() if r.call.op in ("aten::erf", "aten::exp")]
    assert len(inside) == 3, "erf, and again with its derivative"
    assert {c.module for c in inside} == {"Choice"}
    assert {c.site for c in inside} == {calls["aten::gt.Scalar"].site}


def test_a_fault_inside_is_found(clean_sim):
    with clean_sim.flaws("softmax-error"), shadowrun.compare("sim") as run:
        torch.cond(torch.tensor(True), lambda x: x.softmax(0), lambda x: x + 1, (torch.arange(8.0),))
    assert [f.op for f in run.findings() if f.kind == "mismatch"] == ["aten::_softmax"]


def test_attention_that_is_written_as_a_function_is_compared_whole():
    q = torch.randn(1, 2, 16, 8)
    plain = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))
    with shadowrun.compare("cpu[threads=1]") as run:
        seen = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))
    assert torch.equal(seen, plain)
    ops = {r.call.op for r in run.records(status=Status.MATCH)}
    assert {"aten::bmm", "aten::_safe_softmax", "aten::sub.Tensor"} <= ops, ops


def test_an_exception_inside_leaves_the_modes_in_order():
    def broken(x):
        return torch.linalg.cholesky(-x)

    with shadowrun.compare("cpu") as run:
        with pytest.raises(RuntimeError, match="not positive-definite"):
            torch.cond(torch.tensor(True), broken, broken, (torch.eye(2),))
        torch.ones(2).exp()
    assert [r.call.op for r in run.records()][-1] == "aten::exp"
    torch.ones(2).sin()
    assert not [r for r in run.records() if r.call.op == "aten::sin"]


def test_a_traced_program_keeps_its_own_functions():
    def program(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    plain = make_fx(program)(torch.ones(3)).print_readable(print_output=False)
    with shadowrun.compare("cpu"):
        assert make_fx(program)(torch.ones(3)).print_readable(print_output=False) == plain


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_another_mode_has_its_say(first):
    def loop():
        return torch.cond(torch.tensor(True), lambda x: (x @ x,), lambda x: (x + 1,), (torch.ones(3, 3),))

    plain = FlopCounterMode(display=False)
    counted, run = FlopCounterMode(display=False), shadowrun.compare("cpu[threads=1]")
    with plain:
        expected = loop()
    modes = (counted, run) if first == "theirs" else (run, counted)
    with modes[0], modes[1]:
        found = loop()
    assert all(map(torch.equal, found, expected))
    assert counted.get_total_flops() == plain.get_total_flops()
    assert run.counts()[Status.MATCH] > 0
