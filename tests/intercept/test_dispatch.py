"""The mode among others: each call is seen once. Whole programs: `tests/transparency/test_features.py`."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shadowrun
from shadowrun import Status

TARGETS = ("cpu[threads=1]", "sim")


class Logging(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionLogging(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def weighted(*sizes):
    """A model whose weights are the same each time it is made."""
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)], nn.ReLU())
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    return model


def work(device="cpu"):
    x = torch.arange(1.0, 10.0).view(3, 3).to(device)
    y = (x @ x + 1).relu_()
    y.add_(x)
    y.t().mul_(2)
    torch.add(x, y, out=y)
    return torch.dropout(y.sum(dim=0), 0.5, train=True), *torch._foreach_mul([x, y], 2.0)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_another_mode_sees_each_operator_once_and_nothing_of_ours(clean_sim, first, target, device):
    def logged(run):
        torch.manual_seed(0)
        log = Logging()
        with contextlib.ExitStack() as stack:
            for mode in (log, run) if first == "theirs" else (run, log):
                stack.enter_context(mode)
            results = work(device)
        return log.seen, results

    seen, plain = logged(contextlib.nullcontext())
    run = shadowrun.compare(target, ref="cpu")
    seen_with, compared = logged(run)
    assert seen_with == seen
    torch.testing.assert_close(compared, plain, rtol=0, atol=0)
    assert run.counts()[Status.MATCH] >= 6
    assert run.counts()[Status.ERROR] == 0


def test_the_modes_below_see_what_the_target_lacks_once_too(clean_sim):
    with Logging() as log:
        torch.ones(3).cumsum(0)
    with clean_sim.flaws("missing-cumsum"), shadowrun.compare("sim") as run:
        pass
    below = Logging()
    with clean_sim.flaws("missing-cumsum"), below, run:
        torch.ones(3).cumsum(0)
    assert below.seen == log.seen
    assert [f.op for f in run.findings()] == ["aten::cumsum"]


def test_an_exception_below_leaves_the_modes_in_order():
    with Logging() as log:
        with shadowrun.compare("cpu"):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                torch.ones(2, 3) @ torch.ones(2, 3)
            torch.ones(2).neg()
        torch.ones(2).exp()
    assert log.seen[-3:] == ["aten.neg.default", "aten.ones.default", "aten.exp.default"]


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_flops_are_counted_once(clean_sim, first):
    def step():
        model = weighted(4, 8, 2)
        model(torch.ones(3, 4)).sum().backward()

    plain = FlopCounterMode(display=False)
    with plain:
        step()
    for target in TARGETS:
        counted = FlopCounterMode(display=False)
        run = shadowrun.compare(target, ref="cpu")
        modes = (counted, run) if first == "theirs" else (run, counted)
        with modes[0], modes[1]:
            step()
        assert counted.get_total_flops() == plain.get_total_flops() > 0
        assert run.counts()[Status.MATCH] > 5


@pytest.mark.parametrize("target", TARGETS)
def test_function_modes_see_the_program_s_functions_only(clean_sim, target):
    torch.manual_seed(0)
    with FunctionLogging() as plain:
        work()
    run = shadowrun.compare(target, ref="cpu")
    torch.manual_seed(0)
    log = FunctionLogging()
    with log:
        run.start()
        log.seen.clear()
        work()
        seen = list(log.seen)
        run.stop()
    assert seen == plain.seen


def test_a_default_device_does_not_move_our_tensors(clean_sim):
    with torch.device("meta"), shadowrun.compare("sim") as run:
        x = torch.arange(6.0, device="cpu").view(2, 3)
        result = torch.dropout(x.t().mul_(2), 0.0, train=True)
    assert result.device.type == "cpu"
    assert result.tolist() == [[0, 6], [2, 8], [4, 10]]
    assert run.counts()[Status.ERROR] == run.counts()[Status.UNVERIFIED] == 0


def test_calls_that_are_not_replayed_are_counted(clean_sim):
    with shadowrun.compare("sim") as run:
        torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))
        torch.ones(2, device="meta").exp()
        with FakeTensorMode():
            torch.ones(3).sin()
    assert skipped(run) >= {
        ("cond", "higher-order operator: the operators inside are compared"),
        ("aten::exp", "meta tensors: no values"),
        ("aten::sin", "fake or traced tensors"),
    }


def skipped(run):
    run.counts()
    return set(run._data.query("select name, reason from skipped join op on op.id = op_id"))


def test_a_mode_like_ours_may_be_entered_inside_a_call():
    """A custom function that enters a mode of its own while ours handles nothing."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with Logging() as log:
                y = x * 2
            assert log.seen == ["aten.mul.Tensor"]
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    with shadowrun.compare("cpu") as run:
        Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert [r.call.op for r in run.records()].count("aten::mul.Tensor") == 2


@pytest.mark.parametrize("target", [*TARGETS, "cpu[env:SHADOWRUN_TEST=1]"])
def test_the_pseudo_inverse_of_a_complex_matrix(target):
    """Its kernel multiplies conjugated views, which torch takes for what they are not under any mode."""
    torch.manual_seed(0)
    a = torch.randn(5, 5, dtype=torch.complex64)
    plain = torch.linalg.pinv(a)
    with shadowrun.compare(target) as run:
        compared = torch.linalg.pinv(a)
        torch.linalg.pinv(a, out=torch.empty_like(a))
    assert torch.equal(compared, plain)
    assert run.counts()[Status.MISMATCH] == 0
    assert any(r.call.op.startswith("aten::linalg_pinv") for r in run.records())


@pytest.mark.parametrize(
    "block", [lambda: shadowrun.compare("cpu"), lambda: shadowrun.compare("sim"), shadowrun.nan_track]
)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_writes_to_lists_are_counted(block, device, clean_sim):
    """Under any mode, an empty one included, torch does not count them: gradients of views are lost without a word."""

    def views():
        x, y = (torch.ones(4, 3, device=device, requires_grad=True) for _ in range(2))
        view = x.clone().view(12).view(4, 3)
        torch._foreach_add_([view], [y * 2])
        return [None if g is None else g.tolist() for g in torch.autograd.grad(view.sum(), [x, y], allow_unused=True)]

    def saved():
        x, w = torch.ones(3, device=device), torch.ones(3, device=device, requires_grad=True)
        loss = (x * w).sum()
        torch._foreach_mul_([x], 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return x._version

    expected = views(), saved()
    with block():
        assert (views(), saved()) == expected
    assert expected == ([[[1.0] * 3] * 4, [[2.0] * 3] * 4], 1)
