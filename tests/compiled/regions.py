"""Compiled regions in a comparison."""

import torch._higher_order_ops.wrap as operators
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import shadowrun
from shadowrun.compiled.regions.torchregions import CodeOfGraph

CODE = getattr(operators, "InductorCompiledCallable", CodeOfGraph)
"""What torch hands to the operator of a region; torch 2.11 has no class for it."""


def compare(**options):
    """A comparison of one CPU with another, with regions."""
    return shadowrun.compare("cpu[threads=1]", compiled=True, **options)


def region(function, compiled, *inputs, graph=True):
    """A region as Inductor makes it, without its compiler: the graph of one function, run by another."""
    module = make_fx(function)(*(t.clone() for t in inputs)) if graph else None
    code = CODE(lambda args: compiled(*args), module)
    return lambda: operators.inductor_compiled_code(code, list(inputs))


class Small(nn.Module):
    """One graph of four operators, forward and backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu().exp()
