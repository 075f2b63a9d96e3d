"""A call that is run again because it was slow is compared again: a device may be wrong in some calls only."""

from __future__ import annotations

import pytest
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

    def slow_once(self, plan, actual_ns, expected_ns, again, reference_again):
        return min(actual_ns, again().ns), expected_ns

    monkeypatch.setattr(Executor, "run_mirrored", wrong_in_the_second_run)
    monkeypatch.setattr(SlowCalls, "confirmed", slow_once)
    x = torch.randn(4, 8)
    with shadowrun.compare("sim", ref="cpu") as run:
        torch.tanh(x)
    assert [r.verdict.status for r in run.records()] == [Status.MISMATCH]


def test_reruns_of_a_correct_device_change_nothing(clean_sim, monkeypatch):
    ran = []

    def slow_once(self, plan, actual_ns, expected_ns, again, reference_again):
        ran.append(plan.name)
        return min(actual_ns, again().ns), expected_ns

    monkeypatch.setattr(SlowCalls, "confirmed", slow_once)
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
    """Runs of a call on one platform, with given times."""

    def __init__(self, *ns):
        self.left = list(ns)
        self.index, self.ns = 0, 0

    def __call__(self):
        self.ns = self.left.pop(0)
        return self


def test_an_operator_with_a_fast_call_is_not_run_again():
    """A busy machine makes calls seem slow for as long as it is busy."""
    calls, again = SlowCalls(10.0), Reruns(30 * WORTH_TIMING_NS, WORTH_TIMING_NS // 2, 1, 1)
    reference = Reruns(1000)
    times = [calls.confirmed(again, 40 * WORTH_TIMING_NS, 1000, again, reference)[0] for _ in range(3)]
    assert times == [WORTH_TIMING_NS // 2, 40 * WORTH_TIMING_NS, 40 * WORTH_TIMING_NS]
    assert again.left == [1, 1]
    assert not calls.is_confirmed(again, times[2], 1000)


def test_a_slow_operator_is_run_again_until_that_is_certain():
    calls, again = SlowCalls(10.0), Reruns(*[30 * WORTH_TIMING_NS] * 99)
    reference = Reruns(*[2000] * 16)
    times = [calls.confirmed(again, 40 * WORTH_TIMING_NS, 1000, again, reference) for _ in range(9)]
    assert times == [(30 * WORTH_TIMING_NS, 1000)] * 8 + [(40 * WORTH_TIMING_NS, 1000)]
    assert len(again.left) == 99 - 8 * 2  # the second run takes what is left of 50 ms
    assert calls.is_confirmed(again, *times[8])


def test_a_processor_that_is_busy_for_all_reruns_of_the_target_confirms_nothing():
    calls, again, reference = SlowCalls(10.0), Reruns(*[3 * WORTH_TIMING_NS] * 3), Reruns(2000, 2 * WORTH_TIMING_NS)
    times = calls.confirmed(again, 3 * WORTH_TIMING_NS, 1000, again, reference)
    assert times == (3 * WORTH_TIMING_NS, 2 * WORTH_TIMING_NS)
    assert not calls.is_confirmed(again, 3 * WORTH_TIMING_NS, 1000)


@pytest.mark.parametrize(("busy", "kinds"), [(True, []), (False, ["slow"])], ids=["busy machine", "slow target"])
def test_an_operator_is_slow_only_where_the_reference_is_fast_beside_it(clean_sim, monkeypatch, busy, kinds):
    run_mirrored = Executor.run_mirrored

    def waits(self, *call):
        ran = run_mirrored(self, *call)
        if busy or self.platform.device.type == "sim":
            ran.ns = 30 * WORTH_TIMING_NS
        return ran

    monkeypatch.setattr(Executor, "run_mirrored", waits)
    x = torch.randn(4, 8)
    with shadowrun.compare("sim", ref="cpu") as run:
        for _ in range(4):
            torch.tanh(x)
    assert [f.kind for f in run.findings()] == kinds
