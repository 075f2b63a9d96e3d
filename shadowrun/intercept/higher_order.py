"""Operators that take functions (cond, while_loop, flex_attention): what they call is observed like any other call.

torch takes the mode off before it hands over such an operator, and most of their kernels insist on that. So the
mode goes back on around each function that they are given.
"""

from __future__ import annotations

import functools
import threading
import types
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torch_operators, torchapi

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["REASON", "is_inside", "is_observed_region", "observe_regions", "run_observed"]

REASON = "higher-order operator: the operators inside are compared"

_BODIES = (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)
# Those whose own kernel computes more than the functions do, and runs under a mode as well as without.
_COMPUTING = frozenset({"flex_attention", "flex_attention_backward"})


_REGION = "inductor_compiled_code"
_observe_region: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None


def observe_regions(observe: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None) -> None:
    """Hand regions that Inductor compiled over as a whole, to be run there; None: run them like others."""
    global _observe_region  # noqa: PLW0603 - one comparison at a time
    _observe_region = observe


def is_observed_region(func: Any) -> bool:
    """Whether this operator is a compiled region that is handed over as a whole."""
    return _observe_region is not None and getattr(func, "name", str)() == _REGION


class _Depth(threading.local):
    n = 0


_depth = _Depth()


def is_inside() -> bool:
    """Whether such a function runs on this thread: autograd is past, and composite operators arrive whole."""
    return _depth.n > 0


class _Body:
    """A function that runs under the mode, and has the attributes of the one that it wraps."""

    def __init__(self, body: Any, mode: Any) -> None:
        self._body = body
        self._mode = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Torch took the mode off before it called the operator: its functions would run unobserved.
        torchapi.push_mode(self._mode)
        _depth.n += 1
        try:
            return self._body(*args, **kwargs)
        finally:
            _depth.n -= 1
            torchapi.pop_mode(self._mode)

    def __getattr__(self, name: str) -> Any:
        # Kernels may read attributes of the function that they are given.
        return getattr(self._body, name)


def run_observed(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a higher-order operator, so that the mode sees the operators inside.

    Where tensors are traced, it runs as it is: its functions become part of the program's graph.
    """
    # The traced functions become part of the program's graph: a wrapper would be in it.
    if torchapi.in_infra_mode():
        return func(*args, **kwargs)
    if _observe_region is not None and is_observed_region(func):
        return _observe_region(func, args, kwargs)
    kernel = _kernel(func, args)
    if kernel is not None:
        return _Body(kernel, mode)(*args, **kwargs)
    return func(*[_observed_body(a, mode) for a in args], **{k: _observed_body(v, mode) for k, v in kwargs.items()})


def _kernel(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The kernel that may run under a mode, if no other mode and no subclass handles the call."""
    if func.name() not in _COMPUTING or torchapi.n_modes_below():
        return None
    flat = [v for a in args for v in (a if isinstance(a, (list, tuple)) else (a,))]
    # A subclass has its own rule for the operator, which the plain kernel would skip.
    plain = torch.Tensor.__torch_dispatch__
    if any(isinstance(v, torch.Tensor) and type(v).__torch_dispatch__ is not plain for v in flat):
        return None
    return torch_operators.plain_kernel(func)


def _observed_body(value: Any, mode: Any) -> Any:
    if isinstance(value, _BODIES):
        return _Body(value, mode)
    if type(value) in (list, tuple):
        return type(value)(_observed_body(v, mode) for v in value)
    return value
