"""A call that is run again because it was slow is compared again: a device may be wrong in some calls only."""

from __future__ import annotations

import torch

import shadowrun
from shadowrun import Status
from shadowrun.replay.comparing import Comparing
from shadowrun.replay.execution import Executor


def test_a_wrong_result_of_a_rerun_is_found(clean_sim, monkeypatch):
    runs = []
    run_mirrored = Executor.run_mirrored

    def wrong_in_the_second_run(self, *call):
        ran = run_mirrored(self, *call)
        runs.append(ran)
        if len(runs) == 2:
            ran.out = ran.out + 1
        return ran

    def slow_once(self, plan, actual_ns, expected_ns, again):
        return min(actual_ns, again().ns)

    monkeypatch.setattr(Executor, "run_mirrored", wrong_in_the_second_run)
    monkeypatch.setattr(Comparing, "confirmed_ns", slow_once)
    x = torch.randn(4, 8)
    with shadowrun.compare("sim", ref="cpu") as run:
        torch.tanh(x)
    assert [r.verdict.status for r in run.records()] == [Status.MISMATCH]


def test_reruns_of_a_correct_device_change_nothing(clean_sim, monkeypatch):
    ran = []

    def slow_once(self, plan, actual_ns, expected_ns, again):
        ran.append(plan.name)
        return min(actual_ns, again().ns)

    monkeypatch.setattr(Comparing, "confirmed_ns", slow_once)
    x = torch.randn(4, 8)
    with shadowrun.compare("sim", ref="cpu") as run:
        torch.log_softmax(x, 1)
        x.mul_(2.0)
    assert len(ran) >= 2
    assert run.counts()[Status.MISMATCH] == 0
