"""`replay=False`: each call is recorded with its place, and nothing runs a second time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import Phase, Status
from shadowrun.replay.executor import Executor
from shadowrun.replay.paths import same_device


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.ReLU())
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4)


def test_calls_are_recorded_with_their_places_and_none_is_replayed(net, monkeypatch):
    def forbidden(*_):
        raise AssertionError("a replay")

    for owner, name in ((Executor, "call"), (Executor, "run"), (same_device, "with_isolated_warnings")):
        monkeypatch.setattr(owner, name, forbidden)
    with shadowrun.compare("cpu[threads=1]", ref="cpu", replay=False) as run:
        train(*net)
    records = list(run.records())
    assert {r.verdict.status for r in records} == {Status.SKIPPED}
    found = {(r.call.op, r.call.module, r.call.phase) for r in records}
    assert ("aten::addmm", "Sequential.0", Phase.FORWARD) in found
    assert ("aten::mm", "Sequential.0", Phase.BACKWARD) in found
    assert any(phase is Phase.OPTIMIZER for _, _, phase in found)
    assert all("test_record_only.py" in r.call.site for r in records)
    (addmm,) = (r for r in records if r.call.op == "aten::addmm")
    assert addmm.call.inputs.startswith("f32[3], f32[2, 4], f32[4, 3]")
    assert run.counts()[Status.MATCH] == 0
    assert run.counts()[Status.SKIPPED] > len(records)  # views are counted
    assert run.findings() == []


@pytest.mark.parametrize("target", ["cpu[threads=1]", "sim"])
def test_the_program_runs_as_it_would_alone(clean_sim, net, target):
    torch.manual_seed(1)
    model, optimizer, x = net
    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected = [train(model, optimizer, x) for _ in range(3)]
    draws = torch.rand(1)
    model.load_state_dict(state)
    torch.manual_seed(1)
    with shadowrun.compare(target, ref="cpu", replay=False):
        assert [train(model, optimizer, x) for _ in range(3)] == expected
        assert torch.equal(torch.rand(1), draws)


def test_what_the_target_lacks_is_not_answered(clean_sim):
    with clean_sim.flaws("missing-cumsum"):
        x = torch.ones(3, device="sim")
        with shadowrun.compare("sim", ref="cpu", replay=False) as run:
            x + 1
            with pytest.raises(NotImplementedError):
                torch.cumsum(x, 0)
    assert [(r.call.op, r.call.device.split(":")[0]) for r in run.records()][:1] == [("aten::add.Tensor", "sim")]


def test_a_selection_is_kept():
    with shadowrun.compare("cpu", replay=False, ops=["aten::add.Tensor"]) as run:
        torch.ones(2).neg() + 1
    assert [r.call.op for r in run.records()] == ["aten::add.Tensor"]


def test_memory_is_bounded():
    x = torch.ones(2)
    with shadowrun.compare("cpu", replay=False, max_records=500) as run:
        for _ in range(4000):
            x.neg()
    assert run.counts()[Status.SKIPPED] == 4000
    assert len(list(run.records())) <= 1500


@pytest.mark.parametrize("other", [{"drift": True}, {"budget": 1.2}, {"compiled": True}])
def test_what_needs_replays_is_refused(other):
    with pytest.raises(shadowrun.UsageError, match="replay=False compares nothing"):
        shadowrun.compare("cpu", replay=False, **other)
