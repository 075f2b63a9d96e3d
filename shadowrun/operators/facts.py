"""`facts`: the facts on an operator, and the bounds for one call that follow from them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from shadowrun.operators.fact_table import ROWS, SKIPPED_NAMESPACES
from shadowrun.operators.op_facts import OpenElements, OpFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = [
    "Dtype",
    "OpFacts",
    "OpenElements",
    "absolute_error",
    "base_name",
    "facts",
    "only_moves",
    "own_facts",
    "ulp_bound",
]

_UNKNOWN: Final = OpFacts()


class Dtype(Protocol):
    """What a bound depends on: a ``torch.dtype``, or the dtype of a file that is read without torch."""

    @property
    def is_floating_point(self) -> bool:
        """Whether it is a real floating dtype."""

    @property
    def is_complex(self) -> bool:
        """Whether it is a complex one."""


# Parts of the names of operators that reduce or contract.
_ACCUMULATES: Final = tuple(
    """
    mm mv dot addr addbmm linear matmul einsum tensordot conv sum mean prod trace norm softmax logsumexp cumsum var std
    attention loss kl_div binary_cross_entropy avg_pool adaptive index_add scatter_add scatter_reduce embedding
    index_put index_reduce lstm gru rnn fft linalg cdist cosine_similarity bincount histc interpolate upsample
    grid_sampler col2im fold segment_reduce cov corrcoef cholesky lu_solve lu_unpack triangular_solve inverse
    """.split()  # noqa: SIM905
)
_COORDINATES: Final = ("upsample", "grid_sampler", "interpolate", "affine_grid")
_LISTS: Final = ("aten::_foreach_", "aten::_fused_ad", "aten::_fused_sgd")
_DEVICES: Final = ("mkldnn", "onednn", "fbgemm", "_for_cpu", "cudnn", "miopen", "_cuda", "_mps", "_xpu", "hpu", "npu")

# An operator of another library may have the name of one of torch's; how its calls are treated follows from its schema.
_TORCH_NAMESPACES: Final = ("aten", "prim")
_SCHEMA_DECIDES: Final[dict[str, Any]] = {
    "view": False,
    "uninitialised": False,
    "uninitialised_returns": (),
    "hidden_writes": (),
    "on_cpu": (),
    "unstable": "",
    "returns_number": False,
}


@functools.lru_cache(maxsize=8192)
def own_facts(op: str) -> OpFacts:
    """The row of an operator without the facts of its family: a plan needs no others, and those take 30 µs."""
    exact = op.partition(".")[0]
    space, _, variant = exact.rpartition("::")
    # The exact name first: `set_` and `prim::device` differ from the operators that share their base name.
    row = ROWS.get(exact) or ROWS.get(variant) or ROWS.get(base_name(op)) or _UNKNOWN
    if space and space not in _TORCH_NAMESPACES:
        row = replace(row, **_SCHEMA_DECIDES, skip=SKIPPED_NAMESPACES.get(space, ""))
    return row


@functools.lru_cache(maxsize=8192)
def facts(op: str) -> OpFacts:
    """The row of an operator, complete: its own facts and those of its family.

    Args:
        op: ``aten::add.Tensor``, ``aten::add`` or ``add``.
    """
    name = base_name(op)
    row = own_facts(op)
    return replace(
        row,
        name=name,
        # "lgamma" has an "mm" in it.
        accumulates=any(part in name for part in _ACCUMULATES) and "gamma" not in name,
        arithmetic=row.arithmetic or name.startswith("_fused_"),
        attention="attention" in op,
        backward="backward" in name,
        convolution="convolution" in name or name.startswith("conv"),
        transposed="transpose" in name,
        fast_convolution="convolution" in op,
        resamples="upsample" in op or "grid_sampler" in op,
        rounds_coordinates=name.startswith(_COORDINATES),
        normalizes="softmax" if "softmax" in name else "norm" if "norm" in name else "",
        loss_gradient=name.endswith("loss_backward"),
        lists=op.startswith(_LISTS),
        device_specific=any(part in op for part in _DEVICES),
    )


def base_name(op: str) -> str:
    """Name that in-place, out and foreach variants share: ``add`` for ``aten::add_.Tensor``, ``_foreach_add.List``."""
    name = op.rpartition("::")[2].partition(".")[0]
    name = name.removeprefix("_foreach_")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name


def ulp_bound(op: str, dtypes: Iterable[Dtype], scalars: dict[str, object] | None = None) -> int | None:
    """Greatest ULP distance between two correct results, if the operator alone decides it.

    Args:
        op: ``aten::add.Tensor``.
        dtypes: Dtypes of the operator's tensors, inputs and results.
        scalars: Arguments by name that decide: ``alpha`` of add and sub, ``accumulate`` of index_put,
            ``reduce`` of scatter, ``decimals`` of round.

    Returns:
        The bound, or None if only the float64 oracle can decide.
    """
    row, scalars, kinds = facts(op), scalars or {}, set(dtypes)
    # Integer and bool arithmetic rounds nothing, whatever the operator.
    if not any(d.is_floating_point or d.is_complex for d in kinds):
        return 0
    is_complex = any(d.is_complex for d in kinds)
    if row.ulp_bound == 0:
        if any(scalars.get(name) for name in row.exact_unless):
            return None
        return row.ulp_bound_complex if is_complex and row.ulp_bound_complex is not None else 0
    # A scale is one more rounding, and a rounding mode turns one ULP of the quotient into a whole number.
    if is_complex or scalars.get("alpha", 1) != 1 or scalars.get("rounding_mode") is not None:
        return None
    return row.ulp_bound


def only_moves(op: str, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether a call copies elements, bits and all, also the payload of a NaN.

    IEEE 754 leaves payloads to the implementation in arithmetic and in conversions, and has copies keep them (5.5.1).

    Args:
        op: ``aten::clone``.
        dtypes: Of its floating tensors, inputs and results: with two of them, it converts.
    """
    return facts(op).only_moves and len(set(dtypes)) == 1


def absolute_error(op: str, roundoff: float, greatest: float, size: npt.NDArray[np.float64], extent: int) -> Any:
    """Error that the accepted formula of an operator makes whatever the result and its condition.

    Most libraries, ATen's CPU kernels among them, evaluate these by formulas that cancel: the error is relative to an
    input or an intermediate value, not to the result.

    Args:
        op: Name of the operator.
        roundoff: Unit roundoff of the result's dtype.
        greatest: Greatest finite magnitude among the inputs.
        size: Magnitude of the input at each element of the result (element-wise operators).
        extent: Greatest spatial size of inputs and results (interpolation).

    Returns:
        float64 array like `size`, or 0.
    """
    row = facts(op)
    if row.absolute_error is not None:
        constant, slope = row.absolute_error
        return roundoff * (constant + slope * size)
    if row.squares_deviations:
        # Each deviation carries the error of the mean, and its square is all that is left of constant data.
        return (4 * roundoff * greatest) ** 2
    if row.rounds_coordinates:
        # The position of a sample is a coordinate times the extent, rounded; the result moves by the local slope.
        return roundoff * extent * greatest
    return 0.0
