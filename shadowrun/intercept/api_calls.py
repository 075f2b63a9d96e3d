"""Which function or module of torch the program called to make an operator call: ``F.linear``, ``nn.GRU``.

A function mode sees each function of torch that the program's thread calls. Torch takes it off while the function runs,
so that what the function calls itself is not seen: the outermost function is what the program wrote. A module of
`torch.nn` that called the function comes first, since then the program wrote ``nn.GRU``. Inside of such a module, the
mode is off: `nn.TransformerEncoderLayer`, for one, takes another kernel where it sees a function mode.

The name is only asked for when a context of calls is new; for each function, two attributes are set. In backward, the
number of an autograd node says in which function it was made.
"""

from __future__ import annotations

import bisect
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from shadowrun.intercept.attribution import Attribution

__all__ = ["ApiCalls", "function_name"]

_is_compiling: Callable[[], bool] = torch.compiler.is_compiling
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
_MAX_NODES = 200_000
# Where torch defines a function, to the prefix under which programs call it.
_NAMESPACES = {
    "torch.nn.functional": "F.",
    "torch._C._nn": "F.",
    "torch.functional": "torch.",
    "torch._C._linalg": "torch.linalg.",
    "torch._C._fft": "torch.fft.",
    "torch._C._special": "torch.special.",
    "torch._C._sparse": "torch.sparse.",
    "torch._C._nested": "torch.nested.",
    "torch._tensor": "",
}
_PREFIXES = ("linalg_", "fft_", "special_", "sparse_", "nested_")
_OPTIMIZERS = "torch.optim."


def function_name(function: Any) -> str:
    """A function of torch as programs write it: ``F.linear``, ``torch.mm``, ``Tensor.__matmul__``."""
    name = getattr(function, "__name__", "") or type(function).__name__
    owner = getattr(function, "__self__", None)
    if name in ("__get__", "__set__", "__delete__") and owner is not None:  # a property: Tensor.grad
        return f"Tensor.{getattr(owner, '__name__', name)}"
    if getattr(function, "__objclass__", None) is not None:
        return f"Tensor.{name}"
    # Those of torch itself are methods of a class in C.
    qualified = getattr(function, "__qualname__", name).removeprefix("_VariableFunctionsClass.")
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(function)
    module = getattr(function, "__module__", None) or ""
    if isinstance(owner, type(torch)):  # a function in C of a module: torch._C._nn.gelu
        module = owner.__name__
    prefix = _NAMESPACES.get(module, f"{module}." if module else "")
    if module.startswith("torch._C."):
        qualified = name
        for known in _PREFIXES:
            qualified = qualified.removeprefix(known)
    return f"{prefix}{qualified}"


class ApiCalls(torchapi.FunctionMode):  # type: ignore[misc]
    """The function mode of one comparison, for the thread that starts it."""

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()
        self._attribution = attribution
        self._next_number: Callable[[], int] = torchapi.next_sequence_number
        self._function: Any = None
        # Of each function that made autograd nodes: the number after its last node; the first one, itself, the module.
        self._ends: list[int] = []
        self._made: list[tuple[int, Any, str]] = []
        self._paths: dict[str, str] = {}
        self._of_torch: dict[type, bool | None] = {}
        self._inside = False  # of a module of torch, where the mode is off
        self._thread = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_compiling():  # a constant for Dynamo, which traces this function
            return func(*args, **kwargs) if kwargs else func(*args)
        first = self._next_number()
        before, self._function = self._function, func
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self._function = before
            if self._next_number() != first:
                self._add_nodes(first, func, self._attribution.module_path())

    def _add_nodes(self, first: int, function: Any, path: str) -> None:
        self._ends.append(self._next_number())
        self._made.append((first, function, path))
        if len(self._ends) > _MAX_NODES:
            del self._ends[: _MAX_NODES // 2], self._made[: _MAX_NODES // 2]

    def enter_module(self, module: torch.nn.Module) -> int | None:
        """The program, or a module, calls a module: take the mode off before one of torch, and put it back inside.

        Returns:
            What `leave_module` needs; None if it need not be called.
        """
        kind = type(module)
        try:
            of_torch = self._of_torch[kind]
        except KeyError:
            of_torch = self._of_torch[kind] = _is_of_torch(kind)
        if of_torch is None or of_torch is self._inside or self._thread != threading.get_ident():
            return None
        if of_torch:
            if not torchapi.is_top_function_mode(self):  # in a function already, or below a mode of the program's
                return None
            torchapi.remove_function_mode(self)
        else:
            torchapi.push_function_mode(self)
        self._inside = of_torch
        return self._next_number()

    def leave_module(self, first: int, path: str) -> None:
        """A module for which `enter_module` returned a number has returned."""
        if self._thread != threading.get_ident():  # the comparison stopped inside
            return
        if self._inside:
            torchapi.push_function_mode(self)
            if self._next_number() != first:
                self._add_nodes(first, None, path)
        else:
            torchapi.remove_function_mode(self)
        self._inside = not self._inside

    def enter(self) -> None:
        """Put the mode on the stack of this thread."""
        self._thread = threading.get_ident()
        self._inside = False
        self._attribution.api = self
        # Numbers of nodes count on: those of an earlier block may still be met.
        torchapi.push_function_mode(self)

    def leave(self) -> None:
        """Take it off, wherever it lies."""
        if self._thread == threading.get_ident() and not self._inside:
            torchapi.remove_function_mode(self)
        self._thread = 0
        self._attribution.api = None

    def name_of_call(self, phase: str) -> str:
        """What the program called to make the operator call in hand; empty if nothing of torch.

        Args:
            phase: Phase of the call.
        """
        if phase == Phase.OPTIMIZER:
            return _optimizer_step()
        node = torchapi.autograd_node()
        if node is not None:
            number = torchapi.autograd_node_number(node)
            at = bisect.bisect_right(self._ends, number)
            if at < len(self._ends) and self._made[at][0] <= number:
                _, function, path = self._made[at]
                return self._module_of(path) or ("" if function is None else function_name(function))
        if self._thread != threading.get_ident():
            return ""
        module = "" if node is not None else self._module_of(self._attribution.module_path())
        return module or ("" if self._function is None else function_name(self._function))

    def _module_of(self, path: str) -> str:
        """The outermost module of `torch.nn` around a module that was called last by a module of the program."""
        if not path:
            return ""
        if path not in self._paths:
            # All at once: to go through them for each would take quadratic time.
            kinds = {p: type(module) for p, module in self._attribution.modules()}
            for name in kinds:
                self._paths[name] = _outermost(name, kinds)
            self._paths.setdefault(path, "")
        return self._paths[path]


def _is_of_torch(kind: type) -> bool | None:
    """Whether a class of modules is torch's; None for containers, whose modules are what the program calls."""
    if not kind.__module__.startswith("torch.nn.modules."):
        return False
    return None if kind.__name__ in _CONTAINERS else True


def _outermost(path: str, kinds: dict[str, type]) -> str:
    found = ""
    while path:
        kind = kinds.get(path)  # of a ModuleList too, which is never called
        of_torch = None if kind is None else _is_of_torch(kind)
        if of_torch is False:
            break
        if of_torch and kind is not None:
            found = f"nn.{kind.__name__}"
        path = path.rpartition(".")[0]
    return found


def _optimizer_step() -> str:
    """``optim.AdamW.step``, of the optimizer whose step is under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step":
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, torch.optim.Optimizer):
                kind = type(optimizer)
                prefix = "optim." if kind.__module__.startswith(_OPTIMIZERS) else f"{kind.__module__}."
                return f"{prefix}{kind.__name__}.step"
        frame = frame.f_back
    return ""
