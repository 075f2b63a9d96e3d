"""torch.compile under a comparison: the same graphs, no recompilation, and the same results."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import shadowrun
from shadowrun import Status


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layers(x))


def build(hooked=False):
    torch.manual_seed(0)
    model = Model()
    if hooked:
        model.head.register_forward_hook(lambda m, args, out: out * 2)
    return model


@pytest.fixture
def graphs():
    """Counts graphs and their breaks from the beginning."""
    torch._dynamo.reset()
    counters.clear()

    def found():
        return counters["stats"]["unique_graphs"], dict(counters["graph_break"])

    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("make", [lambda h: build(h).layers, build], ids=["torch's module", "user's module"])
def test_a_compiled_module_is_one_graph(graphs, make, hooked):
    with shadowrun.compare("cpu[threads=1]") as run:
        model = torch.compile(make(hooked), backend="aot_eager", fullgraph=True)
        model(torch.ones(5, 3)).sum().backward()
    assert graphs() == (1, {})
    assert run.counts()[Status.MATCH] > 8


def test_nothing_is_compiled_again_when_a_comparison_begins_and_ends(graphs):
    model = torch.compile(build(), backend="aot_eager")
    x = torch.ones(5, 3)
    model(x)
    run = shadowrun.compare("cpu[threads=1]")
    for _ in range(2):
        with run:
            model(x)
        model(x)
    assert graphs() == (1, {})
    assert run.counts()[Status.MATCH] > 4


def test_a_module_compiled_inside_stays_compiled_outside(graphs):
    x = torch.ones(5, 3)
    with shadowrun.compare("cpu[threads=1]"):
        model = torch.compile(build(), backend="aot_eager")
        model(x)
    model(x)
    assert graphs() == (1, {})
    plain = torch._dynamo.utils.unpatched_nn_module_call
    assert plain is nn.Module.__call__
    assert torch._dynamo.variables.nn_module.unpatched_nn_module_call is plain
