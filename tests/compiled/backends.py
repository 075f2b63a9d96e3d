"""Backends of torch.compile other than Inductor, as vendors write them, right and wrong."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes


def traced(module, inputs):
    """TorchScript: one callable, whose operators torch calls from C++."""
    return torch.jit.trace(module, [i.detach() for i in inputs], check_trace=False)


def without(*targets):
    """A fault: a backend's compiler that leaves out some operators."""

    def spoil(module):
        for node in list(module.graph.nodes):
            if node.target in targets:
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
        module.recompile()
        return module

    return spoil


def opaque(module, inputs):
    """Code of a runtime of its own, of which torch sees nothing."""

    def run(*args):
        with _disable_current_modes():
            return module(*args)

    return run


def split(forward=lambda m: m, backward=lambda m: m):
    """A backend on AOT autograd whose code is opaque; each half may be spoiled."""
    return aot_autograd(
        fw_compiler=lambda m, i: make_boxed_func(opaque(forward(m), i)),
        bw_compiler=lambda m, i: make_boxed_func(opaque(backward(m), i)),
    )


def called(module, inputs):
    """The graph's own Python code, behind a function: its operators are called one by one."""

    def run(*args):
        return module(*args)

    return run


called_split = aot_autograd(fw_compiler=lambda m, _: make_boxed_func(m.forward))
