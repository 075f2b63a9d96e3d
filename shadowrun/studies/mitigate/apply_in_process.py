"""Mitigations that are no setting of a platform, done in the child process that runs the program.

A wrapper acts on calls of modules from outside: the program's own code runs unchanged. *Outermost* is a module that no
other module calls; *innermost* is one without children.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from shadowrun.intercept import torch_compiler
from shadowrun.studies.mitigate.mitigations import TRUNCATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["applied"]

# For each dtype: integers of its width, and its mantissa bits.
_INTEGERS: Final = {
    torch.float64: (torch.int64, 52),
    torch.float32: (torch.int32, 23),
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
}
_WIDENED: Final = (torch.float32, torch.float16, torch.bfloat16)


@contextlib.contextmanager
def applied(names: Sequence[str]) -> Iterator[None]:
    """Apply mitigations inside, of those that are done in the process; others are ignored.

    Args:
        names: Their names.
    """
    with contextlib.ExitStack() as stack:
        if "bf16_reduction=off" in names:
            _full_reductions()
        outermost = [_WRAPPERS[name]() for name in names if name in _WRAPPERS]
        n_bits = [int(name.removeprefix(TRUNCATE)) for name in names if name.startswith(TRUNCATE)]
        if outermost or n_bits:
            stack.enter_context(_wrapped_modules(outermost, n_bits[0] if n_bits else 0))
        yield


def _full_reductions() -> None:
    """Have cuBLAS add in float32 inside 16-bit products. Not undone: the process ends with the program."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class _ChannelsLast:
    """Lays out what an outermost module gets and has; its results keep the layout, as in a program that does so."""

    def before(self, module: nn.Module) -> None:
        for t in _tensors_of(module):
            if t.dim() == 4 and t.is_floating_point() and _is_plain(t):
                _replace_data(t, lambda data: data.contiguous(memory_format=torch.channels_last))

    def given(self, t: torch.Tensor) -> torch.Tensor:
        fits = t.dim() == 4 and t.is_floating_point() and _is_plain(t)
        return t.contiguous(memory_format=torch.channels_last) if fits else t

    def returned(self, _module: nn.Module, t: torch.Tensor) -> torch.Tensor:
        return t


class _Float64:
    """Has an outermost module compute in float64; the program gets the dtype that the module had."""

    def __init__(self) -> None:
        # Weak: the program may drop its modules, and numbers of freed objects come again.
        self._before: weakref.WeakKeyDictionary[nn.Module, torch.dtype] = weakref.WeakKeyDictionary()
        self._given = threading.local()

    def before(self, module: nn.Module) -> None:
        for t in _tensors_of(module):
            if t.dtype in _WIDENED and _is_plain(t):
                self._before.setdefault(module, t.dtype)
                _replace_data(t, torch.Tensor.double)
        # Of this call: the module may have been given another dtype before.
        self._given.dtype = None

    def given(self, t: torch.Tensor) -> torch.Tensor:
        if t.dtype not in _WIDENED or not _is_plain(t):
            return t
        if self._given.dtype is None:
            self._given.dtype = t.dtype
        return t.double()

    def returned(self, module: nn.Module, t: torch.Tensor) -> torch.Tensor:
        # A module without parameters returns what it was given, such as a loss.
        dtype = self._before.get(module) or self._given.dtype
        return t.to(dtype) if t.dtype is torch.float64 and dtype is not None else t


_WRAPPERS: Final[dict[str, Callable[[], _ChannelsLast | _Float64]]] = {
    "channels_last": _ChannelsLast,
    "float64": _Float64,
}


class _Truncated(torch.autograd.Function):
    """Clears the lowest mantissa bits; the gradient passes unchanged, as if nothing had been done."""

    @staticmethod
    def forward(_ctx: Any, t: torch.Tensor, n_bits: int) -> torch.Tensor:
        # A copy: a recording has the digest of a view's base, which would be that of integers.
        return (t.view(_INTEGERS[t.dtype][0]) & (-1 << n_bits)).view(t.dtype).clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
        # Clearing bits is a step function, whose derivative is 0 nearly everywhere: nothing would train.
        return gradients[0], None


@contextlib.contextmanager
def _wrapped_modules(outermost: Sequence[_ChannelsLast | _Float64], n_bits: int) -> Iterator[None]:
    """Wrap `nn.Module.__call__` inside."""
    # Not by hooks: torch's hooks for all modules do not see keyword arguments.
    original = nn.Module.__call__
    # Modules may be called in several threads, as by DataParallel: each has an outermost one of its own.
    depth = threading.local()

    def truncated(t: torch.Tensor) -> torch.Tensor:
        fits = t.dtype in _INTEGERS and n_bits < _INTEGERS[t.dtype][1] and _is_plain(t)
        return _Truncated.apply(t, n_bits) if fits else t  # type: ignore[no-untyped-call]

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        wrappers = outermost if not getattr(depth, "n", 0) else ()
        for wrapper in wrappers:
            wrapper.before(self)
            args, kwargs = _mapped(args, wrapper.given), _mapped(kwargs, wrapper.given)
        depth.n = getattr(depth, "n", 0) + 1
        try:
            out = original(self, *args, **kwargs)
        finally:
            depth.n -= 1
        # Innermost ones only: what a parent returns consists of what they return, and would be truncated twice.
        if n_bits and next(self.children(), None) is None:
            out = _mapped(out, truncated)
        # The last that changed the inputs is the first to change the results, as of nested functions.
        for wrapper in reversed(wrappers):
            out = _mapped(out, functools.partial(wrapper.returned, self))
        return out

    # Without this, each module inside a compiled one would break the graph.
    torch_compiler.replace_module_call(__call__, original)
    nn.Module.__call__ = __call__  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        torch_compiler.restore_module_call(__call__, original)


def _tensors_of(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _replace_data(t: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a parameter or buffer and its gradient; the object stays, since an optimizer may hold it."""
    # By `.data`: autograd allows no change of dtype in place, and no in-place write to a leaf that needs a gradient.
    t.data = change(t.data)
    if t.grad is not None:
        t.grad.data = change(t.grad.data)


def _is_plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and type(t) in (torch.Tensor, nn.Parameter, nn.Buffer)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with the tensors in it changed: in tuples, lists and dictionaries, and those derived from them."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        # A copy of its own class: models return dictionaries with attributes.
        found = copy.copy(value)
        for key, item in value.items():
            found[key] = _mapped(item, change)
        return found
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, change) for item in value]
        # A named tuple takes its items one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
