"""Backends with planted faults, at the top of a module as the scripts that show them need them."""

import os

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from tests.compiled import planted

MENDED = bool(os.environ.get("MENDED"))


def tanh_is_wrong(module, inputs):
    """One fault, in the forward pass; none if the environment has MENDED."""
    faults = () if MENDED else (planted.FAULTS["tanh a little too small"],)
    return planted.compiler(*faults)(module, inputs)


def embedding_loses_duplicates(module, inputs):
    """One fault, in the backward pass."""
    faults = () if MENDED else (planted.FAULTS["duplicate tokens lost"],)
    return planted.compiler(*faults)(module, inputs)


def fusing(module, inputs):
    """A fault that needs two nodes."""
    lower = (lambda module, _inputs: planted.run(module)) if MENDED else planted.fusing
    return aot_autograd(fw_compiler=lower)(module, inputs)


def without_gelu(module, inputs):
    """No kernel for one operator."""

    def lower(module, _inputs):
        if not MENDED and any(n.target is torch.ops.aten.gelu.default for n in module.graph.nodes):
            raise NotImplementedError("no lowering of gelu")
        return planted.run(module)

    return aot_autograd(fw_compiler=lower)(module, inputs)


_add = torch.ops.aten.add.Tensor
ALSO = {"sums too great": planted.fault("", "forward", _add, planted.scaled(_add), "")}


def planted_fault(module, inputs):
    """The fault that the environment names by FAULT; none without."""
    return planted.compiler(*_named())(module, inputs)


def planted_in_place(module, inputs):
    """The same, with writes to inputs inside of the graph."""
    return planted.compiler(*_named(), keep_inference_input_mutations=True)(module, inputs)


def _named():
    name = os.environ.get("FAULT")
    return [(planted.FAULTS | ALSO)[name]] if name else []


def adds_too_much(module, inputs):
    """On graphs as Dynamo makes them: `add_` adds too much."""

    def run(*args):
        with _disable_current_modes():
            return module(*args)

    for node in module.graph.nodes:
        if node.target == "add_" and not MENDED:
            node.args = (node.args[0], node.args[1] + 0.5)
    module.recompile()
    return run
