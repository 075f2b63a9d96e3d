"""A program without steps has stretches instead: from one call of its module to the next."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shadowrun
from shadowrun import Status
from shadowrun.comparison import steps
from shadowrun.intercept import torchapi
from shadowrun.report.formatting import overhead
from tests.schedule.modes import Counting

LITTLE, MUCH = 1.0001, 1e6


class Looking(nn.Module):
    """Notes whether a mode is there, in a model of two levels."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
        self.seen = []

    def forward(self, x):
        self.seen.append(torchapi.top_mode() is not None)
        if len(x) == 3:
            raise ValueError("three")
        return self.inner(x).exp()


@pytest.fixture(autouse=True)
def any_length(monkeypatch):
    """A stretch may be as short as it likes: no time enters."""
    monkeypatch.setattr(steps, "_MIN_STRETCH_NS", 0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = nn.Module.__call__
    yield
    assert nn.Module.__call__ is before
    assert torchapi.modes() == []


@torch.no_grad()
def update(model):
    """By hand: an optimizer's step would end one."""
    for p in model.parameters():
        p.addcdiv_(p.grad, p.grad.abs() + 1, value=-1e-2)
        p.grad = None


def train(run, n=40):
    torch.manual_seed(0)
    model = Looking()
    x = torch.randn(16, 4)
    losses = []
    with run if run is not None else torch.enable_grad():
        for _ in range(n):
            loss = model(x).square().mean()
            loss.backward()
            update(model)
            losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state(), model.seen


@pytest.mark.parametrize("budget", [LITTLE, 1.2, MUCH])
def test_training_is_unchanged_and_has_no_steps(budget, clean_sim):
    plain = train(None)
    run = shadowrun.compare("sim", budget=budget)
    compared = train(run)
    assert plain[0] == compared[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], compared[1], strict=True))
    assert torch.equal(plain[2], compared[2])
    report = run.info.budget
    assert (report["n_steps"], report["n_stretches"]) == (0, 39)
    assert {record.call.step for record in run.records()} <= {0}


def test_the_first_is_watched_and_later_ones_are_left_alone(clean_sim):
    run = shadowrun.compare("sim", budget=LITTLE)
    seen = train(run)[3]
    assert seen[0]
    assert not all(seen)
    n_alone = run.info.budget["n_unwatched"]
    assert n_alone == seen[1:-1].count(False)  # the last has not ended
    assert f"{n_alone:,} of 39 stretches from one call of the model to the next were skipped" in overhead(run.info)
    assert "took at least" not in overhead(run.info)


def test_where_all_may_be_watched_every_call_has_its_whole_path(clean_sim):
    """Also those of a stretch after an unwatched one."""
    run = shadowrun.compare("sim", budget=MUCH)
    seen = train(run)[3]
    assert seen.count(False) >= 3  # to see how long a plain one is
    assert True in seen[seen.index(False) :]
    of = {op: {record.call.module for record in run.records(op=op)} for op in ("aten::exp", "aten::relu")}
    assert of == {"aten::exp": {"Looking"}, "aten::relu": {"Looking.inner.1"}}


def test_a_persistent_flaw_is_found(clean_sim):
    with clean_sim.flaws("addcdiv-scaled"):
        run = shadowrun.compare("sim", budget=MUCH)
        train(run)
    assert run.counts()[Status.MISMATCH] > 0


@pytest.fixture
def alone(clean_sim):
    """A comparison in a stretch that is left alone, and its model."""
    model = Looking().eval()
    run = shadowrun.compare("sim", budget=LITTLE)
    with run:
        for _ in range(100):  # those that have anything new are watched one after the other, up to 5 ms in debt
            model(torch.ones(2, 4))
            if len(model.seen) > 5 and not model.seen[-1]:
                break
        assert not model.seen[-1]
        yield run, model


def n_stretches(run):
    return run._budget.report().n_stretches


def test_an_exception_passes_and_the_next_call_begins_a_stretch(alone):
    run, model = alone
    before = n_stretches(run)
    with pytest.raises(ValueError, match="three") as caught:
        model(torch.ones(3, 4))
    assert not any(
        entry.path and "shadowrun" in str(entry.path) and "tests" not in str(entry.path) for entry in caught.traceback
    )
    model(torch.ones(2, 4))
    assert n_stretches(run) == before + 2


def test_only_outermost_calls_of_one_module_begin_one(alone):
    run, model = alone
    before = n_stretches(run)
    for _ in range(5):
        nn.ReLU()(torch.ones(1))
        nn.Sequential(model)(torch.ones(2, 4))
    assert n_stretches(run) == before
    model(torch.ones(2, 4))
    assert n_stretches(run) == before + 1


def test_another_module_takes_the_place_of_one_that_does_not_come_any_more(alone):
    run, _ = alone
    before = n_stretches(run)
    other = nn.ReLU()
    for _ in range(70):
        other(torch.ones(1))
    assert n_stretches(run) > before


def test_other_threads_begin_none(alone):
    run, model = alone
    before = n_stretches(run)
    thread = threading.Thread(target=model, args=(torch.ones(2, 4),))
    thread.start()
    thread.join()
    assert n_stretches(run) == before


def test_what_backward_repeats_begins_none(alone):
    run, model = alone
    x = torch.ones(2, 4, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False).sum()
    before, n_calls = n_stretches(run), len(model.seen)
    y.backward()
    assert len(model.seen) == n_calls + 1
    assert n_stretches(run) == before


def test_a_transform_begins_none(alone):
    run, model = alone
    before = n_stretches(run)
    torch.func.vmap(model.inner)(torch.ones(5, 2, 4))
    torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 4))
    assert n_stretches(run) == before


def test_a_mode_of_the_program_stays_alone(alone):
    run, model = alone
    with Counting() as counting:
        for _ in range(20):
            model(torch.ones(2, 4))
        assert torchapi.modes() == [counting]
    assert counting.n > 20
    assert any("mode of its own" in note for note in run.info.notes) or run._steps.watching.kept_out


def test_ours_is_not_taken_from_under_a_mode_of_the_program(clean_sim):
    model = Looking()
    with shadowrun.compare("sim", budget=LITTLE) as run:
        with Counting() as counting:
            for _ in range(20):
                model(torch.ones(2, 4))
            assert torchapi.top_mode() is counting
            assert len(torchapi.modes()) == 2
        assert n_stretches(run) == 0


@pytest.mark.parametrize("watched", [True, False])
def test_the_first_step_ends_them(watched, clean_sim):
    original = nn.Module.__call__
    model = Looking()
    with shadowrun.compare("sim", budget=MUCH if watched else LITTLE) as run:
        while n_stretches(run) < 9 or run._steps.watching.on is not watched:
            model(torch.ones(2, 4))
        before = n_stretches(run)
        run.step()
        for _ in range(10):
            model(torch.ones(2, 4))
            assert nn.Module.__call__ is original or nn.Module.__call__ is run._attribution.call
        assert n_stretches(run) == before
        run.step()
    report = run.info.budget
    assert (report["n_steps"], report["n_stretches"]) == (2, before)


def test_hooks_come_as_often_as_calls(alone):
    _, model = alone
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    for _ in range(10):
        model(torch.ones(2, 4))
    assert seen == ["before", "after"] * 10


@pytest.mark.parametrize("early", [True, False])
def test_what_is_compiled_is_compiled_once(early, clean_sim):
    n_graphs = 0

    def backend(graph, inputs):
        nonlocal n_graphs
        n_graphs += 1
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.ones(2, 4)
    if early:
        compiled(x)
    with shadowrun.compare("cpu", budget=LITTLE) as run, torch.no_grad():
        for _ in range(30):
            compiled(x)
        before = n_graphs
        for _ in range(200):
            compiled(x)
    assert n_graphs == before <= 3
    assert run.info.budget["n_stretches"] > 100
