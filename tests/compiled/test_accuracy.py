"""The verdict on results of compiled code."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shadowrun import Status
from shadowrun.compiled.accuracy import judge
from shadowrun.compiled.graph import Graph, Snapshot
from shadowrun.compiled.rounding import RandomResults


def verdict(function, inputs, change):
    """The verdict on results of a function that were changed."""
    graph = Graph(make_fx(function)(*inputs))
    snapshot, random_results = Snapshot.take(inputs), RandomResults()
    names, expected = graph.eager(snapshot.fresh(), random_results)
    return judge(names, change(*expected), expected, graph.runs(snapshot, random_results))[0]


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


def autocast(x, a, b, *, widened):
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.tanh(x @ a) @ b
    return (y.float() if widened else y,)


def scaled(by):
    return lambda y: [(y * by).to(y.dtype)]


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("by", [1.01, 1.02, 1.05, 1.1, 1.5])
def test_a_factor_of_all_elements_in_16_bits_is_found(widened, by):
    """No single element of it need be beyond its bound, which is that of the dtype that was computed in."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 8), torch.randn(8, 8) / 3, torch.randn(8, 8) / 3

    def function(*given):
        return autocast(*given, widened=widened)

    assert verdict(function, inputs, scaled(by)).status is Status.MISMATCH


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [1, 8, 64])
def test_another_rounding_in_16_bits_is_right(widened, seed, n):
    """In float32, and in bfloat16 with the products added in another order."""
    torch.manual_seed(seed)
    inputs = torch.randn(n, 8), torch.randn(8, 8) / 3, torch.randn(8, 8) / 3
    x, a, b = inputs
    halves = [v.bfloat16() for v in inputs]
    exact = torch.tanh(x.double() @ a.double()) @ b.double()
    tanh = torch.tanh((halves[0][:, 4:] @ halves[1][4:] + halves[0][:, :4] @ halves[1][:4]).float()).bfloat16()
    other = tanh @ halves[2]

    def function(*given):
        return autocast(*given, widened=widened)

    for result in (exact, other):
        found = verdict(function, inputs, lambda y, result=result: [result.to(y.dtype)])
        assert found.status is Status.MATCH, found


def test_a_function_that_is_a_little_off_everywhere_is_found_in_float32():
    """As a vectorised `exp` that was given 1.00001 times its input: within 32 units of each element here."""
    torch.manual_seed(0)
    inputs = (torch.rand(4000),)
    assert verdict(lambda x: (x.exp(),), inputs, lambda _: [(inputs[0] * 1.00001).exp()]).status is Status.MISMATCH
    right = verdict(lambda x: (x.exp(),), inputs, lambda _: [inputs[0].double().exp().float()])
    assert right.status is Status.MATCH
