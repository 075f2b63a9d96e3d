"""The mode among torch's other machinery: results stay, each call is seen once, nothing crashes."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
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


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


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


def two_tensors():
    t = TwoTensor(torch.ones(3), torch.arange(3.0))
    result = (t * 2 + 1).sum()
    return result.a, result.b


def plain_subclass():
    x = torch.ones(3).as_subclass(Named)
    y = x * 2 + 1
    y.add_(1)
    assert type(y) is Named
    return y.sum()


def fake():
    with FakeTensorMode():
        x = torch.ones(3, 4)
        return (x @ x.t() * 2).shape


def traced():
    graph = make_fx(lambda x: (x * 2).sum())(torch.ones(3))
    return graph.code, graph(torch.ones(3))


def traced_fake():
    return make_fx(lambda x: (x * 2).sum(), tracing_mode="fake")(torch.ones(3)).code


def hessian():
    return torch.func.hessian(lambda x: (x * x).sin().sum())(torch.arange(3.0))


def loop():
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), torch.ones(2)))


@torch.jit.script
def scripted(x):
    for i in range(3):
        x = x * 2 + i
    return x


def compiled():
    torch._dynamo.reset()
    model = weighted(3, 3)
    result = torch.compile(model, backend="eager")(torch.ones(2, 3))
    result.sum().backward()
    return result, model[0].weight.grad


def broken_graph():
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def function(x):
        for _ in range(2):
            x = x * 2
            torch._dynamo.graph_break()
        return x + 1

    return function(torch.ones(3))


def autocast():
    model = weighted(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(2, 4)).float().sum()
    loss.backward()
    return model[0].weight.grad


def inference():
    with torch.inference_mode():
        x = torch.arange(12.0).view(3, 4)
        y = x.t()[1:].reshape(-1)
        x.mul_(2)
        return y + 1, nn.functional.linear(x, x), x[0].add_(1), x


def no_grad():
    model = weighted(3, 3)
    with torch.no_grad():
        model[0].weight.mul_(2)
        return model(torch.ones(1, 3))


def packed():
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        y = (x * x).exp()
    y.sum().backward()
    return x.grad


def saved_on_cpu():
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).exp()
    y.sum().backward()
    return x.grad


def anomaly():
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        (x * x).exp().sum().backward()
    return x.grad


def recomputed(reentrant):
    model = nn.Sequential(weighted(3, 3), nn.Dropout(0.5))
    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    return x.grad, model[0][0].weight.grad


PROGRAMS = {
    "wrapper subclass": two_tensors,
    "subclass without a dispatch": plain_subclass,
    "FakeTensorMode": fake,
    "make_fx": traced,
    "make_fx on fake tensors": traced_fake,
    "vmap": lambda: torch.func.vmap(lambda x: (x * 2).sum())(torch.ones(3, 4)),
    "grad": lambda: torch.func.grad(lambda x: (x * x).sin().sum())(torch.arange(3.0)),
    "jvp": lambda: torch.func.jvp(lambda x: (x * x).sin(), (torch.arange(3.0),), (torch.ones(3),)),
    "hessian": hessian,
    "cond": lambda: torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),)),
    "while_loop": loop,
    "TorchScript": lambda: scripted(torch.ones(2)),
    "torch.compile": compiled,
    "graph breaks": broken_graph,
    "autocast": autocast,
    "inference mode": inference,
    "no_grad": no_grad,
    "saved-tensor hooks": packed,
    "save_on_cpu": saved_on_cpu,
    "anomaly mode": anomaly,
    "checkpoint": lambda: recomputed(False),
    "checkpoint, reentrant": lambda: recomputed(True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_without(clean_sim, name, target):
    torch.manual_seed(0)
    plain = PROGRAMS[name]()
    rng = torch.get_rng_state()
    torch.manual_seed(0)
    with shadowrun.compare(target, ref="cpu") as run:
        compared = PROGRAMS[name]()
    assert torch.equal(torch.get_rng_state(), rng)
    assert str(compared) == str(plain)
    for a, b in zip(tensors(compared), tensors(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    counts = run.counts()
    assert [f for f in run.findings() if f.kind != "slow"] == []
    assert counts[Status.ERROR] == 0
    assert sum(counts.values()) > 0
    assert not [r for r in run.records(status=Status.UNVERIFIED) if "copied" in r.verdict.explanation]


def tensors(results):
    return [r for r in (results if isinstance(results, tuple) else (results,)) if isinstance(r, torch.Tensor)]


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
        ("cond", "higher-order operator"),
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
