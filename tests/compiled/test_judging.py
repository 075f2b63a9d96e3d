"""The verdict on results of compiled code."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shadowrun import Status
from shadowrun.compiled.graph import Graph
from shadowrun.compiled.judging import judge
from shadowrun.compiled.rounding import Draws
from shadowrun.compiled.snapshot import Snapshot


def verdict(function, inputs, change):
    """The verdict on results of a function that were changed."""
    graph = Graph(make_fx(function)(*inputs))
    snapshot, draws = Snapshot.take(inputs), Draws()
    names, expected = graph.eager(snapshot.fresh(), draws)
    return judge(names, change(*expected), expected, graph.runs(snapshot, draws))[0]


@pytest.mark.parametrize("statistic", [1, 2])
@pytest.mark.parametrize("by", [1.0, 1.1])
def test_what_a_norm_saves_may_be_in_another_precision_but_not_wrong(statistic, by):
    """Inductor saves mean and deviation of a group norm in the dtype of its input."""
    inputs = torch.randn(2, 8, 4, 4).bfloat16() + 1, torch.ones(8), torch.zeros(8)

    def norm(x, weight, bias):
        out, mean, deviation = torch.ops.aten.native_group_norm(x, weight, bias, 2, 8, 16, 2, 1e-5)
        return out, mean.detach(), deviation.detach()

    def change(*results):
        return [(r * by).bfloat16() if k == statistic else r for k, r in enumerate(results)]

    assert verdict(norm, inputs, change).status is (Status.MATCH if by == 1 else Status.MISMATCH)


def test_a_result_of_another_dtype_is_a_mismatch():
    found = verdict(lambda x: (x * 2,), (torch.randn(5),), lambda y: [y.bfloat16()])
    assert (found.status, found.evidence) == (Status.MISMATCH, "mul: dtype bf16 against f32")
