"""Backends with planted faults, at the top of a module as the scripts that show them need them."""

import os

import torch
from torch._dynamo.backends.common import aot_autograd

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
