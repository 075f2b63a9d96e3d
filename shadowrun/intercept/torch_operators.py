"""Private torch APIs of operators: their kernels, names and decompositions, and functionalized tensors.

Each comment names the versions on which it was seen, and the effect of its absence; `torchapi` has modes and autograd.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.backends import DISPATCH_KEYS
from shadowrun.torch_private import schema_of
from shadowrun.torch_versions import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "HigherOrderOperator",
    "common_operators",
    "decomposition",
    "functionalize_included",
    "has_autograd_kernel",
    "is_undefined_error",
    "operator_is_composite",
    "operator_is_dispatched",
    "operator_names",
    "operator_splits",
    "plain_kernel",
    "raw_operator",
    "unwrapped",
]

need(
    *("torch._ops.HigherOrderOperator", "torch._ops.OpOverload", "torch.ops.aten.add.Tensor._op_dk"),
    *("torch._C._PreserveDispatchKeyGuard", "torch._C._dispatch_tls_set_dispatch_key_excluded"),
    *("torch._C._dispatch_has_kernel", "torch._C._dispatch_has_kernel_for_dispatch_key"),
    *("torch._C.DispatchKey.CompositeExplicitAutograd", "torch._C.DispatchKey.CompositeImplicitAutograd"),
    "torch._C.DispatchKey.ADInplaceOrView",
    *("torch._C.DispatchKey.AutogradFunctionality", "torch._C.DispatchKey.Functionalize"),
    *("torch._C.DispatchKey.Conjugate", "torch._C.DispatchKey.Negative"),
)


# Seen on 2.11 and 2.13. Base class of cond, while_loop, flex_attention: they reach a dispatch mode as
# something that is no OpOverload and has no schema.
HigherOrderOperator: type = torch._ops.HigherOrderOperator


def plain_kernel(func: Any) -> Callable[..., Any] | None:
    """What a higher-order operator runs on plain tensors, whatever the mode.

    Seen on 2.11 and 2.13. Without it, what such a kernel computes itself is not observed.
    """
    kernel: Callable[..., Any] | None = getattr(func, "py_kernels", {}).get(
        torch._C.DispatchKey.CompositeExplicitAutograd
    )
    return kernel


# Of the programs in benchmarks/workloads.py, and their likes.
_COMMON = """
    _local_scalar_dense _log_softmax _log_softmax_backward_data _safe_softmax
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward _softmax
    _softmax_backward_data _to_copy _unsafe_view add.Tensor add_.Tensor addcdiv_ addcmul_ addmm alias arange argmax
    bernoulli_.float bmm cat clone constant_pad_nd convolution convolution_backward copy_ cos detach div.Scalar
    div.Tensor div_.Scalar embedding embedding_dense_backward empty.memory_format empty_like exp expand gelu
    gelu_backward index.Tensor lerp_.Scalar lift_fresh masked_fill.Scalar max_pool2d_with_indices
    max_pool2d_with_indices_backward mean mean.dim mm mse_loss mse_loss_backward mul.Scalar mul.Tensor mul_.Scalar
    mul_.Tensor native_batch_norm native_batch_norm_backward native_dropout native_layer_norm
    native_layer_norm_backward neg nll_loss_backward nll_loss_forward ones_like permute pow.Tensor_Scalar relu rsqrt
    select.int select_backward sigmoid sigmoid_backward silu silu_backward sin slice.Tensor slice_backward
    split.Tensor sqrt squeeze.dim sub.Tensor sum sum.dim_IntList t tanh tanh_backward threshold_backward transpose.int
    unsqueeze view zero_ zeros zeros_like
""".split()  # noqa: SIM905


def common_operators(mode: type) -> Iterator[torch._ops.OpOverload]:
    """Operators of torch that most training steps call, as far as this version has them, ready for a dispatch mode.

    Torch makes the object of an operator, and an entry for its dispatch rules, when it first hands the operator to a
    mode. Seen on 2.13 (`find_torch_dispatch_rule`). Without it, the first call of each operator takes 40 µs longer.
    """
    registry = getattr(getattr(torch, "_library", None), "simple_registry", None)
    make_ready: Callable[[Any, type], Any] | None = getattr(registry, "find_torch_dispatch_rule", None)
    for name in _COMMON:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if func is None:
            continue
        if make_ready is not None:
            make_ready(func, mode)
        yield func


def is_undefined_error(error: RuntimeError) -> bool:
    """Whether an error says that a wrapper holds no tensor at all.

    Functionalization on lazy wraps the undefined results of `convolution_backward`, which the CPU gives as None.
    """
    # torch raises a plain RuntimeError: only its text says which it is.
    return "tensor does not have a device" in str(error)


def raw_operator(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """What an `OpOverload` calls when it is called: 0.4 µs less per call. Seen on 2.11 and 2.13."""
    operator: Callable[..., Any] = getattr(func, "_op", func)
    if str(func) in _CONJUGATES_INSIDE:
        return _including(operator, torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
    if _writes_to_lists(func):
        return _including(operator, torch._C.DispatchKey.ADInplaceOrView)
    return _taking_numbers(operator) if str(func) in _ASKED_OF_CONSTANTS else operator


# TorchScript asks these of its constants, which a mode gets as Python numbers.
_ASKED_OF_CONSTANTS = ("aten._local_scalar_dense.default", "aten.equal.default")
_CONJUGATES_INSIDE = ("aten.linalg_pinv.atol_rtol_tensor", "aten.linalg_pinv.atol_rtol_tensor_out")


def _writes_to_lists(func: torch._ops.OpOverload) -> bool:
    return any(
        a.alias_info is not None and a.alias_info.is_write and "List" in str(a.type) for a in schema_of(func).arguments
    )


def _including(operator: Callable[..., Any], *keys: torch._C.DispatchKey) -> Callable[..., Any]:
    """An operator whose one kernel for all devices calls others that need these keys."""
    # A mode's handler runs with them excluded, so under any mode, an empty one included, the pseudo-inverse of a
    # complex matrix is far off (it multiplies conjugated views), and `_foreach_add_` counts no write to its tensors:
    # autograd then loses gradients of views, and does not raise where a saved tensor was written to. Seen on 2.13.

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._PreserveDispatchKeyGuard():
            for key in keys:
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
            return operator(*args, **kwargs)

    return run


def _taking_numbers(operator: Callable[..., Any]) -> Callable[..., Any]:
    # "An operator that TorchScript calls on its constants, which torch hands to a mode as numbers and takes no
    # numbers.""" Seen on 2.11 and 2.13. Without it, a scripted or traced function with a number in it raises under a
    # mode.

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [a if isinstance(a, torch.Tensor) else torch.tensor(a) for a in args]
        return operator(*tensors, **kwargs)

    return run


def operator_is_dispatched(name: str) -> bool:
    """Whether an operator is one of the dispatcher's, and no built-in function of TorchScript.

    Seen on 2.11 and 2.13 (`_dispatch_has_kernel`).
    """
    return torch._C._dispatch_has_kernel(name)


def operator_is_composite(name: str) -> bool:
    """Whether an operator only splits into others; `inference_mode` and higher-order operators hand such over whole.

    One with a kernel of its own for some backend stays whole: that is what this backend runs.
    Seen on 2.11 and 2.13 (`_dispatch_has_kernel_for_dispatch_key`).
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return has(name, "CompositeImplicitAutograd") and not any(has(name, key) for key in DISPATCH_KEYS)
    except RuntimeError:  # Python's own (`aten::sym_size` of jagged tensors): the dispatcher does not know them
        return False


def operator_splits(name: str) -> bool:
    """Whether an operator may split into others, on some device.

    Seen on 2.11 and 2.13 (`_dispatch_has_kernel_for_dispatch_key`).
    """
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:  # as above
        return False


def operator_names() -> frozenset[str]:
    """All operators of this process, as ``aten::add.Tensor``; empty where torch has no list.

    Seen on 2.11 and 2.13 (`_dispatch_get_all_op_names`). Without it, a name that is written wrong is found out later.
    """
    names: Callable[[], list[str]] | None = getattr(torch._C, "_dispatch_get_all_op_names", None)
    return frozenset(names()) if names is not None else frozenset()


def decomposition(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """A composite operator's own C++ decomposition (never a Python one: those give other numbers)."""
    return functools.partial(func._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def functionalize_included(*, autograd: bool = False) -> Iterator[None]:
    """Let functionalizing backends (lazy, XLA) run views inside a mode's handler.

    A handler runs with the Functionalize key excluded, so each view would raise "appears to be a view
    operator, but it has no implementation". Seen on 2.11 and 2.13.

    Args:
        autograd: Let calls pass autograd's kernels too, which then record nothing (`has_autograd_kernel`).
    """
    keys = [torch._C.DispatchKey.Functionalize]
    if autograd:
        keys += [torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView]
    with torch._C._PreserveDispatchKeyGuard(), torch.set_grad_enabled(torch.is_grad_enabled() and not autograd):
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def unwrapped(t: torch.Tensor) -> torch.Tensor:
    """The tensor that functionalization has wrapped, which is what a mode's handler sees; others as they are.

    Seen on 2.11 and 2.13. Without ``torch._from_functional_tensor`` results of factories cannot be distinguished from
    what they wrap.
    """
    if not torch._is_functional_tensor(t):
        return t
    # Without this, writes to the base or to another view of it that still wait would be missing.
    torch._functionalize_sync(t)
    return torch._from_functional_tensor(t)


def has_autograd_kernel(name: str, backend: str) -> bool:
    """Whether a backend has a kernel of its own for an operator above autograd: lazy splits group norm there.

    Such a backend need not have one below, where a mode's handler is. Seen on 2.11 and 2.13.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autograd{backend}")
