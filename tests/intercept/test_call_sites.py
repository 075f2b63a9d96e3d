"""Lines of user code: what is remembered from one call to the next must not outlive what it was true of."""

import contextlib
import gc
import sys

import torch
from torch import nn

import shadowrun
from shadowrun import Phase
from shadowrun.intercept import call_sites
from shadowrun.intercept.call_sites import CallSites


def sites_of(run, op):
    return [r.call.site.rpartition(" in ")[2] for r in run.records(op=op)]


def lines_of(run, op):
    return [int(r.call.site.partition(":")[2].partition(" ")[0]) for r in run.records(op=op)]


def test_one_module_called_from_two_lines():
    relu = nn.ReLU()
    x = torch.ones(2)
    with shadowrun.compare("cpu") as run:
        for _ in range(3):
            relu(x)
            relu(x)
    first, second = lines_of(run, "aten::relu")[:2]
    assert second == first + 1
    assert lines_of(run, "aten::relu") == [first, second] * 3


def test_user_code_between_two_modules_is_the_place():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Sequential(nn.ReLU()), nn.Tanh())

        def forward(self, x):
            x = self.inner(x).relu()
            return helper(self.inner, x)

    def helper(module, x):
        return module(x)

    def main(net, x):
        return nn.Sequential(net, nn.ReLU())(x)

    with shadowrun.compare("cpu") as run:
        main(Between(), torch.ones(2))
    here = "test_user_code_between_two_modules_is_the_place.<locals>."
    forward = f"{here}Between.forward"
    assert sites_of(run, "aten::relu") == [forward, forward, f"{here}helper", f"{here}main"]
    assert sites_of(run, "aten::tanh") == [forward, f"{here}helper"]


def test_a_hook_of_the_user_inside_a_module_is_the_place():
    def hook(module, args, out):
        return out.exp()

    net = nn.Sequential(nn.ReLU(), nn.ReLU())
    net[0].register_forward_hook(hook)
    with shadowrun.compare("cpu") as run:
        net(torch.ones(2))
    assert sites_of(run, "aten::exp")[0].endswith("hook")
    assert [s.endswith("inside_a_module_is_the_place") for s in sites_of(run, "aten::relu")] == [True, True]


def test_a_comparison_that_starts_again_inside_a_module_finds_lines_still():
    run = shadowrun.compare("cpu")

    class Restarts(nn.Module):
        def forward(self, x):
            run.stop()
            run.start()
            return inner(nn.ReLU(), x)

    def inner(module, x):
        return module(x).exp()

    run.start()
    Restarts()(torch.ones(2))
    run.stop()
    assert [s.rpartition(".")[2] for s in sites_of(run, "aten::relu") + sites_of(run, "aten::exp")] == ["inner"] * 2


def test_an_exception_in_a_module_leaves_no_line_behind():
    class Raises(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError(x.neg())

    class Outer(nn.Module):
        def forward(self, x):
            with contextlib.suppress(ZeroDivisionError):
                Raises()(x)
            return caller(x)

    def caller(x):
        return nn.ReLU()(x)

    with shadowrun.compare("cpu") as run:
        Outer()(torch.ones(2))
    assert [s.rpartition(".")[2] for s in sites_of(run, "aten::relu")] == ["caller"]


def test_an_optimizer_stepped_from_two_lines_and_below_a_module():
    """Frames of `torch.optim` begin at the same address again and again: each has its own caller."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])

    class Steps(nn.Module):
        def forward(self):
            optimizer.step()

    weight.grad = torch.ones(3)
    steps = Steps()
    with shadowrun.compare("cpu") as run:
        for _ in range(2):
            optimizer.step()
            optimizer.step()
            steps()
    first, second, inner = lines_of(run, "aten::addcdiv_")[:3]
    assert second == first + 1
    assert lines_of(run, "aten::addcdiv_") == [first, second, inner] * 2
    assert [r.call.module for r in run.records(op="aten::addcdiv_")] == ["", "", "Steps"] * 2
    assert {r.call.phase for r in run.records(op="aten::addcdiv_")} == {Phase.OPTIMIZER}
    assert sites_of(run, "aten::addcdiv_")[2].endswith("Steps.forward")


def in_file(name, text):
    """Functions whose code says that it stands in a file."""
    made = {}
    exec(compile(text, name, "exec"), made)
    return made


OPTIMIZER_CODE = """
def step(find):
    return [find() for _ in range(2)], find()

def each(find):
    while True:
        yield find()
"""
IN_OPTIM = call_sites._OPTIM_DIR + "planted.py"


def test_a_mark_is_of_one_activation():
    step = in_file(IN_OPTIM, OPTIMIZER_CODE)["step"]
    finder = CallSites()

    def find():
        return finder.find(sys._getframe(1), [], -1)[:2]

    def one():
        return step(find)

    def two():
        return step(find)

    for function in (one, two, one):
        (first, again), last = function()
        assert first == again == last
        assert first[1] is True
        assert first[0].endswith(f"<locals>.{function.__name__}")


def test_a_generator_gets_no_mark():
    """It goes on below whoever asks for its next value."""
    finder = CallSites()

    def find():
        return finder.find(sys._getframe(1), [], -1)[0]

    generator = in_file(IN_OPTIM, OPTIMIZER_CODE)["each"](find)

    def one():
        return next(generator)

    def two():
        return next(generator)

    assert [f().rpartition(".")[2] for f in (one, two, one)] == ["one", "two", "one"]


def test_the_mark_leaves_debuggers_alone():
    step = in_file(IN_OPTIM, "def step(find):\n    find()\n    return find()\n")["step"]
    finder, traced = CallSites(), []

    def find():
        frame = sys._getframe(1)
        before = frame.f_trace
        finder.find(frame, [], -1)
        return before, frame.f_trace

    def trace(frame, event, _):
        traced.append(event)
        return trace if frame.f_code is step.__code__ else None

    before, mark = step(find)
    assert mark is before  # the first call put it there
    assert not mark  # `bdb` puts its own where it finds something false
    assert mark(None, "line", None) is None

    def waiting():  # until tracing begins
        frame = sys._getframe(1)
        frame.f_trace = trace
        finder.find(frame, [], -1)
        return frame.f_trace

    assert step(waiting) is trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        before, after = step(find)
    finally:
        sys.settrace(old)
    assert before is after is trace
    sys.settrace(lambda *_: None)
    try:
        assert step(find) == (None, None)
    finally:
        sys.settrace(old)


def test_code_that_is_gone_leaves_its_id_to_other_code():
    finder = CallSites()
    x = []

    def find():
        return finder.find(sys._getframe(1), [], -1)[0]

    for k in range(200):
        made = in_file(f"made_{k}.py", f"def f{k}(find):\n    return find()\n")
        x.append(made[f"f{k}"](find))
        del made
        gc.collect(0)
    assert [site.rpartition(" ")[2] for site in x] == [f"f{k}" for k in range(200)]


def test_what_is_remembered_of_code_is_bounded(monkeypatch):
    monkeypatch.setattr(call_sites, "_MAX_SITES", 10)
    finder = CallSites()

    def find():
        return finder.find(sys._getframe(1), [], -1)[0]

    for k in range(35):
        assert in_file(f"made_{k}.py", f"def f{k}(find):\n    return find()\n")[f"f{k}"](find).endswith(f"in f{k}")
        assert len(finder.known) <= 10
