"""A program that marks no step has one for each step of its optimizer."""

import sys
import threading

import pytest
import torch
import torch.optim.optimizer
from torch import nn

import shadowrun
from shadowrun.comparison.steps import StepOptimizer
from shadowrun.studies.slowdown.calls import read_mix


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.inner(x).square().mean()


def train(n=4, accumulate=1, optimizers=1, mark=None, after=None):
    model = Net()
    stepping = [torch.optim.SGD(model.parameters(), lr=1e-2) for _ in range(optimizers)]
    for _ in range(n):
        for _ in range(accumulate):
            loss = model(torch.ones(2, 4))
            loss.backward()
        for optimizer in stepping:
            optimizer.step()
            optimizer.zero_grad()
        (loss * 3).item()
        if mark is not None:
            mark()
    if after is not None:
        after(model)


def steps_of(run, op):
    return [record.call.step for record in run.records(op=op) if record.call.phase == "forward"]


def squares(run):
    """Steps of the forward calls, in their order."""
    return steps_of(run, "aten::pow.Tensor_Scalar")


def test_each_step_of_the_optimizer_is_one():
    with shadowrun.compare("cpu[threads=1]") as run:
        train(4)
    assert squares(run) == [0, 1, 2, 3]
    # What the loop does after the optimizer belongs to the step that is over.
    assert steps_of(run, "aten::mul.Tensor") == [0, 1, 2, 3]
    assert len(list(run._data.query("select step from step"))) == 4


def test_micro_batches_are_of_one_step():
    with shadowrun.compare("cpu[threads=1]") as run:
        train(3, accumulate=2)
    assert squares(run) == [0, 0, 1, 1, 2, 2]


def test_what_comes_after_the_training_is_a_step_of_its_own():
    with shadowrun.compare("cpu[threads=1]") as run:
        train(2, after=lambda model: model(torch.ones(1, 4)))
    assert squares(run) == [0, 1, 2]


def test_steps_are_selected_by_them():
    with shadowrun.compare("cpu[threads=1]", steps=[1, 2]) as run:
        train(4)
    assert squares(run) == [1, 2]


def test_a_schedule_is_asked_at_each():
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with shadowrun.compare("cpu[threads=1]", schedule=schedule) as run:
        train(4)
    assert squares(run) == [1]


@pytest.mark.parametrize("optimizers", [1, 2, 3])
def test_who_marks_steps_is_believed(optimizers):
    with shadowrun.compare("cpu[threads=1]", steps=[1, 2]) as run:
        train(4, optimizers=optimizers, mark=run.step)
    assert squares(run) == [1, 2]
    with run:
        train(2, optimizers=optimizers)
    assert len(set(squares(run)) - {1, 2}) <= 1, "also in a second block"


def test_an_own_mark_after_several_steps_of_an_optimizer_makes_them_one():
    with shadowrun.compare("cpu[threads=1]") as run:
        for _ in range(3):
            train(3)
            run.step()
    assert set(squares(run)[3:]) == {1, 2}
    assert [row[0] for row in run._data.query("select step from step order by step")] == [0, 1, 2]


def test_a_decorated_function_is_one_step_however_many_its_optimizer_makes():
    compared = shadowrun.compare("cpu[threads=1]")(lambda: train(3))
    compared()
    compared()
    assert squares(compared.run) == [0, 0, 0, 1, 1, 1]


def test_a_gan_has_a_step_for_each_of_its_iterations():
    with shadowrun.compare("cpu[threads=1]") as run:
        critic, generator = Net(), nn.Linear(3, 4)
        of_critic = torch.optim.SGD(critic.parameters(), lr=1e-2)
        of_generator = torch.optim.SGD(generator.parameters(), lr=1e-2)
        for _ in range(4):
            for optimizer in (of_critic, of_generator):
                critic(generator(torch.ones(2, 3))).backward()
                optimizer.step()
    # In the first iteration it is not known yet that another optimizer follows.
    assert squares(run) == [0, 1, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("aaaa", "1111"),
        ("abababab", "10010101"),
        ("abcabcabc", "100001001"),
        ("aaaabaaaabaaaab", "111100111011110"),  # a critic steps more often
        ("aaabbbb", "1110111"),  # another takes over
    ],
)
def test_turns(order, ends):
    turns = StepOptimizer()
    assert "".join("01"[turns.ends(ord(c))] for c in order) == ends


def test_a_program_without_modules_has_steps_too():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-2)
    with shadowrun.compare("cpu[threads=1]") as run:
        for _ in range(5):
            weight.exp().sum().backward()
            optimizer.step()
    assert steps_of(run, "aten::exp") == [0, 0, 2, 3, 4]


def test_a_closure_is_of_one_step():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4))
        loss.backward()
        return loss

    with shadowrun.compare("cpu[threads=1]") as run:
        for _ in range(2):
            optimizer.step(closure)
    assert set(squares(run)) == {0, 1}


def test_optimizers_of_other_threads_and_in_backward_end_none():
    with shadowrun.compare("cpu[threads=1]") as run:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        model = Net()
        for p in model.parameters():
            own = torch.optim.SGD([p], lr=1e-2)
            p.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
        for _ in range(2):
            model(torch.ones(2, 4)).backward()
    assert set(squares(run)) == {0}


def test_nothing_is_left_behind():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    before = dict(hooks)
    with shadowrun.compare("cpu[threads=1]") as run:
        train(2)
        assert len(hooks) == len(before) + 1
        run.step()
        assert hooks == before, "not asked any more"
    with pytest.raises(ValueError, match="mine"), shadowrun.compare("cpu[threads=1]"):
        raise ValueError("mine")
    assert hooks == before


def test_a_compiled_optimizer_has_as_many_graphs_as_before():
    from torch._dynamo.testing import CompileCounter

    def graphs(compared):
        torch._dynamo.reset()
        model, counter = Net(), CompileCounter()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        step = torch.compile(optimizer.step, backend=counter)
        with shadowrun.compare("cpu[threads=1]") if compared else torch.enable_grad():
            for _ in range(3):
                model(torch.ones(2, 4)).backward()
                step()
        return counter.frame_count, counter.op_count

    assert graphs(compared=True) == graphs(compared=False)


@pytest.mark.parametrize("budget", [1.0001, 1e6])
def test_a_budget_counts_them(budget, clean_sim):
    run = shadowrun.compare("sim", budget=budget)
    with run:
        train(30)
    report = run.info.budget
    assert (report["n_steps"], report["n_stretches"]) == (29, 0)
    assert report["n_unwatched"] > 0


def test_with_a_budget_inference_after_a_training_has_stretches(clean_sim, monkeypatch):
    from shadowrun.comparison import steps

    monkeypatch.setattr(steps, "_MIN_STRETCH_NS", 0)
    run = shadowrun.compare("sim", budget=1e6)
    with run:
        train(5, after=lambda model: [model(torch.ones(1, 4)) for _ in range(200)])
    report = run.info.budget
    assert report["n_steps"] == 5
    assert 100 < report["n_stretches"] < 200


def test_drift_and_slowdown_have_them(tmp_path):
    file = tmp_path / "a.shadowrun"
    with shadowrun.compare("cpu[threads=1]", drift=True, file=file) as run:
        train(3)
    assert [row.step for row in run.drift()] == [0, 1, 2]
    assert read_mix(file).n_steps == 3
