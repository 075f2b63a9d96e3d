"""Calls of a file with a look at the operators inside: a composite operator splits into others, which check no more.

``embedding_backward`` calls ``embedding_dense_backward``, and functions of torch call operators: what these get is
known only when they are called.
"""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.torch_operators import decomposition, operator_splits
from shadowrun.intercept.torchapi import DispatchMode, storage_key
from shadowrun.intercept.untrusted.op_allowlist import Refused, check_arguments, check_places, depends_on_values
from shadowrun.torch_private import negated_view, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "CheckedCalls",
    "changed_call",
    "check_call",
    "check_changed",
    "check_inside",
    "graphs_of_file",
    "looks_of_file",
]

_OF_FILE: Final[ContextVar[bool]] = ContextVar("graphs of a file", default=False)


class CheckedCalls(DispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the operators that functions, methods and composite operators call.

    Args:
        of_graph: They are those of a graph, which is compiled, too.

    Raises:
        Refused: One has arguments that no file may give.
    """

    def __init__(self, *, of_graph: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_graph = of_graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Of the others, all that may be wrong is in the schema and was looked at when the file was read.
        if isinstance(func, torch._ops.OpOverload):
            if depends_on_values(func):
                check_arguments(func, args, kwargs)
            # Compiled code may keep a part of a tensor alone, or a number for all that are equal, and does not look.
            if self._of_graph and func in _VIEWS_OF_STORAGE:
                raise Refused(f"{func.name()} reaches beyond its tensor, into memory that compiled code may not have")  # type: ignore[no-untyped-call]
            # Below autograd a composite operator comes whole: what it calls is looked at, too.
            if _splits(func):
                with self:
                    return decomposition(func)(*args, **kwargs)
        return func(*args, **kwargs)


# The operators that reach beyond their tensor, to the end of its storage.
_VIEWS_OF_STORAGE: Final = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
    for overload in getattr(torch.ops.aten, name).overloads()
)


@contextlib.contextmanager
def graphs_of_file() -> Iterator[None]:
    """Graphs that run inside are those of a file: each run is looked at, since each has values of its own."""
    token = _OF_FILE.set(True)
    try:
        yield
    finally:
        _OF_FILE.reset(token)


def looks_of_file(*, compiled: bool = False) -> contextlib.AbstractContextManager[Any]:
    """For a run of a graph: looks at its calls inside of `graphs_of_file`, and does nothing elsewhere.

    In float64, or with other rounding, a graph that computes indices may get others. Enter it after other modes: it
    must not see what they call.

    Args:
        compiled: The run is one of compiled code, which lays tensors out in another way for the kernels that it calls.
    """
    return CheckedCalls(of_graph=not compiled) if _OF_FILE.get() else contextlib.nullcontext()


def check_call(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    checked: bool = True,
    stand_in: Callable[..., Any] | None = None,
) -> None:
    """Look at a call of a file, and at those inside of it.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Those by name.
        checked: Whether they must be what a file may give; else they only have to fit the schema.
        stand_in: What the CPU computes for an operator of another device.

    Raises:
        Refused: No file may have it made.
    """
    check_arguments(func, args, kwargs, checked=checked)
    if checked:
        check_inside(func, args, kwargs, stand_in)


@contextlib.contextmanager
def changed_call(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, stands_in: bool = False
) -> Iterator[None]:
    """Inside, a call is made with arguments that were derived from those of another: slices, other values, defaults.

    The other call was valid, or was looked at. It is not known whether the arguments of this one fit each other.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Those by name.
        stands_in: Whether several operators are called in its place.

    Raises:
        Refused: A kernel would read or write outside of its tensors; also while the call is made.
    """
    check_places(func, args, kwargs)
    if not stands_in and not _splits(func):
        yield
        return
    # What stands in may start a thread, which looks too.
    with graphs_of_file(), CheckedCalls():
        yield


def check_changed(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stand_in: Callable[..., Any] | None = None,
) -> None:
    """As `changed_call`, before a call that another thread, device or process makes; inside only for calls of a file.

    Args:
        func: The operator.
        args: Its arguments, on the CPU.
        kwargs: Those by name.
        stand_in: What the CPU computes for an operator of another device.

    Raises:
        Refused: A kernel would read or write outside of its tensors.
    """
    check_places(func, args, kwargs)
    # The recorder splits composite operators, so that a program's own call is none.
    if _OF_FILE.get():
        check_inside(func, args, kwargs, stand_in)


def check_inside(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stand_in: Callable[..., Any] | None = None,
) -> None:
    """Make a call of a composite operator once, on copies, and look at each call inside before it is made.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Those by name.
        stand_in: Called in its place; may be several operators too.

    Raises:
        Refused: No file may have one of them made.
    """
    if stand_in is None and not _splits(func):
        return
    # The call inside may draw: what the file's own call draws afterwards must be what it is without the look.
    state = torch.get_rng_state()
    # An inner call in place writes to its arguments, and the caller's tensors are still to be used.
    copies = _Copies()
    args, kwargs = tuple(map(copies.copy, args)), {k: copies.copy(v) for k, v in kwargs.items()}
    try:
        # A stand-in starts a thread, which looks too.
        with torch.no_grad(), graphs_of_file(), CheckedCalls():
            (stand_in or func)(*args, **kwargs)
    except Refused:
        raise
    except Exception:  # it raises where it is called, too
        return
    finally:
        torch.set_rng_state(state)


class _Copies:
    """Copies that lie in memory as their tensors do: kernels believe strides too, and that memory is not shared."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first keeps its number from being reused
        self._memories: dict[int, torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:
        """A copy of a tensor, or of those in a list; other values as they are."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, self._tensor(value.detach())
            return self._tensors[id(value)][1]
        return type(value)(map(self.copy, value)) if type(value) in (list, tuple) else value

    def _tensor(self, t: torch.Tensor) -> torch.Tensor:
        if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.device.type != "cpu":
            return t.clone()
        key = storage_key(t)  # tensors without elements have one address, and not one storage
        if key not in self._memories:
            self._memories[key] = t.untyped_storage().clone()  # type: ignore[no-untyped-call]
        laid = torch.empty(0, dtype=t.dtype, device=t.device)
        laid.set_(self._memories[key], t.storage_offset(), t.shape, t.stride())
        laid = laid.conj() if t.is_conj() else laid
        return negated_view(laid) if t.is_neg() else laid


@functools.lru_cache(maxsize=4096)
def _splits(func: torch._ops.OpOverload) -> bool:
    name: str = func.name()  # type: ignore[no-untyped-call]
    return schema_of(func).name.startswith("aten::") and operator_splits(name)
