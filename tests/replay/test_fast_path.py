"""The short ways of calls on one device: what differs there is found, whatever form the results have."""

from __future__ import annotations

import pytest
import torch

import shadowrun
from shadowrun import Status
from shadowrun.replay.executor import Executor


def spoil(value):
    """Make a result wrong: the first tensor of several, in place where the call wrote to it, or a number."""
    if isinstance(value, (list, tuple)):
        return type(value)([spoil(value[0]), *value[1:]])
    return value + 1


def spoil_written(args):
    args[0][0].add_(1)


CALLS = {
    "one tensor": ("aten::tanh", lambda: torch.tanh(torch.ones(3))),
    "several": ("aten::topk", lambda: torch.topk(torch.arange(5.0), 2)),
    "list": ("aten::_foreach_add.Scalar", lambda: torch._foreach_add([torch.ones(2), torch.ones(3)], 1.0)),
    "number": ("aten::_local_scalar_dense", lambda: torch.ones(1).item()),
    "written list": ("aten::_foreach_mul_.Scalar", lambda: torch._foreach_mul_([torch.ones(2), torch.ones(3)], 2.0)),
}


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_result_is_found(monkeypatch, name, wrong):
    op, program = CALLS[name]
    call = Executor.call

    def spoiled(self, plan, args, kwargs):
        out = call(self, plan, args, kwargs)
        if not wrong or plan.name != op:
            return out
        if plan.mutated:
            spoil_written(args)
            return out
        return spoil(out)

    monkeypatch.setattr(Executor, "call", spoiled)
    with shadowrun.compare("cpu[threads=1]") as run:
        program()
    found = [r.verdict.status for r in run.records() if r.call.op == op]
    assert found == [Status.MISMATCH if wrong else Status.MATCH]


@pytest.mark.parametrize("number", [1.5, float("nan"), float("-inf"), -0.0, 3, 2**62 + 1, True, 1 - 2j])
def test_numbers_are_compared_by_their_bits(number):
    with shadowrun.compare("cpu[threads=1]") as run:
        got = torch.tensor(number).item()
    assert type(got) is type(number)
    assert repr(got) == repr(number)
    (found,) = [r for r in run.records() if r.call.op == "aten::_local_scalar_dense"]
    assert found.verdict.status is Status.MATCH


@pytest.mark.parametrize(("right", "wrong"), [(0.0, -0.0), (1.0, 1), (1, True), (1.0, float("nan"))])
def test_a_number_of_another_kind_or_sign_is_found(monkeypatch, right, wrong):
    call = Executor.call

    def spoiled(self, plan, args, kwargs):
        out = call(self, plan, args, kwargs)
        return wrong if plan.name == "aten::_local_scalar_dense" else out

    monkeypatch.setattr(Executor, "call", spoiled)
    with shadowrun.compare("cpu[threads=1]") as run:
        assert repr(torch.tensor(right).item()) == repr(right)
    (found,) = [r for r in run.records() if r.call.op == "aten::_local_scalar_dense"]
    assert found.verdict.status is Status.MISMATCH
