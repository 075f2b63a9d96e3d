"""Calls as any device can run them: operators of one backend become those that programs call.

PyTorch picks some operators for the device of a program (flash attention of the CPU, convolutions of oneDNN). A graph
that is to run elsewhere has the operator before that choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shadowrun.studies.zoo.graph import DEVICE, Node
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ALIASES", "NotPortable", "portable"]

_aten: Final = torch.ops.aten

ALIASES: Final = frozenset({"aten::lift_fresh", "aten::lift"})
"""Operators whose result is their argument: they leave no call."""


class NotPortable(Exception):  # noqa: N818 - a reason, caught inside
    """A call that has no form for all devices."""


class _Call(NamedTuple):
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    real: tuple[Any, ...]

    def by_name(self) -> dict[str, Any]:
        """All arguments, defaults included."""
        declared = schema_of(self.op).arguments
        given = {a.name: a.default_value for a in declared if a.has_default_value()}
        given |= {a.name: v for a, v in zip(declared, self.args, strict=False)}
        return given | self.kwargs


def portable(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: str = "",
    real: tuple[Any, ...] = (),
) -> tuple[Node, Mapping[int, int]]:
    """A call as a node.

    Args:
        op: The operator.
        args: Its arguments, as those of `Node`.
        kwargs: Those by name.
        module: As `Node.module`.
        real: The positional arguments as they were, with tensors.

    Returns:
        The node, and which of its results stand for those of the operator; a result that is missing there has no
        counterpart.

    Raises:
        NotPortable: There is no such form.
    """
    name = op.name()  # type: ignore[no-untyped-call]
    # By base name: all overloads of an operator have one portable form.
    rewrite = _REWRITES.get(name.partition(".")[0])
    results: Mapping[int, int] = _Same()
    if rewrite is not None:
        op, args, kwargs, results = rewrite(_Call(op, args, kwargs, real))
    elif name.startswith(_OF_ONE_BACKEND):
        raise NotPortable(f"{name} is of one backend")
    return Node(op, args, _in_order(op, args, kwargs), module), results


class _Same(dict[int, int]):
    """Each result stands for itself, however many there are."""

    def __contains__(self, k: object) -> bool:
        return True

    def __missing__(self, k: int) -> int:
        return k


_OF_ONE_BACKEND: Final = (
    *("mkldnn::", "mkl::", "onednn::", "quantized::", "aten::mkldnn_", "aten::_mkldnn", "aten::cudnn_", "aten::_cudnn"),
    *("aten::_nnpack", "aten::miopen_", "aten::_mps_", "aten::_scaled_dot_product_", "aten::_thnn_fused"),
)


def _in_order(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Arguments by name as the schema orders them; what is made without inputs is made on the device of the run."""
    declared = schema_of(op).arguments
    # Of an operator with tensors, the result lies where they are: a device of its own would move it.
    if any(a.name == "device" for a in declared) and not any("Tensor" in str(a.type) for a in declared):
        kwargs = {**kwargs, "device": DEVICE}
    left = [a for a in declared[min(len(args), len(declared)) :] if a.name in kwargs and a.name not in _OF_THE_HOST]
    return tuple((a.name, kwargs[a.name]) for a in left if not (a.has_default_value() and _is(a, kwargs[a.name])))


_OF_THE_HOST: Final = ("pin_memory", "non_blocking")


def _is(declared: torch.Argument, value: Any) -> bool:
    """Whether a value is the default."""
    default = declared.default_value
    # By type as well: 1 and True are equal, and so are 0 and 0.0.
    return type(value) is type(default) and value == default


_Rewritten = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any], dict[int, int]]


def _attention(call: _Call) -> _Rewritten:
    """Flash, efficient and fused attention: its log-sum-exp, which only a backward pass reads, has no counterpart."""
    given = call.by_name()
    mask = given.get("attn_mask", given.get("attn_bias"))
    args = (given["query"], given["key"], given["value"], mask, given["dropout_p"], given["is_causal"])
    named = {} if given.get("scale") is None else {"scale": given["scale"]}
    # Grouped queries: the fused operators see it by the numbers of heads.
    if len(call.real) > 1 and call.real[0].shape[-3] != call.real[1].shape[-3]:
        named["enable_gqa"] = True
    return _aten.scaled_dot_product_attention.default, args, named, {0: 0}


def _attention_math(call: _Call) -> _Rewritten:
    given = call.by_name()
    args = (*(given[k] for k in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")),)
    named = {k: given[k] for k in ("scale", "enable_gqa") if given.get(k)}
    return _aten.scaled_dot_product_attention.default, args, named, {0: 0}


def _reshape(call: _Call) -> _Rewritten:
    """A view of what has other strides on another device, as the output of attention has, is a copy there."""
    # The same memory as another dtype: a copy of it would have other values.
    if call.op is _aten.view.dtype:
        return call.op, call.args, call.kwargs, {0: 0}
    return _aten.reshape.default, call.args[:2], {}, {0: 0}


def _zeros(call: _Call) -> _Rewritten:
    """Uninitialised memory, and zeros without memory: a program that reads them reads zeros, on all devices."""
    given = call.by_name()
    named = {k: given[k] for k in ("dtype", "layout", "device") if given.get(k) is not None}
    # `zeros` takes no memory format.
    if given.get("memory_format") not in (None, torch.contiguous_format):
        return call.op, call.args, call.kwargs, {0: 0}
    return _aten.zeros.default, (given["size"],), named, {0: 0}


def _zeros_like(call: _Call) -> _Rewritten:
    return _aten.zeros_like.default, call.args, call.kwargs, {0: 0}


def _new_zeros(call: _Call) -> _Rewritten:
    return _aten.new_zeros.default, call.args, call.kwargs, {0: 0}


def _linear(call: _Call) -> _Rewritten:
    return _aten.linear.default, call.args[:3], {}, {0: 0}


_REWRITES: Final[dict[str, Callable[[_Call], _Rewritten]]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_attention_math": _attention_math,
    **dict.fromkeys(("aten::_reshape_alias", "aten::_unsafe_view", "aten::view"), _reshape),
    "aten::_efficientzerotensor": _zeros,
    "aten::empty": _zeros,
    "aten::empty_like": _zeros_like,
    "aten::new_empty": _new_zeros,
    "aten::mkldnn_linear": _linear,
}
