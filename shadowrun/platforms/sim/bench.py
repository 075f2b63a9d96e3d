"""The workbench on which flaws change the device's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shadowrun.platforms.sim import device

if TYPE_CHECKING:
    from shadowrun.platforms.sim.device import Kernel

__all__ = ["FAULTS", "Bench", "fault"]

Fault = Callable[["Bench"], None]

FAULTS: dict[str, Fault] = {}
"""What each flaw of the catalogue does to the kernels."""


def fault(name: str) -> Callable[[Fault], Fault]:
    """Registers the function that builds the flaw `name` into a `Bench`."""

    def register(function: Fault) -> Fault:
        FAULTS[name] = function
        return function

    return register


@dataclasses.dataclass
class Bench:
    """The changes of a set of flaws.

    Attributes:
        replaced: Replacements per operator: called with the kernel that was there and the arguments.
        before: Called with the arguments of each call; may raise, warn or wait.
        after: Called with the results of each call.
        removed: Operators whose kernel is taken away from the dispatcher.
    """

    replaced: dict[str, list[Callable[..., Any]]] = dataclasses.field(default_factory=dict)
    before: dict[str, list[Callable[..., None]]] = dataclasses.field(default_factory=dict)
    after: dict[str, list[Callable[[Any], Any]]] = dataclasses.field(default_factory=dict)
    removed: set[str] = dataclasses.field(default_factory=set)

    def replace(self, function: Callable[..., Any], *operators: str) -> None:
        """Runs `function(kernel, *args, **kwargs)` on CPU tensors in the place of the kernels."""
        for name in operators:
            self.replaced.setdefault(name, []).append(function)

    def family(self, function: Callable[..., Any], *operators: str) -> None:
        """Replaces functional operators together with their in-place and ``out=`` siblings.

        Args:
            function: Called as ``function(operator, *args)``; returns a fresh value.
            operators: Functional overloads.
        """
        for name in operators:
            plain = device.raw(device.overload(name))
            base, _, variant = name.partition(".")
            self.replace(function, name)
            inplace = f"{base}_.{variant}" if variant else f"{base}_"
            out = f"{base}.out" if variant in {"", "Tensor"} else f"{base}.{variant}_out"
            if device.has_kernel(inplace, "CPU"):
                self.replace(_inplace(function, plain), inplace)
            if device.has_kernel(out, "CPU"):
                self.replace(_out(function, plain), out)

    def call_before(self, function: Callable[..., None], *operators: str) -> None:
        """Runs `function(*args, **kwargs)` on the device's tensors before each call."""
        for name in operators:
            self.before.setdefault(name, []).append(function)

    def call_after(self, function: Callable[[Any], Any], *operators: str) -> None:
        """Hands the device's results to `function` and returns what it returns."""
        for name in operators:
            self.after.setdefault(name, []).append(function)

    def remove(self, *operators: str) -> None:
        """Takes the kernels away, so that the dispatcher itself says that they are missing."""
        self.removed.update(operators)


def _inplace(function: Callable[..., Any], plain: Kernel) -> Callable[..., Any]:
    def kernel(_: Kernel, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target.copy_(function(plain, target, *args, **kwargs))

    return kernel


def _out(function: Callable[..., Any], plain: Kernel) -> Callable[..., Any]:
    def kernel(_: Kernel, *args: Any, out: Any, **kwargs: Any) -> Any:
        value = function(plain, *args, **kwargs)
        return out.resize_(value.shape).copy_(value)

    return kernel
