"""Compiled regions in a comparison."""

from torch._higher_order_ops.wrap import InductorCompiledCallable, inductor_compiled_code
from torch.fx.experimental.proxy_tensor import make_fx

import shadowrun


def compare(**options):
    """A comparison of one CPU with another, with regions."""
    return shadowrun.compare("cpu[threads=1]", compiled=True, **options)


def region(function, compiled, *inputs, graph=True):
    """A region as Inductor makes it, without its compiler: the graph of one function, run by another."""
    module = make_fx(function)(*(t.clone() for t in inputs)) if graph else None
    code = InductorCompiledCallable(lambda args: compiled(*args), module)
    return lambda: inductor_compiled_code(code, list(inputs))
