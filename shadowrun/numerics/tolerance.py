"""What is known of an operator without running it: its cheap bound, and what its definition leaves open.

Sources of the bounds, in units in the last place between two results:

* 0: the result is a copy, a comparison, a selection or integer arithmetic: nothing is rounded.
* 1: IEEE 754 basic operations are correctly rounded; one unit is left for devices whose division or square root is
  faithful only, and for 16-bit results rounded twice.
* Elementary functions: OpenCL C 3.0 specification, "Relative error as ULPs", single precision, full profile; what any
  vendor may claim. CUDA's and SVML's published maxima lie below.
* None: reductions, contractions, norms and whatever cancels; the float64 oracle decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = [
    "absolute_error",
    "accumulates",
    "base_name",
    "is_arithmetic",
    "keeps_zero_sign",
    "moves",
    "n_factors",
    "not_unique",
    "saved",
    "ulp_bound",
]

_EXACT: Final = frozenset(
    """
    abs alias amax amin argmax argmin argsort as_strided_copy bitwise_and bitwise_not bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift bucketize cat ceil channel_shuffle clamp clamp_max clamp_min clone
    constant_pad_nd copy copysign cummax cummin detach diag_embed embedding eq expand_copy fill flip floor fmax fmin
    full full_like gather ge gt hardtanh im2col index index_copy index_fill index_select isfinite isin isinf isnan
    isneginf isposinf kthvalue le logical_and logical_not logical_or logical_xor lt masked_fill masked_scatter
    masked_select max max_pool2d_with_indices max_pool3d_with_indices maximum median min minimum mode msort nan_to_num
    nanmedian narrow_copy ne neg nextafter nonzero one_hot ones ones_like permute_copy pixel_shuffle pixel_unshuffle
    put reflection_pad1d reflection_pad2d reflection_pad3d relu repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d reshape_copy roll scalar_tensor scatter searchsorted select_copy
    select_backward select_scatter sign signbit slice_backward slice_copy slice_scatter sort split_copy stack t_copy
    take threshold threshold_backward topk transpose_copy tril triu trunc unfold_copy view_copy where zero zeros
    zeros_like _local_scalar_dense _to_copy _unsafe_index _unsafe_view
    """.split()  # noqa: SIM905
)
_BOUNDS: Final[dict[str, int]] = {
    # IEEE 754
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "true_divide", "reciprocal", "sqrt", "square"), 1),
    # two roundings: a product, then a sum or a quotient
    **dict.fromkeys(("leaky_relu", "deg2rad", "rad2deg"), 2),
    # OpenCL C 3.0, single precision
    **dict.fromkeys(("log1p", "rsqrt", "cbrt"), 2),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10"), 3),
    **dict.fromkeys(("acos", "acosh", "asin", "asinh", "cos", "cosh", "sin", "sinh", "hypot"), 4),
    **dict.fromkeys(("atan", "atanh", "tan", "tanh"), 5),
    **dict.fromkeys(("atan2",), 6),
    **dict.fromkeys(("erf", "erfc", "pow"), 16),
    # 1 / (1 + exp(-x)): 3 of the exponential, one each of sum and quotient, one spare
    **dict.fromkeys(("sigmoid",), 6),
}
_ZERO_SIGN_FREE: Final = frozenset(
    """
    amax amin clamp clamp_max clamp_min cummax cummin fmax fmin hardtanh kthvalue max max_pool2d_with_indices
    max_pool3d_with_indices maximum median min minimum mode msort nanmedian relu sort threshold topk sign
    """.split()  # noqa: SIM905
)
"""Exact operators for which IEEE 754 lets max(+0, -0) be either zero, or that order the two zeros as equal."""

_MOVES: Final = frozenset(
    """
    alias as_strided_copy cat channel_shuffle clone constant_pad_nd copy detach diag_embed embedding expand_copy flip
    gather im2col index index_select masked_scatter masked_select narrow_copy permute_copy pixel_shuffle
    pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d reshape_copy roll select_copy select_scatter slice_copy slice_scatter
    split_copy stack t_copy take transpose_copy tril triu unfold_copy view_copy where _to_copy _unsafe_index
    """.split()  # noqa: SIM905
)
"""Operators that hand elements on as they are.

Not those that choose among them: of two NaNs, a maximum is either, and so is a scatter to one place.
"""

_ACCUMULATES: Final = tuple(
    """
    mm mv dot addr addbmm linear matmul einsum tensordot conv sum mean prod trace norm softmax logsumexp cumsum var std
    attention loss kl_div binary_cross_entropy avg_pool adaptive index_add scatter_add scatter_reduce embedding
    index_put index_reduce lstm gru rnn fft linalg cdist cosine_similarity bincount histc interpolate upsample
    grid_sampler col2im fold segment_reduce cov corrcoef cholesky lu_solve lu_unpack triangular_solve inverse
    """.split()  # noqa: SIM905
)
"""Parts of the names of operators that reduce or contract."""
_LINEAR: Final[dict[str, int]] = {
    **dict.fromkeys("mm bmm mv dot addmm baddbmm addbmm addmv addr linear matmul".split(), 2),  # noqa: SIM905
    **dict.fromkeys(("convolution", "convolution_backward"), 2),
    **dict.fromkeys(("sum", "cumsum", "embedding_dense_backward", "index_add", "scatter_add"), 1),
}
_ABSOLUTE: Final[dict[str, tuple[float, float]]] = {
    # x/2 (1 + erf(x / sqrt 2)): no correct digit is left at x = -6
    **dict.fromkeys(("gelu", "gelu_backward", "silu_backward", "mish", "mish_backward", "softplus"), (0.0, 1.0)),
    **dict.fromkeys(("log_sigmoid_forward", "log_sigmoid_backward"), (0.0, 1.0)),
    # (x - max) - log(sum): the logarithm of about 1 has an absolute error
    **dict.fromkeys(("_log_softmax", "log_softmax"), (1.0, 1.0)),
}
_QUADRATIC: Final = frozenset({"var", "var_mean"})
_COORDINATES: Final = ("upsample", "grid_sampler", "interpolate", "affine_grid")
_NOT_UNIQUE: Final[dict[str, tuple[int, ...]]] = {
    # partly uninitialised: log_alpha, the workspace
    "_ctc_loss": (1,),
    "mkldnn_rnn_layer": (3,),
}

_SAVED: Final[dict[str, tuple[int, ...]]] = {
    "log_sigmoid_forward": (1,),
    "_embedding_bag": (1, 2, 3),
    "_fused_rms_norm": (1,),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm"), (1, 2)),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"), (1, 2)),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_no_update"), (1, 2)),
}
"""What a kernel saves for its own backward: some leave it empty where that has no use for it, and some keep the
statistics of a 16-bit input in float32."""


def base_name(op: str) -> str:
    """Name that in-place, out and foreach variants share: ``add`` for ``aten::add_.Tensor``, ``_foreach_add.List``."""
    name = op.rpartition("::")[2].partition(".")[0]
    name = name.removeprefix("_foreach_")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name


def ulp_bound(op: str, dtypes: Iterable[torch.dtype], scalars: dict[str, object] | None = None) -> int | None:
    """Greatest ULP distance between two correct results, if the operator alone tells it.

    Args:
        op: ``aten::add.Tensor``.
        dtypes: Dtypes of the operator's tensors, inputs and results.
        scalars: Arguments by name that decide: ``alpha`` of add and sub, ``accumulate`` of index_put,
            ``reduce`` of scatter, ``decimals`` of round.

    Returns:
        The bound, or None if only the float64 oracle can tell.
    """
    name, scalars = base_name(op), scalars or {}
    kinds = set(dtypes)
    if not any(d.is_floating_point or d.is_complex for d in kinds):
        return 0
    if name in {"scatter", "index_put", "_index_put_impl", "_unsafe_index_put", "put", "round"}:
        return None if any(scalars.get(k) for k in ("accumulate", "reduce", "decimals")) else 0
    if name == "abs" and any(d.is_complex for d in kinds):
        return _BOUNDS["hypot"]
    if name in _EXACT:
        return 0
    if any(d.is_complex for d in kinds) or scalars.get("alpha", 1) != 1 or scalars.get("rounding_mode") is not None:
        return None
    return _BOUNDS.get(name)


def keeps_zero_sign(op: str) -> bool:
    """Whether IEEE 754 and Annex F of C tell the sign of a zero result.

    They do for element-wise arithmetic and copies; not for maxima, and not for sums, whose start may be either zero.
    """
    name = base_name(op)
    return (name in _EXACT and name not in _ZERO_SIGN_FREE) or name in _BOUNDS or name == "round"


def moves(op: str, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether the operator copies elements, bits and all, also the payload of a NaN.

    IEEE 754 leaves payloads to the implementation in arithmetic and in conversions, and has copies keep them (5.5.1).

    Args:
        op: ``aten::clone``.
        dtypes: Of its floating tensors, inputs and results: with two of them, it converts.
    """
    return base_name(op) in _MOVES and len(set(dtypes)) == 1


def accumulates(op: str) -> bool:
    """Whether the operator reduces or contracts: its error then grows with the number of terms."""
    name = base_name(op)
    return any(part in name for part in _ACCUMULATES) and "gamma" not in name  # "lgamma" has an "mm" in it


def n_factors(op: str) -> int:
    """How many of its inputs each term of an operator is a product of: a sum 1, a matrix product 2; 0 for all others.

    Such an operator is linear in each of its inputs: on squared inputs it gives the sum of the squared terms.
    """
    return _LINEAR.get(base_name(op), 0)


def is_arithmetic(op: str) -> bool:
    """Whether it is a short chain of IEEE operations on each element, optimizers included."""
    name = base_name(op)
    return name in {"add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "rsub"} or name.startswith("_fused_")


def absolute_error(op: str, roundoff: float, greatest: float, size: npt.NDArray[np.float64], extent: int) -> Any:
    """Error that the accepted formula of an operator makes whatever the result and its conditioning.

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
    name = base_name(op)
    if name in _ABSOLUTE:
        constant, slope = _ABSOLUTE[name]
        return roundoff * (constant + slope * size)
    if name in _QUADRATIC:
        # Each deviation carries the error of the mean, and its square is all that is left of constant data.
        return (4 * roundoff * greatest) ** 2
    if name.startswith(_COORDINATES):
        # The position of a sample is a coordinate times the extent, rounded; the result moves by the local slope.
        return roundoff * extent * greatest
    return 0.0


def not_unique(op: str) -> tuple[int, ...]:
    """Positions of the results that the definition leaves open and no equation verifies: saved workspaces."""
    return _NOT_UNIQUE.get(base_name(op), ())


def saved(op: str) -> tuple[int, ...]:
    """Positions of the results that an operator saves for its own backward, in a form of its own."""
    return _SAVED.get(base_name(op), ())
