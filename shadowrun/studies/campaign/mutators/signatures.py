"""Operators that take each other's place: those of one signature, as far as a call uses it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from shadowrun.studies.campaign.mutators.layers import FLOAT
from shadowrun.studies.campaign.mutators.mutator import op_named
from shadowrun.studies.zoo.graph import Node
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    import torch

__all__ = ["others_of", "with_operator"]

# By name in the namespace `aten`: the arguments that a call usually gives have the same types in these.
_CLASSES: Final = (
    FLOAT,
    """add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum fmax fmin atan2 hypot copysign.Tensor logaddexp
    logaddexp2 fmod.Tensor remainder.Tensor pow.Tensor_Tensor xlogy.Tensor heaviside rsub.Tensor floor_divide
    nextafter""".split(),  # noqa: SIM905
    """add.Scalar sub.Scalar mul.Scalar div.Scalar fmod.Scalar remainder.Scalar pow.Tensor_Scalar clamp_min clamp_max
    rsub.Scalar copysign.Scalar leaky_relu""".split(),  # noqa: SIM905
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor".split(),  # noqa: SIM905
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar".split(),  # noqa: SIM905
    "logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor".split(),  # noqa: SIM905
    "sum.dim_IntList mean.dim amax amin logsumexp".split(),  # noqa: SIM905
    "sum mean prod max min median".split(),  # noqa: SIM905
    "var.correction std.correction".split(),  # noqa: SIM905
    "argmax argmin".split(),  # noqa: SIM905
    "max.dim min.dim median.dim mode cummax cummin sort".split(),  # noqa: SIM905
    "any.dim all.dim".split(),  # noqa: SIM905
    "cumsum cumprod logcumsumexp".split(),  # noqa: SIM905
    "_softmax _log_softmax".split(),  # noqa: SIM905
    "tril triu".split(),  # noqa: SIM905
    "upsample_nearest2d.vec upsample_nearest2d _upsample_nearest_exact2d".split(),  # noqa: SIM905
    "upsample_bilinear2d upsample_bicubic2d".split(),  # noqa: SIM905
    "reflection_pad1d replication_pad1d".split(),  # noqa: SIM905
    "reflection_pad2d replication_pad2d".split(),  # noqa: SIM905
    "reflection_pad3d replication_pad3d".split(),  # noqa: SIM905
    "addcmul addcdiv".split(),  # noqa: SIM905
    "mse_loss soft_margin_loss".split(),  # noqa: SIM905
    "smooth_l1_loss huber_loss".split(),  # noqa: SIM905
    "_adaptive_avg_pool2d adaptive_avg_pool2d".split(),  # noqa: SIM905
)


@functools.lru_cache(maxsize=1)
def _class_of() -> dict[str, tuple[str, ...]]:
    return {name: tuple(members) for members in _CLASSES for name in members}


def others_of(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the operators that can take an operator's place."""
    name = str(op.name()).removeprefix("aten::")  # type: ignore[no-untyped-call]
    return tuple(n for n in _class_of().get(name, ()) if n != name)


def with_operator(node: Node, name: str) -> Node:
    """A call of another operator, with the arguments that this one has as well."""
    op = op_named(name)
    arguments = schema_of(op).arguments
    n = sum(1 for a in arguments if not a.kwarg_only)
    known = {a.name for a in arguments}
    kwargs = tuple((k, v) for k, v in node.kwargs if k in known)
    return Node(op, node.args[:n], kwargs, node.module)
