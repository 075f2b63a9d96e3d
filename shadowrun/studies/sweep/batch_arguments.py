"""Which arguments of an operator have a batch dimension: each item alone must give what it gives in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["batch_arguments", "batch_item"]

_BATCH_FIRST = (
    "convolution _convolution conv_transpose2d mkldnn_convolution _softmax _log_softmax _safe_softmax native_layer_norm"
    " _fused_rms_norm avg_pool2d avg_pool3d adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d"
    " max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d"
    " upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d"
    " _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
    " _upsample_bilinear2d_aa im2col col2im reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"
    " replication_pad2d replication_pad3d mm mv sum mean amax amin prod var std var_mean logsumexp argmax argmin"
    " linalg_vector_norm norm sort topk cumsum cumprod logcumsumexp cummax cummin max min median kthvalue mode all any"
)
# Indices of the inputs that have a batch dimension, by operator name without overload.
_BATCH_ARGUMENTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_BATCH_FIRST.split(), (0,)),
    "bmm": (0, 1),
    "baddbmm": (0, 1, 2),
    "addmm": (0, 1),
    "addmv": (0, 1),
    "_cdist_forward": (0, 1),
    "grid_sampler_2d": (0, 1),
    "grid_sampler_3d": (0, 1),
    "embedding": (1,),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_attention_math": (0, 1, 2),
}
# Number of dimensions with a batch, for operators that also accept inputs without one.
_MIN_DIMS = {
    **dict.fromkeys(("avg_pool2d", "max_pool2d_with_indices", "adaptive_max_pool2d", "_adaptive_avg_pool2d"), 4),
    **dict.fromkeys(("avg_pool3d", "max_pool3d_with_indices", "adaptive_max_pool3d", "_adaptive_avg_pool3d"), 5),
    **{f"{kind}_pad{n}d": n + 2 for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **dict.fromkeys(("im2col", "adaptive_avg_pool2d"), 4),
    "col2im": 3,
}
# Their first input broadcasts: it has a batch only with this many dimensions and the size of the batch.
_MAY_BROADCAST = {"addmm": 2, "addmv": 1, "baddbmm": 3}


def batch_arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], int]:
    """Indices of the inputs with a batch dimension, and the batch size; 0 if there is no batch."""
    name = str(func.name()).partition("::")[2].partition(".")[0]  # type: ignore[no-untyped-call]
    places = _BATCH_ARGUMENTS.get(name, ())
    if not places or any(p >= len(args) or not isinstance(args[p], torch.Tensor) for p in places):
        return (), 0
    n = args[places[-1]].shape[0] if args[places[-1]].dim() else 0
    if name in _MAY_BROADCAST and (args[0].dim() < _MAY_BROADCAST[name] or args[0].shape[0] != n):
        # A bias of (out,) is the same for all items: it is given to each as it is.
        places = places[1:]
    x = args[places[0]]
    if any(args[p].dim() < 1 or args[p].shape[0] != n for p in places) or x.dim() < _MIN_DIMS.get(name, 1):
        return (), 0
    # A norm over all dimensions has no batch.
    if name in {"native_layer_norm", "_fused_rms_norm"}:
        return (places, n) if x.dim() > len(args[1]) else ((), 0)
    return (places, n) if _keeps_batch_dim(func, args, kwargs, x.dim()) else ((), 0)


def batch_item(args: tuple[Any, ...], places: tuple[int, ...], k: int) -> tuple[Any, ...]:
    """The inputs with item `k` of the batch only."""
    return tuple(a[k : k + 1] if i in places else a for i, a in enumerate(args))


def _keeps_batch_dim(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], n_dims: int) -> bool:
    """Whether the operator reduces or scans no batch dimension."""
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.name not in ("dim", "dims"):
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if value is None:
            return False
        dims = value if isinstance(value, (list, tuple)) else [value]
        # Dimension 0 is the batch. Torch counts one dimension for a tensor without any.
        return bool(dims) and all(type(d) is int and d % max(n_dims, 1) != 0 for d in dims)
    return not _reduces_all(func)


def _reduces_all(func: torch._ops.OpOverload) -> bool:
    """Whether it is an overload without ``dim`` of an operator that has overloads with ``dim``."""
    packet = func.overloadpacket
    others = (getattr(packet, name) for name in packet.overloads())
    return any(a.name in ("dim", "dims") for other in others for a in schema_of(other).arguments)
