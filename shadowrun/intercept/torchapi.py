"""Every private torch API that interception and replay touch, wrapped once.

Each line says on which versions it was seen and what happens without it. `platforms/torchplatform.py`
and `platforms/sim/device.py` hold those that only they need.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch as _modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "DispatchMode",
    "HigherOrderOperator",
    "autograd_node",
    "autograd_node_number",
    "functionalize_included",
    "in_infra_mode",
    "is_undefined_error",
    "is_zero_tensor",
    "modes_aside",
    "n_modes_below",
    "next_sequence_number",
    "operator_is_composite",
    "pop_mode",
    "push_mode",
    "raw_operator",
    "run_composite",
    "shares_memory",
    "skip_compilation_of",
    "storage_key",
    "top_mode",
    "unheard",
]

# Seen on 2.11 and 2.13. Base class of cond, while_loop, flex_attention: they reach a dispatch mode as
# something that is no OpOverload and has no schema.
HigherOrderOperator: type = torch._ops.HigherOrderOperator

# Seen on 2.11 and 2.13: the sequence number that the next autograd node of this thread gets (0.08 µs).
# Without it, backward operators cannot be given the module and line of their forward call.
next_sequence_number = torch._C._autograd._get_sequence_nr

# Seen on 2.11 and 2.13: the autograd node that is being executed on this thread, None outside backward.
# Without it, the phase of a call cannot be told.
autograd_node: Callable[[], Any] = torch._C._current_autograd_node

# Seen on 2.11 and 2.13. How many modes lie below ours while our handler runs.
n_modes_below = torch._C._len_torch_dispatch_stack

_INFRA_KEYS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
_infra_mode = torch._C._get_dispatch_mode


def autograd_node_number(node: Any) -> int:
    """Sequence number of a node, shared with the forward call that made it."""
    return int(node._sequence_nr())


def in_infra_mode() -> bool:
    """Whether tensors are fake or being traced (FakeTensorMode, make_fx, export): nothing to compare."""
    return n_modes_below() > 0 and any(_infra_mode(key) is not None for key in _INFRA_KEYS)


class _Once:
    """Calls an operator under the modes given, the first time; without any from then on."""

    __slots__ = ("_modes", "_run")

    def __init__(self, run: Callable[..., Any], modes: list[Any]) -> None:
        self._run = run
        self._modes = modes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes, self._modes = self._modes, []
        for mode in reversed(modes):
            _modes._push_mode(mode)
        try:
            return self._run(*args, **kwargs)
        finally:
            for _ in modes:
                _modes._pop_mode()


@contextlib.contextmanager
def modes_aside(run: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Take the modes below ours away: they shall see the user's own call, once, and nothing of ours.

    Seen on 2.11 and 2.13. Switching Python dispatch off for our part would leave no way to switch it on
    again for the user's call.

    Yields:
        `run`, whose first call goes by the user's modes.
    """
    modes = [_modes._pop_mode() for _ in range(n_modes_below())]
    try:
        yield _Once(run, modes)
    finally:
        for mode in reversed(modes):
            _modes._push_mode(mode)


# Seen on 2.11 and 2.13. Entering a mode by `with` also sets flags of the whole process, which threads that come and go
# in another order would leave set.
push_mode: Callable[[Any], None] = _modes._push_mode


top_mode: Callable[[], Any] = _modes._get_current_dispatch_mode


def pop_mode(mode: Any) -> None:
    """Take a mode off this thread's stack, if it is the top one."""
    if top_mode() is mode:
        _modes._pop_mode()


# Seen on 2.11 and 2.13. `unheard(run, (), args, kwargs)` calls `run`, and the warnings that C++ code gives meanwhile
# come at the line of this call; without it, they are collected with those of the user's own call and come at his
# line, twice. (Its purpose is to switch `__torch_function__` off, which a handler has no use for. 0.17 µs.)
unheard: Callable[..., Any] = torch._C._disabled_torch_function_impl


def is_zero_tensor(t: torch.Tensor) -> bool:
    """Whether the tensor has no memory at all (autograd's symbolic zeros); touching it segfaults."""
    return bool(t._is_zerotensor())


def is_undefined_error(error: RuntimeError) -> bool:
    """Whether an error says that a wrapper holds no tensor at all.

    Functionalization on lazy wraps the undefined results of `convolution_backward`, which the CPU gives as None.
    """
    return "tensor does not have a device" in str(error)


# Seen on 2.11 and 2.13: whether two tensors lie on one storage (0.2 µs; by `_cdata` it takes 1 µs).
shares_memory = torch._C._is_alias_of  # type: ignore[attr-defined]


def storage_key(t: torch.Tensor) -> int:
    """Identity of the tensor's storage while that lives (0.45 µs). Seen on 2.11 and 2.13."""
    return int(t.untyped_storage()._cdata)


_BACKENDS = ("CPU", "CUDA", "MPS", "XPU", "XLA", "HPU", "MTIA", "PrivateUse1", "Lazy")


def raw_operator(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """What an `OpOverload` calls when it is called: 0.4 µs less per call. Seen on 2.11 and 2.13."""
    operator: Callable[..., Any] = getattr(func, "_op", func)
    return operator


def operator_is_composite(name: str) -> bool:
    """Whether an operator only splits into others; `inference_mode` hands such operators over whole.

    One with a kernel of its own for some backend stays whole: that is what this backend runs.
    Seen on 2.11 and 2.13 (`_dispatch_has_kernel_for_dispatch_key`).
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not any(has(name, key) for key in _BACKENDS)


def run_composite(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite operator's own C++ decomposition (never a Python one: those give other numbers)."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextlib.contextmanager
def functionalize_included() -> Iterator[None]:
    """Let functionalizing backends (lazy, XLA) run views inside a mode's handler.

    A handler runs with the Functionalize key excluded, so each view would raise "appears to be a view
    operator, but it has no implementation". Seen on 2.13.
    """
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.Functionalize, False)
        yield


def skip_compilation_of(module: str) -> None:
    """Keep Dynamo from compiling our handlers when the user's code runs eagerly under a compile callback."""
    from torch._dynamo import trace_rules

    trace_rules.add(module)


class DispatchMode(_modes.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """TorchDispatchMode with the three private switches that shadowrun needs."""

    # Seen on 2.11 and 2.13. Without it, a call of cond or flex_attention under the mode raises.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile go on under the mode; without it, compiled functions silently run eagerly."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the handler unwrapped: 1.6 µs less per call and no import of Dynamo (2.1 s)."""
        return False
