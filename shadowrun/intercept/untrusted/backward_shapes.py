"""Gradients and saved results of a backward pass have the shapes that the forward call returns: kernels believe that.

Autograd gives them so, and a file may give any. The forward call on meta tensors has the shapes, and the checks of its
own arguments, which the backward pass does not repeat.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.untrusted.argument_checks import overlaps_itself
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["has_forward", "unlike_forward"]

_NAME: Final = re.compile(r"(\w+?)_backward(?:_data|_impl)?")
_ELEMENTWISE: Final = re.compile(
    r"_prelu_kernel|binary_cross_entropy|elu|fake_quantize\w+|gelu|glu|hard(shrink|sigmoid|swish|tanh)|huber_loss|leaky_relu"
    r"|log_sigmoid|logit|mish|mse_loss|native_dropout|rrelu_with_noise|sigmoid|silu|smooth_l1_loss|soft_margin_loss"
    r"|softplus|softshrink|tanh|threshold"
)
"""Operators whose backward pass takes any shapes that broadcast, as `torch.func.vmap` gives them, and looks at them."""

_GRADIENTS: Final = ("grad_output", "grad_out", "grad", "grad_out_")
_SAVED: Final = {
    **dict.fromkeys(("output", "out", "cdist", "pdist", "neg_log_likelihood"), 0),
    **dict.fromkeys(("mean", "indices", "buffer", "total_weight", "logsumexp", "is_target", "log_alpha"), 1),
    "rstd": 2,
}
"""Arguments that are results of the forward call, by their number there; `memory_bounds` has those of batch norm."""
_OTHER_NAMES: Final = {"training": "train", "input": "self", "self": "input"}
_UNUSED: Final[dict[str, Any]] = {"float": 0.5, "bool": False}
"""What shapes do not depend on."""


@functools.lru_cache(maxsize=4096)
def has_forward(base: str) -> bool:
    """Whether an operator such as ``native_layer_norm_backward`` is looked at."""
    found = _NAME.fullmatch(base)
    return found is not None and _ELEMENTWISE.fullmatch(found[1]) is None


def unlike_forward(base: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Why the arguments of a backward pass are not those of a forward call.

    Args:
        base: ``native_layer_norm_backward``.
        given: Its arguments by name; None for what is not known yet.
    """
    gradient = next((name for name in _GRADIENTS if name in given), None)
    found = ((f, _arguments(f, given)) for f in _forwards_of(base))
    forward, arguments = next(((f, a) for f, a in found if a is not None), (None, None))
    if forward is None or arguments is None or gradient is None:
        return
    try:
        returned = forward(*arguments[0], **arguments[1])
    except NotImplementedError:  # without a rule for shapes
        return
    except Exception as error:
        yield f"its forward call refuses them: {' '.join(str(error).split())[:200]}"
        return
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    for name, number in ((gradient, 0), *_SAVED.items()):
        t = given.get(name)
        if not isinstance(t, torch.Tensor) or number >= len(results) or not isinstance(results[number], torch.Tensor):
            continue
        if t.shape != results[number].shape:
            yield f"{name} has another shape than {tuple(results[number].shape)}, which the forward call returns"
        elif name != gradient and overlaps_itself(t):  # gradients may; of results, kernels read dense memory
            yield f"elements of {name} lie in the same place, which those of no result do"


@functools.lru_cache(maxsize=1024)
def _forwards_of(base: str) -> tuple[torch._ops.OpOverload, ...]:
    found = _NAME.fullmatch(base)
    packets = [getattr(torch.ops.aten, name, None) for name in (f"{found[1]}_forward", found[1])] if found else []
    packet = next(filter(None, packets), None)
    overloads = packet.overloads() if packet is not None else []
    return tuple(getattr(packet, name) for name in ("default", "Tensor") if name in overloads)


def _arguments(forward: torch._ops.OpOverload, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of the forward call, tensors without values; None if one is not known, or is no dense tensor."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema_of(forward).arguments:
        value = _argument(argument, given)
        if isinstance(value, torch.Tensor) and "Tensor" not in str(argument.type):  # another overload takes it
            return None
        if value is None and not argument.has_default_value() and not str(argument.type).startswith("Optional["):
            return None
        try:
            value = _as_meta(value)
        except NotImplementedError:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _argument(argument: Any, given: Mapping[str, Any]) -> Any:
    for name in (argument.name, _OTHER_NAMES.get(argument.name, "")):
        if name in given:
            return given[name]
    if argument.name in ("input", "self"):
        # Those that resize have its size only; of a softmax, the result has the same shape.
        size, t = given.get("input_size"), given.get("grad_output")
        if isinstance(size, (list, tuple)) and isinstance(t, torch.Tensor):
            return torch.empty(size, dtype=t.dtype, device="meta") if all(type(n) is int for n in size) else None
        return given.get("output")
    return argument.default_value if argument.has_default_value() else _UNUSED.get(str(argument.type))


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotImplementedError
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_as_meta(v) for v in value] if isinstance(value, (list, tuple)) else value
