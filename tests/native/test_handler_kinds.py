"""Kinds of calls that the handler in C takes, those of one result apart: the same as by Python, and without it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shadowrun
from shadowrun import Status, native
from shadowrun.replay.replayer import Replayer
from tests.native.both_ways import WAYS, both_ways, handled

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")

ways = pytest.mark.parametrize("way", WAYS)
aten = torch.ops.aten


def batch_norm(x):
    mean, var = torch.zeros(3), torch.ones(3)
    return F.batch_norm(x, mean, var, training=True), mean, var


def several_results(_):
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    layer, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    y, where = F.max_pool2d(norm(layer(x)).relu(), 2, return_indices=True)
    z = F.layer_norm(y.flatten(1), (36,))
    F.nll_loss(z.log_softmax(1), torch.tensor([3, 5])).backward()
    norm.eval()
    a, b = torch.randn(4), torch.randn(4)
    found = [torch.aminmax(a), torch.frexp(a), torch.var_mean(a), a.sort(), torch.unique(a), a.topk(2), b.mode()]
    found += [torch.linalg.qr(torch.ones(3, 3)), torch.unbind_copy(torch.ones(2, 2)), norm(layer(x.detach()))]
    found += [torch.native_batch_norm(x.detach(), None, None, None, None, True, 0.1, 1e-5)]
    same = torch.zeros(4)  # one tensor for both statistics
    found += [F.batch_norm(torch.randn(5, 4), same, same, training=True), same]
    return found, where, norm.state_dict(), layer.weight.grad, x.grad


def without_tensors(_):
    with torch.profiler.record_function("of the program's own"):
        made = [torch.zeros(3), torch.arange(5), torch.full((2,), 3.0, device="cpu"), torch.empty(0), torch.eye(2)]
    made += [torch.cat([made[0], made[1].float()]), torch.tensor([1, 2]), torch.empty(4, device="meta").shape]
    return made, torch.linspace(0, 1, 5), torch.ones(2, device=torch.device("cpu", 0))


def takes_long(_):
    x = torch.ones(400, 400)
    for _ in range(3):
        x.mul_(0.5)
    return (x @ x @ x).sum(), x, torch.ones(1 << 19).mul_(3).cumsum(0)[-1]


@ways
@pytest.mark.parametrize("program", [several_results, without_tensors, takes_long], ids=lambda p: p.__name__)
def test_more_kinds_of_calls(program, way):
    assert handled(both_ways(program, **WAYS[way]))


KNOWN = {
    "results, several": lambda x: (x.max(0), x.sort(), torch._foreach_neg([x, x])),
    "results, a number": lambda x: x[0, 0].item(),
    "statistics": batch_norm,
    "factories": lambda _: (torch.zeros(3), torch.arange(4), torch.empty(2, device="cpu"), torch.empty(2)),
    "a list": lambda x: torch.cat([x, x]),
    "in place, large": lambda x: x.new_ones(300, 300).mul_(2),
    "long": lambda _: torch.ones(1 << 21).cumsum(0),
    "marks of a profiler": lambda _: torch.profiler.record_function("a").__enter__().__exit__(None, None, None),
}


@ways
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_needs_no_python(monkeypatch, name, way):
    seen = []

    def telling(original):
        def counted(self, plan, *rest):
            seen.append(plan.name)
            return original(self, plan, *rest)

        return counted

    for method in ("observe", "run_and_count"):
        monkeypatch.setattr(Replayer, method, telling(getattr(Replayer, method)))
    x, marked = torch.full((2, 3), 1.5), []
    with shadowrun.compare("cpu", **WAYS[way]) as run:
        for _ in range(3):
            marked.append(len(seen))
            KNOWN[name](x)
    assert marked[0] < marked[1] == marked[2] == len(seen)
    assert run.counts()[Status.MISMATCH] == 0


def test_the_time_of_each_platform(replays, either):
    def late(run, args, kwargs):
        time.sleep(0.02)
        return run(*args, **kwargs)

    replays(aten.tanh.default, late)
    x = torch.ones(3)
    with shadowrun.compare("cpu") as run:
        for _ in range(3):
            x.tanh()
    timed = [(r.verdict.status, r.ref_time_us >= 20_000) for r in run.records(op="aten::tanh")]
    assert timed == [(Status.MATCH, True)] * 3  # a slow reference is no fault of the target


def test_more_contexts_than_are_remembered():
    x, n = torch.ones(9000), 8500
    with shadowrun.compare("cpu", replay=False, max_records=100_000) as run:
        for _ in range(3):
            for i in range(n):
                x[:i].neg()
    assert handled(run)
    sql = "select count(*) from call join context on context.id = context_id group by inputs"
    assert [count for (count,) in run._recorder.data.query(sql)] == [3] * n
    sql = "select inputs from call join context on context.id = context_id where seq = ?"
    assert [next(run._recorder.data.query(sql, (2 * n + i,)))[0] for i in (0, 7)] == ["f32[0]", "f32[7]"]
