"""Calls whose judgement is put aside under an overhead budget: verdicts, order and memory are those of one at once."""

from __future__ import annotations

import math

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status, sim
from shadowrun.intercept import torchapi
from shadowrun.replay import postponed_calls as module
from shadowrun.replay.postponed_calls import PostponedCalls
from shadowrun.replay.replayer import Replayer
from shadowrun.schedule.budget import Budget

FLAW = "matmul-in-bf16"


@pytest.fixture
def always(monkeypatch):
    """All calls are put aside, and every call of every step is compared: no clock decides."""
    monkeypatch.setattr(Replayer, "runs_on_target", property(lambda _: True))
    monkeypatch.setattr(Budget, "postpones", property(lambda _: True))
    monkeypatch.setattr(Budget, "exhausted", lambda *_: False)
    monkeypatch.setattr(Budget, "selects", lambda *_: True)
    monkeypatch.setattr(Budget, "end_step", lambda *_, **__: True)
    monkeypatch.setattr(Budget, "judging_ns", 0.0)


def train(run, steps=3):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(24, 24))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for _ in range(steps):
        (torch.ones(4, 24) * 1.37 @ weight).square().mean().backward()
        optimizer.step()  # writes to what the call that waits was given
        optimizer.zero_grad()
        run.step()
    return weight.detach()


def recorded(run):
    return [
        # Without the figures of the oracle: a call judged at once may have known its cause from the call before.
        (
            r.call.op,
            r.call.step,
            r.verdict.status,
            [(d.name, d.n_different, d.max_abs) for d in r.diffs],
            r.verdict.cause,
        )
        for r in run.records()
        if r.verdict.status is Status.MISMATCH
    ]


def test_verdicts_are_those_of_a_judgement_at_once(always, clean_sim):
    with sim.flaws(FLAW):
        with shadowrun.compare("sim") as run:
            weight = train(run)
        with shadowrun.compare("sim", budget=100.0) as later:
            again = train(later)
    assert torch.equal(weight, again)
    assert recorded(later) == recorded(run) != []
    assert {cause for *_, cause in recorded(later)} == {Cause.REDUCED_PRECISION}
    seqs = [r.call.seq for r in later.records()]
    assert sorted(seqs) == list(range(len(seqs))), "each call has its own number"


def test_while_the_program_runs_they_wait_and_a_report_has_them(always, clean_sim):
    with sim.flaws(FLAW), shadowrun.compare("sim", budget=100.0) as run:
        train(run, 1)
        assert run._replayer.has_postponed
        assert torchapi.top_mode() is not None
        assert recorded(run)
        assert not run._replayer.has_postponed
        assert torchapi.top_mode() is not None


@pytest.mark.parametrize(("name", "value"), [("_MAX_WAITING", 1), ("_MAX_BYTES", 0)])
def test_what_finds_no_room_is_judged_at_once(always, clean_sim, monkeypatch, name, value):
    monkeypatch.setattr(module, name, value)
    with sim.flaws(FLAW), shadowrun.compare("sim", budget=100.0) as run:
        train(run, 2)
        assert len(run._replayer._postponed._waiting) == (name == "_MAX_WAITING")
    assert len(recorded(run)) == 4


def test_an_interrupt_leaves_a_record_for_each(always, clean_sim, monkeypatch):
    with sim.flaws(FLAW), shadowrun.compare("sim", budget=100.0) as run:
        train(run, 1)
        n = len(run._replayer._postponed._waiting)

        def interrupt(self):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(PostponedCalls, "_advance", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run._replayer.judge_postponed()
    verdicts = [r.verdict for r in run.records() if "interrupted" in r.verdict.explanation]
    assert len(verdicts) == n > 0
    assert all(v.status is Status.UNVERIFIED for v in verdicts)


class _Parts:
    """A judgement in three parts."""

    def __init__(self):
        self.done = 0

    def __call__(self, case):
        for _ in range(3):
            self.done += 1
            yield
        return "examined"


def test_no_more_time_than_given_but_for_the_part_that_was_begun(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: next(now))
    held, parts, ended = PostponedCalls(lambda: True, lambda: None), _Parts(), []
    monkeypatch.setattr(module, "_copied", lambda case: case)
    monkeypatch.setattr(module, "_tensors", lambda _: [])
    held.add(None, parts, lambda _, examined: ended.append(examined))
    held.judge_for(2)
    assert parts.done == 1
    assert held
    held.judge_for(math.inf)
    assert ended == ["examined"]
    assert not held


def test_a_part_that_would_exceed_the_time_by_far_waits_for_the_next_step(monkeypatch):
    takes, clock = iter([1.0, 4.0, 1.0, 1.0, 1.0, 1.0]), [0.0]

    def parts(_):
        for took in takes:
            clock[0] += took * 1e6
            yield
        return "examined"

    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(module, "_copied", lambda case: case)
    monkeypatch.setattr(module, "_tensors", lambda _: [])
    held, ended, steps = PostponedCalls(lambda: True, lambda: None), [], []
    held.add(None, parts, lambda _, examined: ended.append(examined))
    while held:
        before = clock[0]
        held.judge_for(1.8e6)
        steps.append((clock[0] - before) / 1e6)
    # A first part is assumed to take 2 ms; after one of 4 ms each part has a step of its own for a while.
    assert steps[:4] == [1.0, 4.0, 1.0, 1.0]
    assert ended == ["examined"]


def test_the_last_part_of_a_call_is_as_long_as_that_of_the_call_before(monkeypatch):
    """A dozen short parts come before the one that names the cause: they say nothing about its length."""
    clock = [0.0]

    def parts(_):
        for took in (*[0.1] * 14, 4.0):
            clock[0] += took * 1e6
            yield
        return "examined"

    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(module, "_copied", lambda case: case)
    monkeypatch.setattr(module, "_tensors", lambda _: [])
    held, steps = PostponedCalls(lambda: True, lambda: None), []
    for _ in range(2):
        held.add(None, parts, lambda *_: None)
    while held:
        before = clock[0]
        held.judge_for(4e6)
        steps.append(round((clock[0] - before) / 1e6, 1))
    assert steps[:3] == [5.4, 1.3, 4.1]
