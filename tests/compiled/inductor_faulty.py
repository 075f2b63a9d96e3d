"""Inductor with a wrong lowering: in this process, or in that of a script.

python -m tests.compiled.inductor_faulty relu repro.py        runs a script with the fault
"""

import contextlib
import runpy
import sys

import torch

aten = torch.ops.aten


@contextlib.contextmanager
def planted(name):
    """While inside, one operator is compiled wrongly; what is in Inductor's cache must not be met."""
    from torch._inductor.lowering import lowerings

    wrong = {
        "relu": (aten.relu.default, lambda right: lambda x: lowerings[aten.mul.Tensor](right(x), 1.01)),
        "where": (aten.where.self, lambda right: lambda _condition, _a, b: b),
    }
    op, change = wrong[name]
    right = lowerings[op]
    lowerings[op] = change(right)
    try:
        yield
    finally:
        lowerings[op] = right


if __name__ == "__main__":
    with planted(sys.argv[1]):
        runpy.run_path(sys.argv[2], run_name="__main__")
