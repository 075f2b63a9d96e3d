"""Which inputs of an operator have a batch as their first dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["batched", "sliced"]

_FIRST = (
    "convolution _convolution conv_transpose2d mkldnn_convolution _softmax _log_softmax _safe_softmax native_layer_norm"
    " _fused_rms_norm avg_pool2d avg_pool3d adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d"
    " max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d"
    " upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d"
    " _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
    " _upsample_bilinear2d_aa im2col col2im reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"
    " replication_pad2d replication_pad3d mm mv sum mean amax amin prod var std var_mean logsumexp argmax argmin"
    " linalg_vector_norm norm sort topk cumsum cumprod logcumsumexp cummax cummin max min median kthvalue mode all any"
)
_BATCHED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_FIRST.split(), (0,)),
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
"""Operators by their names without overload: places of the inputs that have a batch."""
_LEAST_DIMS = {
    **dict.fromkeys(("avg_pool2d", "max_pool2d_with_indices", "adaptive_max_pool2d", "_adaptive_avg_pool2d"), 4),
    **dict.fromkeys(("avg_pool3d", "max_pool3d_with_indices", "adaptive_max_pool3d", "_adaptive_avg_pool3d"), 5),
    **{f"{kind}_pad{n}d": n + 2 for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **dict.fromkeys(("im2col", "adaptive_avg_pool2d"), 4),
    "col2im": 3,
}
"""Operators that also take inputs without a batch: dimensions with one."""
_MAY_BROADCAST = {"addmm": 2, "addmv": 1, "baddbmm": 3}
"""Their first input belongs to the batch only where it has that many dimensions and is as long."""


def batched(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """Places of the inputs with a batch, and its size; 0 where there is none."""
    name = str(func.name()).partition("::")[2].partition(".")[0]  # type: ignore[no-untyped-call]
    places = _BATCHED.get(name, ())
    if not places or any(p >= len(args) or not isinstance(args[p], torch.Tensor) for p in places):
        return (), 0
    n = args[places[-1]].shape[0] if args[places[-1]].dim() else 0
    if name in _MAY_BROADCAST and (args[0].dim() < _MAY_BROADCAST[name] or args[0].shape[0] != n):
        places = places[1:]
    x = args[places[0]]
    if any(args[p].dim() < 1 or args[p].shape[0] != n for p in places) or x.dim() < _LEAST_DIMS.get(name, 1):
        return (), 0
    if name in {"native_layer_norm", "_fused_rms_norm"}:
        return (places, n) if x.dim() > len(args[1]) else ((), 0)
    return (places, n) if _keeps_first(func, args, kwargs, x.dim()) else ((), 0)


def sliced(args: tuple[Any, ...], places: tuple[int, ...], k: int) -> tuple[Any, ...]:
    """The inputs with the `k`-th of the batch alone."""
    return tuple(a[k : k + 1] if i in places else a for i, a in enumerate(args))


def _keeps_first(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], n_dims: int) -> bool:
    """Whether no dimension that it reduces or scans is the first."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name not in ("dim", "dims"):
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if value is None:
            return False
        dims = value if isinstance(value, (list, tuple)) else [value]
        return bool(dims) and all(type(d) is int and d % max(n_dims, 1) != 0 for d in dims)
    return not _reduces_all(func)


def _reduces_all(func: torch._ops.OpOverload) -> bool:
    """Overloads without ``dim`` of operators that also have some with."""
    packet = func.overloadpacket
    others = (getattr(packet, name) for name in packet.overloads())
    return any(a.name in ("dim", "dims") for other in others for a in other._schema.arguments)
