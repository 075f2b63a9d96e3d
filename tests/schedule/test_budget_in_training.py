"""The overhead budget in real training: nothing changes, what persists is found, the report says what was done."""

from __future__ import annotations

import collections
import threading

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import Status, sim
from shadowrun.errors import UsageError
from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import dispatch_overhead_ns
from shadowrun.report.formatting import overhead
from shadowrun.schedule.budget import Budget


def train(run, device="cpu", steps=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(16, 12).to(device), torch.randint(0, 3, (16,)).to(device)
    losses = []

    def step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if run is None:
        for _ in range(steps):
            step()
    else:
        with run:
            for _ in range(steps):
                step()
                run.step()
    return losses, [p.detach().cpu().clone() for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("budget", [1.05, 1.5, 100.0])
def test_training_is_unchanged_and_all_signatures_are_verified(budget, clean_sim):
    plain = train(None)
    run = shadowrun.compare("sim", ref="cpu", budget=budget)
    compared = train(run)
    assert plain[0] == compared[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], compared[1], strict=True))
    assert torch.equal(plain[2], compared[2])
    assert run.counts()[Status.MISMATCH] == 0
    report = run.info.budget
    assert report["n_verified"] <= report["n_signatures"]
    assert report["n_signatures"] > 30 or not report["n_passes"], "not all are met where the time is too short"
    assert report["n_steps"] == 40
    assert torchapi.top_mode() is None


def test_where_the_budget_is_large_everything_is_verified_and_a_persistent_flaw_found(clean_sim):
    with sim.flaws("addcdiv-scaled"):
        run = shadowrun.compare("sim", ref="cpu", budget=1000.0)
        train(run)
    report = run.info.budget
    assert report["n_verified"] == report["n_signatures"] > 30
    assert {r.call.op for r in run.records() if r.verdict.status is Status.MISMATCH} == {"aten::addcdiv_"}


def test_a_program_on_the_target_gets_its_missing_operators_answered_in_every_step(clean_sim):
    plain = train(None, "sim", steps=6)
    with sim.flaws("missing-lerp"):
        run = shadowrun.compare("sim", ref="cpu", budget=1.05)
        compared = train(run, "sim", steps=6)
    assert len(plain[0]) == len(compared[0]) == 6
    assert run.info.budget["n_unwatched"] <= 1, "calls must be seen to be answered"


def test_what_was_left_out_is_counted_and_reported(tmp_path):
    file = tmp_path / "run.shadowrun"
    run = shadowrun.compare("cpu", budget=1.1, file=file)
    train(run)
    report = tmp_path / "report.txt"
    shadowrun.load(file).write(report)
    assert "call signatures" in report.read_text()
    assert run.counts()[Status.SKIPPED] > 0


@pytest.mark.parametrize("steps", [True, False])
def test_without_steps_the_report_calls_its_figure_a_lower_bound_and_asks_for_them(steps):
    with shadowrun.compare("cpu", budget=1.2) as run:
        for _ in range(50):
            torch.rand(8, 8) @ torch.rand(8, 8)
            if steps:
                run.step()
    text = overhead(run.info)
    assert ("took at least" in text) is not steps
    assert ("call run.step()" in text) is not steps


def test_options_that_contradict_it_are_refused():
    with pytest.raises(UsageError, match="drift=True needs every call"):
        shadowrun.compare("cpu", budget=1.2, drift=True)
    for bad in (1, 0.5, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="budget="):
            shadowrun.compare("cpu", budget=bad)


def test_what_handing_over_costs_is_measured_unseen_by_the_user_s_modes():
    class Counting(torchapi.DispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.n += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        ns = dispatch_overhead_ns()
    assert Counting.n == 0
    assert 100 < ns < 1e6


@pytest.fixture(params=["C", "Python"])
def no_time(request, monkeypatch):
    """A comparison on the CPU whose budget allows nothing more, and that has watched no step yet."""
    monkeypatch.setattr(Budget, "exhausted", lambda self, now: True)
    run = shadowrun.compare("sim", budget=1.2)
    if request.param == "Python":
        run._replayer.native_handler = None
    return run


def test_every_call_that_is_passed_on_is_counted_by_its_reason(no_time, clean_sim):
    names = collections.Counter()

    class Counting(torchapi.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names[func.name()] += 1
            return func(*args, **(kwargs or {}))

    layer, x = nn.Linear(4, 4), torch.ones(4, 4)

    def calls():
        y = torch.empty(4).fill_(2) + layer(x).t().relu()
        y.sum().backward()
        return torch.bernoulli(torch.full((4,), 0.5))

    torch.manual_seed(3)
    with Counting():
        plain = calls()
    grad, layer.weight.grad, layer.bias.grad = layer.weight.grad, None, None
    torch.manual_seed(3)
    with no_time as run:
        compared = calls()
    assert torch.equal(plain, compared)
    assert torch.equal(grad, layer.weight.grad)
    skipped = run._read().skipped
    assert collections.Counter({s.op: s.n for s in skipped}) == names
    reasons = {(s.op, s.reason) for s in skipped}
    assert ("aten::t", "view: metadata only") in reasons
    assert ("aten::relu", "overhead budget") in reasons


@pytest.mark.parametrize("move", [lambda x: x.to("sim"), lambda x: torch.ones_like(x, device="sim")])
def test_a_program_that_moves_to_the_target_while_calls_are_passed_on_is_answered_there(no_time, move, clean_sim):
    x, weight = torch.ones(3), torch.tensor(0.5)
    with sim.flaws("missing-lerp"), no_time as run:
        x.neg().exp()
        y = move(x)
        y.lerp_(weight * y, 0.5)
    assert y.tolist() == [0.75] * 3
    assert run.counts()[Status.UNSUPPORTED] == 1


def test_calls_of_another_selection_are_passed_on_too(clean_sim):
    run = shadowrun.compare("sim", budget=1000.0, ops=["relu"])
    with run:
        for _ in range(3):
            (torch.ones(3) + 1).relu()
            run.step()
    assert {s.op for s in run.summary() if s.n_match} == {"aten::relu"}
    assert {(s.op, s.reason): s.n for s in run._read().skipped}["aten::add.Tensor", "operator not selected"] >= 1


def test_the_budget_is_not_asked_while_another_thread_holds_the_lock(monkeypatch):
    asked = []
    monkeypatch.setattr(Budget, "exhausted", lambda self, now: asked.append(now) or True)
    run = shadowrun.compare("cpu", budget=1.2)
    with run:
        torch.ones(2).neg()
        plan = next(p for p in run._replayer.plans.values() if p.name == "aten::neg")
        pass_through, n_asked, answers = run._replayer._pass_through, len(asked), []
        with run._replayer.lock:
            thread = threading.Thread(target=lambda: answers.append(pass_through.unwanted(plan)))
            thread.start()
            thread.join()
        assert len(asked) == n_asked
        answers.append(pass_through.unwanted(plan))
    assert answers == ["", "overhead budget"]
