"""Calls on the edge of what the compiled handler takes, and what it remembers: the same as by Python."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

import shadowrun
from shadowrun import Status, native

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")

aten = torch.ops.aten


class Named(torch.Tensor):
    """Has no handler of its own: calls with it come to ours."""


class Weight(torch.nn.Parameter):
    """As many libraries have one."""


def statuses(run, op):
    return [r.verdict.status for r in run.records(op=op)]


@pytest.mark.parametrize("kind", [Named, Weight], ids=lambda k: k.__name__)
def test_an_argument_of_a_subclass_on_the_memory_that_is_written_to(either, kind):
    with shadowrun.compare("cpu") as run:
        for _ in range(3):
            x = torch.full((3,), 2.0)
            x.mul_(x.as_subclass(kind))
            assert x.tolist() == [4.0] * 3
    assert statuses(run, "aten::mul_.Tensor") == [Status.MATCH] * 3


def test_memory_that_a_failing_replay_moved_is_not_written_to(replays, either):
    n_calls = []

    def third_fails(run, args, kwargs):
        n_calls.append(1)
        if len(n_calls) == 3:
            args[0].resize_(5000)
            raise RuntimeError("planted")
        return run(*args, **kwargs)

    replays(aten.mul_.Tensor, third_fails)
    x, two = torch.ones(3), torch.tensor(2.0)
    with warnings.catch_warnings(), shadowrun.compare("cpu") as run:
        warnings.simplefilter("ignore")
        for _ in range(5):
            x.mul_(two)
            kept = run._replayer._shortest.spares.by_form.values()
            assert [s.work.data_ptr() for s in kept] == [s.work_at for s in kept]
    assert x.tolist() == [32.0] * 3
    assert statuses(run, "aten::mul_.Tensor") == [Status.MATCH, Status.MATCH, Status.ERROR, Status.MATCH, Status.MATCH]


def test_a_device_is_remembered_once():
    """Torch makes a new one for each call; each would be a context of its own."""
    with shadowrun.compare("cpu") as run:
        for _ in range(50):
            torch.zeros(3)
        held = gc.get_referents(run._replayer.quick)
    assert sum(type(v) is torch.device for v in held) <= 3
