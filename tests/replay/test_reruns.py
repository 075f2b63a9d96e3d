"""A call that is run again because it was slow is compared again: a device may be wrong in some calls only."""

from __future__ import annotations

import torch

import shadowrun
from shadowrun import Status
from shadowrun.replay.executor import Executor
from shadowrun.replay.paths import same_device
from shadowrun.replay.slow_calls import WORTH_TIMING_NS, SlowCalls


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
    monkeypatch.setattr(SlowCalls, "confirmed_ns", slow_once)
    x = torch.randn(4, 8)
    with shadowrun.compare("sim", ref="cpu") as run:
        torch.tanh(x)
    assert [r.verdict.status for r in run.records()] == [Status.MISMATCH]


def test_reruns_of_a_correct_device_change_nothing(clean_sim, monkeypatch):
    ran = []

    def slow_once(self, plan, actual_ns, expected_ns, again):
        ran.append(plan.name)
        return min(actual_ns, again().ns)

    monkeypatch.setattr(SlowCalls, "confirmed_ns", slow_once)
    x = torch.randn(4, 8)
    with shadowrun.compare("sim", ref="cpu") as run:
        torch.log_softmax(x, 1)
        x.mul_(2.0)
    assert len(ran) >= 2
    assert run.counts()[Status.MISMATCH] == 0


def test_a_wrong_result_of_a_rerun_on_a_shared_device_is_found(monkeypatch):
    """The call is timed again, as it seems slow, and what comes back then is compared too."""
    runs = []
    run_again = Executor.run

    def wrong_when_run_again(self, plan, args, kwargs, **named):
        ran = run_again(self, plan, args, kwargs, **named)
        runs.append(plan.name)
        if len(runs) == 1:
            ran.out = ran.out + 1
        return ran

    monkeypatch.setattr(Executor, "run", wrong_when_run_again)
    monkeypatch.setattr(SlowCalls, "is_slow", lambda *_: True)
    monkeypatch.setattr(same_device, "WORTH_TIMING_NS", 0)
    x = torch.randn(4, 8)
    with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        torch.tanh(x)
    assert "aten::tanh" in runs
    assert [r.verdict.status for r in run.records()] == [Status.MISMATCH]


class Reruns:
    """Runs of a call on the target, with given times."""

    def __init__(self, *ns):
        self.left = list(ns)
        self.index, self.ns = 0, 0

    def __call__(self):
        self.ns = self.left.pop(0)
        return self


def test_an_operator_with_a_fast_call_is_not_run_again():
    """A busy machine makes calls seem slow for as long as it is busy."""
    calls, again = SlowCalls(10.0), Reruns(30 * WORTH_TIMING_NS, WORTH_TIMING_NS // 2, 1, 1)
    times = [calls.confirmed_ns(again, 40 * WORTH_TIMING_NS, 1000, again) for _ in range(3)]
    assert times == [WORTH_TIMING_NS // 2, 40 * WORTH_TIMING_NS, 40 * WORTH_TIMING_NS]
    assert again.left == [1, 1]
    assert not calls.is_confirmed(again, times[2], 1000)


def test_a_slow_operator_is_run_again_until_that_is_certain():
    calls, again = SlowCalls(10.0), Reruns(*[30 * WORTH_TIMING_NS] * 99)
    times = [calls.confirmed_ns(again, 40 * WORTH_TIMING_NS, 1000, again) for _ in range(9)]
    assert times == [30 * WORTH_TIMING_NS] * 8 + [40 * WORTH_TIMING_NS]
    assert len(again.left) == 99 - 8 * 2  # the second run takes what is left of 50 ms
    assert calls.is_confirmed(again, times[8], 1000)
