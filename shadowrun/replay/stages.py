"""What a right 16-bit kernel may round on its way to its result, beside its inputs."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from shadowrun.numerics.tolerance import accumulates, base_name, is_arithmetic, ulp_bound
from shadowrun.replay.finding import op_name
from shadowrun.replay.undefined import arguments

if TYPE_CHECKING:
    from shadowrun.replay.case import Case

__all__ = ["ONE_SUM", "has_one_stage", "partial_sums"]

ONE_SUM: Final = frozenset(
    """
    mm bmm mv dot vdot addmm baddbmm addmv addr linear matmul sum mean _softmax _log_softmax native_layer_norm
    native_group_norm native_batch_norm _native_batch_norm_legit _fused_rms_norm cudnn_batch_norm
    """.split()  # noqa: SIM905
)
_STATISTICS: Final = frozenset({"native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward"})
_ADDING: Final = {
    "embedding_dense_backward": "indices",
    **dict.fromkeys(("index_add", "index_reduce", "scatter_add", "scatter_reduce"), "index"),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), "indices"),
}
"""Operators that add at indices, and the argument that holds these."""


def has_one_stage(case: Case) -> bool:
    """Whether the operator is one sum or one short formula, so that nothing but its result has to be rounded.

    Kernels of several stages (attention, convolutions by col2im or Winograd, gradients of norms and losses) keep what
    lies between these in float32 or in the dtype of their tensors. No change of the inputs shows what that does to an
    element where it cancels, so nothing stands out there.
    """
    op = op_name(case)
    if accumulates(op):
        return base_name(op) in ONE_SUM
    return is_arithmetic(op) or ulp_bound(op, [torch.float32]) is not None


def partial_sums(case: Case, position: int) -> int:
    """How many partial sums may be added up in the memory of a 16-bit result, each addition rounded; 1: none is.

    * torch's own transposed convolutions, and the gradients of others, add a product for each element of the kernel
      (col2im); gradients of the weight add one for each sample.
    * Its gradients of the weight and bias of a norm add one for each row, in a buffer of their dtype.
    * What is added at an index is added in memory, by an atomic operation on accelerators.
    """
    name, named = base_name(op_name(case)), arguments(case)
    if "convolution" in name or name.startswith("conv"):
        return _of_convolution(name, named, position)
    if name in _STATISTICS and position > 0:
        return _elements(named.get("input", named.get("X"))) // max(_elements(case.expected[position]), 1)
    return _equal_indices(named[_ADDING[name]]) if name in _ADDING else 1


def _equal_indices(given: object) -> int:
    """How often an index is met at most; for indices of several dimensions, in the one with the least of that."""
    several = [t for t in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(t, torch.Tensor)]
    if any(t.dtype in (torch.bool, torch.uint8) for t in several):
        return 1  # A mask meets each element once.
    counts = [np.unique(t.detach().numpy(), return_counts=True)[1] for t in several if t.numel()]
    return min((int(c.max()) for c in counts), default=1)


def _of_convolution(name: str, named: dict[str, object], position: int) -> int:
    weight, x = named.get("weight"), named.get("input")
    if not isinstance(weight, torch.Tensor) or not isinstance(x, torch.Tensor):
        return 1
    backward = "backward" in name
    if backward and position > 0:
        return x.shape[0] if position == 1 else 1
    transposed = bool(named.get("transposed")) or "transpose" in name
    return prod(weight.shape[2:]) if backward != transposed else 1


def _elements(value: object) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0
