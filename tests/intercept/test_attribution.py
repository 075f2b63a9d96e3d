"""Who made a call: module path, phase, line of the user's code; in backward, those of the forward call."""

import sys
import threading

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import Phase


def calls(run, op):
    return [r.call for r in run.records(op=op)]


def only(run, op):
    (call,) = calls(run, op)
    return call


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.first(x)).neg()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.tied = self.blocks[0]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.tied(x).exp()


# -- modules -----------------------------------------------------------------------------------------


def test_paths_are_those_of_named_modules_and_shared_ones_have_one():
    with shadowrun.compare("cpu") as run:
        Net()(torch.ones(1, 3))
    modules = [c.module for c in calls(run, "aten::addmm")]
    assert modules == ["Net.blocks.0.first", "Net.blocks.1.first", "Net.blocks.0.first"]
    assert [c.module for c in calls(run, "aten::neg")] == ["Net.blocks.0", "Net.blocks.1", "Net.blocks.0"]
    assert only(run, "aten::exp").module == "Net"


def test_a_submodule_called_by_itself_keeps_the_path_it_has_in_its_root():
    net = Net()
    with shadowrun.compare("cpu") as run:
        net(torch.ones(1, 3))
        net.blocks[1].act(torch.ones(3))
        torch.ones(3).relu()
    assert [c.module for c in calls(run, "aten::relu")][-2:] == ["Net.blocks.1.act", ""]


def test_a_module_that_is_registered_nowhere_lies_below_its_caller():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = [nn.ReLU()]

        def forward(self, x):
            return self.held[0](x)

    with shadowrun.compare("cpu") as run:
        Hidden()(torch.ones(2))
    assert only(run, "aten::relu").module == "Hidden.ReLU"


def test_two_models_of_one_class_and_a_new_one_at_the_same_address():
    with shadowrun.compare("cpu") as run:
        for _ in range(3):
            nn.Sequential(nn.ReLU())(torch.ones(2))  # dies at once: its id is used again
            nn.ReLU()(torch.ones(2))
    assert [c.module for c in calls(run, "aten::relu")] == ["Sequential.0", "ReLU"] * 3


def test_an_exception_in_forward_leaves_the_stack_as_it_was():
    class Raises(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad = Raises()

        def forward(self, x):
            with pytest.raises(ZeroDivisionError):
                self.bad(x)
            return x.neg()

    with shadowrun.compare("cpu") as run:
        Outer()(torch.ones(2))
        with pytest.raises(ZeroDivisionError):
            Raises()(torch.ones(2))
        torch.ones(2).exp()
    assert only(run, "aten::neg").module == "Outer"
    assert only(run, "aten::exp").module == ""


def test_threads_have_module_stacks_of_their_own():
    """A module that another thread is in must not show up here."""
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            assert go_on.wait(120)
            return x.neg()

    with shadowrun.compare("cpu") as run:
        thread = threading.Thread(target=lambda: Waits()(torch.ones(2)))
        thread.start()
        assert inside.wait(120)
        nn.ReLU()(torch.ones(2))
        torch.ones(2).exp()
        go_on.set()
        thread.join()
    assert only(run, "aten::relu").module == "ReLU"
    assert only(run, "aten::exp").module == ""
    assert only(run, "aten::neg").module == "Waits"


def test_the_wrapper_of_another_library_is_left_alone():
    plain = nn.Module.__call__
    run = shadowrun.compare("cpu").start()
    ours = nn.Module.__call__

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    nn.Module.__call__ = theirs
    try:
        run.stop()
        assert nn.Module.__call__ is theirs
        assert nn.ReLU()(torch.ones(2)).tolist() == [1, 1]
    finally:
        nn.Module.__call__ = plain


# -- phases ------------------------------------------------------------------------------------------


class Halving(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=False), "aten::add_.Tensor"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True), "aten::_foreach_add_.List"),
        (lambda ps: torch.optim.AdamW(ps, fused=True), "aten::_fused_adamw_"),
        (lambda ps: torch.optim.Adam(ps, foreach=True), "aten::_foreach_addcdiv_.ScalarList"),
        (lambda ps: torch.optim.Adam(ps, foreach=False, capturable=False), "aten::addcdiv_"),
        (torch.optim.Adafactor, "aten::*mean*"),
        (Halving, "aten::mul_.Tensor"),
    ],
    ids=["sgd", "sgd foreach", "adamw fused", "adam foreach", "adam", "adafactor", "custom"],
)
def test_optimizers_are_a_phase_every_step(make, op):
    model = nn.Linear(2, 2)
    optimizer = make(list(model.parameters()))
    with shadowrun.compare("cpu") as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.step()
    found = calls(run, op)
    assert {c.step for c in found} == {0, 1, 2}
    assert {c.phase for c in found} == {Phase.OPTIMIZER}
    assert {c.phase for c in calls(run, "aten::addmm")} == {Phase.FORWARD}
    where = "step" if make is Halving else "test_optimizers_are_a_phase_every_step"
    assert all(c.site.endswith(f"in {where}") or c.site.endswith(f"Halving.{where}") for c in found)


def test_an_operator_under_a_python_function_of_torch_in_an_optimizer_is_the_optimizer_s():
    """`1 - tensor` is written in Python: its frame lies between the operator and the optimizer's."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p], lr=torch.tensor(0.1), foreach=False)
    closure_ops = {"aten::rsub.Scalar", "aten::reciprocal", "aten::pow.Scalar", "aten::pow.Tensor_Scalar"}
    with shadowrun.compare("cpu") as run:
        for _ in range(3):
            p.grad = torch.ones(2)
            optimizer.step()
    named = {r.call.op: r.call.phase for r in run.records() if r.call.op not in closure_ops | {"aten::ones"}}
    assert set(named.values()) == {Phase.OPTIMIZER}, named
    lbfgs = torch.optim.LBFGS([p], max_iter=3)

    def closure():
        lbfgs.zero_grad()
        loss = p.cos().sum()
        loss.backward()
        return loss

    with shadowrun.compare("cpu") as run:
        for _ in range(2):
            lbfgs.step(closure)
    phases = {r.call.op: r.call.phase for r in run.records()}
    assert phases["aten::dot"] is Phase.OPTIMIZER
    assert {c.phase for c in calls(run, "aten::cos")} == {Phase.FORWARD}, "the closure is the user's"


# -- lines -------------------------------------------------------------------------------------------


def test_lines_of_functions_lambdas_comprehensions_and_executed_code(monkeypatch, tmp_path):
    with shadowrun.compare("cpu") as run:
        torch.ones(2).neg()
        max([torch.ones(2)], key=lambda x: x.exp().sum())
        [x.sin() for x in (torch.ones(2),)]
        exec("torch.ones(2).cos()", {"torch": torch})
        exec(
            compile("def f(x):\n    return x.tan()\nf(torch.ones(2))", "/elsewhere/notebook.py", "exec"),
            {"torch": torch},
        )
    here = "test_lines_of_functions_lambdas_comprehensions_and_executed_code"
    assert only(run, "aten::neg").site.split(":")[0].endswith("tests/intercept/test_attribution.py")
    assert only(run, "aten::neg").site.endswith(f"in {here}")
    assert only(run, "aten::exp").site.endswith(f"in {here}.<locals>.<lambda>")
    # Python 3.11 runs a list's comprehension in a function of its own (PEP 709 ended that).
    own = ".<locals>.<listcomp>" if sys.version_info < (3, 12) else ""
    assert only(run, "aten::sin").site.endswith(f"in {here}{own}")
    assert only(run, "aten::cos").site == "<string>:1 in <module>"
    assert only(run, "aten::tan").site == "/elsewhere/notebook.py:2 in f"


def test_paths_are_relative_below_the_working_directory(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    source = compile("import torch\ntorch.ones(2).neg()\n", str(script), "exec")
    for directory, shown in ((tmp_path, "train.py:2"), (tmp_path / "sub", f"{script}:2")):
        directory.mkdir(exist_ok=True)
        monkeypatch.chdir(directory)
        with shadowrun.compare("cpu") as run:
            exec(source, {})
        assert only(run, "aten::neg").site == f"{shown} in <module>"


def test_each_call_on_a_line_and_each_line_of_a_function_is_told_apart():
    def body(x):
        x = x.neg()
        return x.neg()

    with shadowrun.compare("cpu") as run:
        for _ in range(2):
            body(torch.ones(2))
    lines = [c.site for c in calls(run, "aten::neg")]
    assert lines[:2] == lines[2:]
    assert lines[0] != lines[1]
