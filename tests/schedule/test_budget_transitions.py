"""The overhead budget takes our mode off for whole steps and puts it back: the program is unchanged, nothing lost."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import Status
from shadowrun.intercept import torchapi
from shadowrun.report.formatting import overhead, verified_share
from shadowrun.schedule import budget as budgets
from tests.schedule.modes import Counting

LITTLE = 1.0001
"""After its first step, nothing is watched for long."""
MUCH = 1e6
"""All is watched, but for the steps that time the plain program."""


def left_out(run):
    """Run steps until one is left out: when that is, depends on what the clock says of the machine's load."""
    for _ in range(5000):
        torch.ones(3).exp()
        run.step()
        if torchapi.top_mode() is None:
            return
    raise AssertionError("no step is left out")


def watched(run, most=200):
    """Run steps until one is watched again."""
    for _ in range(most):
        if torchapi.top_mode() is not None:
            return True
        torch.rand(200, 200).exp()
        run.step()
    return False


@pytest.fixture
def run(clean_sim):
    run = shadowrun.compare("sim", budget=LITTLE)
    with run:
        yield run
    assert torchapi.modes() == []


def test_a_mode_that_the_program_enters_in_a_step_left_out_is_not_mixed_up_with_ours(clean_sim):
    run = shadowrun.compare("sim", budget=MUCH)
    with run:
        left_out(run)
        with Counting() as counting:
            for _ in range(60):
                torch.ones(3).exp()
                run.step()
            assert torchapi.modes() == [counting]
        assert torchapi.modes() == []
        assert counting.n == 120
        assert watched(run)
    assert torchapi.modes() == []
    assert any("dispatch mode of its own" in note for note in run.info.notes)


def test_a_mode_above_ours_keeps_ours_where_it_is(clean_sim):
    run = shadowrun.compare("sim", budget=LITTLE)
    with run:
        with Counting() as counting:
            for _ in range(10):
                torch.ones(3).exp()
                run.step()
                assert torchapi.top_mode() is counting
                assert len(torchapi.modes()) == 2
        assert len(torchapi.modes()) == 1
    assert torchapi.modes() == []
    assert run.info.budget["n_unwatched"] == 0


def test_a_mode_below_ours_sees_every_step(clean_sim):
    with Counting() as counting, shadowrun.compare("sim", budget=MUCH) as run:
        for _ in range(20):
            torch.ones(3).exp()
            run.step()
    assert counting.n == 40
    assert 0 < run.info.budget["n_unwatched"] < 20


def test_stopped_and_started_again_while_nothing_is_watched(clean_sim):
    run = shadowrun.compare("sim", budget=LITTLE)
    for _ in range(3):
        with run:
            left_out(run)
            assert nn.Module.__call__.__code__.co_filename == nn.Module._call_impl.__code__.co_filename
        assert torchapi.modes() == []
    assert run.info.budget["n_steps"] >= 3
    assert run.info.complete


def test_stopped_by_another_thread_while_nothing_is_watched(clean_sim):
    run = shadowrun.compare("sim", budget=LITTLE).start()
    left_out(run)
    thread = threading.Thread(target=run.stop)
    thread.start()
    thread.join()
    assert torchapi.modes() == []
    assert torch.ones(2).exp().sum() > 5


def test_a_step_that_another_thread_ends_changes_nothing_on_this_one(clean_sim):
    run = shadowrun.compare("sim", budget=MUCH)
    with run:
        for _ in range(10):
            thread = threading.Thread(target=run.step)
            thread.start()
            thread.join()
            assert len(torchapi.modes()) == 1
    assert run.info.budget["n_unwatched"] == 0
    assert torchapi.modes() == []


def test_threads_of_the_program_are_left_alone_in_such_a_step(run):
    left_out(run)
    before, out = run.counts()[Status.MATCH], []

    def work():
        out.append(torch.ones(4).exp().sum().item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert out[0] > 10
    assert run.counts()[Status.MATCH] == before
    assert run.counts()[Status.SKIPPED] > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_in_such_a_step(run):
    left_out(run)
    child = os.fork()
    if child == 0:
        ok = torchapi.modes() == [] and shadowrun.current() is None and torch.ones(2).exp().numel() == 2
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_exception_that_comes_each_step_does_not_stop_the_rest(clean_sim):
    run = shadowrun.compare("sim", budget=MUCH)
    with run:
        for _ in range(100):  # on a busy machine, pauses count as the cost of comparing
            with pytest.raises(RuntimeError):
                torch.ones(2, 3) @ torch.ones(2, 3)
            time.sleep(0.001)
            torch.ones(3).exp()
            run.step()
    exps = [r for r in run.records() if r.call.op == "aten::exp"]
    assert len(exps) > 20, "verified again and again"


@pytest.mark.parametrize("every", [1, 8, 24])
def test_steps_that_the_user_selects_are_not_those_that_are_left_out(clean_sim, every):
    n = 10 * every
    selected = range(every, n, every)
    run = shadowrun.compare("sim", budget=MUCH, steps=selected)
    with run:
        for _ in range(n):
            time.sleep(0.1 / every)  # time of the program's own: a pause of the machine must cost less than a step
            torch.ones(3).exp()
            run.step()
    compared = {r.call.step for r in run.records()}
    assert compared <= set(selected)
    assert len(compared) >= 5
    if every > 1:
        assert run.info.budget["n_unwatched"] >= 9 * (every - 1)


@pytest.mark.parametrize("every", [1, 4])
def test_the_share_of_verified_calls_counts_those_of_skipped_steps(clean_sim, every):
    x = torch.rand(20_000)
    run = shadowrun.compare("sim", budget=MUCH, steps=range(0, 100, every))
    with run:
        for _ in range(100):
            x.exp()
            x.sin()
            run.step()
    n_verified = sum(r.verdict.status is not Status.SKIPPED for r in run.records())
    assert run.info.budget["n_unwatched"] > 0
    assert n_verified > 0
    share = verified_share(run.info.budget)
    # The step that the end of the run cuts off has no calls.
    assert share == pytest.approx(n_verified / 200, rel=0.05)
    assert f"so that about {100 * share:.2g} % of all calls were verified" in overhead(run.info)


def test_a_decorated_function_is_a_step_each_time(clean_sim):
    @shadowrun.compare("sim", budget=MUCH)
    def step(x):
        return x.exp().sum()

    for _ in range(10):
        assert step(torch.ones(3)) > 8
    report = step.run.info.budget
    assert report["n_steps"] == 10
    assert 0 < report["n_unwatched"] < 10
    assert torchapi.modes() == []


def test_modules_and_lines_are_those_of_a_comparison_without_budget(clean_sim):
    def places(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = shadowrun.compare("sim", **options)
        with run:
            for _ in range(30):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
                run.step()
        return {(r.call.op, r.call.module, r.call.phase, r.call.site) for r in run.records()}

    assert places(budget=MUCH) == places()


def test_a_backward_in_a_watched_step_of_a_forward_in_one_left_out_is_not_placed_wrongly(clean_sim):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    run = shadowrun.compare("sim", budget=MUCH)
    with run:
        for _ in range(100):  # a watched step compares what its budget allows, which may not be this call
            left_out(run)
            loss = model(torch.ones(3, 4)).sum()
            assert watched(run)
            loss.backward()
            placed = {r.call.module for r in run.records(op="aten::tanh_backward")}
            if placed:
                break
    assert placed == {""}, "its forward was in an unwatched step"


def test_a_compiled_module_is_not_compiled_anew_by_leaving_steps_out(clean_sim):
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    compiled = torch.compile(model, backend=counter)
    run = shadowrun.compare("sim", budget=MUCH)
    x = torch.ones(3, 4)
    with run:
        for _ in range(30):
            assert torch.equal(compiled(x), model(x))
            run.step()
    assert 0 < run.info.budget["n_unwatched"] < 30
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_signatures_that_never_come_again_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(budgets, "_MAX_SIGNATURES", 100)
    budget = budgets.Budget(100.0, 1000)
    budget.start(0)
    for n in range(1000):
        now = (n + 1) * 1_000_000
        assert not budget.exhausted(now)
        for signature in ("each step", n):
            if budget.selects(signature):
                budget.verified(signature, 1000)
        budget.spend(now + 1000, 1000)
        budget.watched = budget.end_step(now + 2000, must_watch=True)
    assert len(budget._signatures) <= 100
    assert len(budget._new) <= 100
    assert budget.report().n_signatures == 1001, "what comes in each step is met once"
    assert budget.report().n_verified == 1001
