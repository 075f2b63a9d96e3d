"""Memory that copies of small tensors share: no call sees what another left there."""

from __future__ import annotations

import pytest
import torch

import shadowrun
from shadowrun import Status
from shadowrun.replay import input_copies
from shadowrun.replay.executor import Executor
from shadowrun.replay.input_copies import CopyBuffers
from shadowrun.replay.paths import same_device


@pytest.fixture
def wrong_add(monkeypatch):
    """The target adds one too many where a call of `add_` writes to its first argument."""
    call = Executor.call

    def spoiled(self, plan, args, kwargs):
        out = call(self, plan, args, kwargs)
        if plan.name == "aten::add_.Tensor":
            args[0].add_(1)
        return out

    monkeypatch.setattr(Executor, "call", spoiled)


def statuses(run, op):
    return [r.verdict.status for r in run.records() if r.call.op == op]


@pytest.mark.usefixtures("wrong_add")
def test_each_wrong_call_of_a_form_is_found_and_right_ones_are_not():
    x = torch.zeros(5)
    with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        for k in range(4):
            x.add_(k)
            x.mul_(2.0)
    assert statuses(run, "aten::add_.Tensor") == [Status.MISMATCH] * 4
    assert statuses(run, "aten::mul_.Tensor") == [Status.MATCH] * 4
    assert x.tolist() == [22.0] * 5


def test_the_judge_gets_the_values_from_before_the_call(monkeypatch):
    seen = []
    compare_and_record = shadowrun.replay.comparator.Comparator.compare_and_record

    def watched(self, call, pristine, *rest, **named):
        seen.append(pristine[0][0].tolist())
        return compare_and_record(self, call, pristine, *rest, **named)

    monkeypatch.setattr(shadowrun.replay.comparator.Comparator, "compare_and_record", watched)
    call = Executor.call

    def spoiled(self, plan, args, kwargs):
        out = call(self, plan, args, kwargs)
        args[0].add_(1)
        return out

    monkeypatch.setattr(Executor, "call", spoiled)
    x = torch.arange(3.0)
    with shadowrun.compare("cpu[threads=1]", ref="cpu"):
        x.mul_(3.0)
    assert seen == [[0.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 6)[:, ::2],
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.zeros(3, dtype=torch.complex64),
        lambda: torch._neg_view(torch.zeros(3)),
        lambda: torch.zeros(0, 3),
        lambda: torch.zeros(3, dtype=torch.int8),
        lambda: torch.zeros(1).expand(1, 1),
    ],
    ids=["strided", "channels last", "complex", "negated", "empty", "bytes", "expanded"],
)
def test_any_form_is_compared(make):
    expected, x = make().add_(2), make()
    with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        x.add_(2)
    assert torch.equal(x, expected)
    assert statuses(run, "aten::add_.Tensor") == [Status.MATCH]


@pytest.mark.usefixtures("wrong_add")
@pytest.mark.parametrize("size", [2, (1 << 18) + 1], ids=["spare", "too large for one"])
def test_arguments_that_share_memory_are_copied_together(size):
    x = torch.ones(size)
    with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        x.add_(x)
        x[1:].add_(x[:-1].clone())
    assert statuses(run, "aten::add_.Tensor") == [Status.MISMATCH] * 2


def test_inference_tensors_and_others_share_the_memory():
    x = torch.zeros(3)
    with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        with torch.inference_mode():
            torch.zeros(3).add_(1)
        x.add_(1)
        with torch.inference_mode():
            torch.zeros(3).add_(1)
    assert statuses(run, "aten::add_.Tensor") == [Status.MATCH] * 3


def test_what_is_held_is_bounded(monkeypatch):
    monkeypatch.setattr(input_copies, "_MAX_BUFFER_BYTES", 1000)
    held = CopyBuffers(max_bytes=1 << 30)
    for n in range(1, 60):
        assert held.make(torch.zeros(n)) is not None
        assert sum(2 * s.n_bytes for s in held.by_form.values()) <= 1000
    for n in range(1, 60):
        held.drop(held.make(torch.zeros(n)))
    assert held._held <= 1000
    assert CopyBuffers(max_bytes=8).make(torch.zeros(3)) is None


def test_nothing_is_held_after_the_comparison():
    with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        for _ in range(2):  # the first call of a line goes the long way
            torch.zeros(3).add_(1)
        assert run._replayer._paths.same_device.fast.buffers.by_form
    assert not run._replayer._paths.same_device.fast.buffers.by_form


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_an_argument_without_an_address_is_not_known_to_be_apart(layout):
    x = torch.eye(3)
    assert same_device._is_apart(x, (x, torch.eye(3), 2.0))
    assert not same_device._is_apart(x, (x, x[0]))
    assert not same_device._is_apart(x, (x, getattr(torch.eye(3), layout)()))
