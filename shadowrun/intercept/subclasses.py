"""The old constructor of a tensor subclass, ``T([1.0, 2.0])``, which torch cannot run under a dispatch mode.

It makes a tensor in C++ and then has it become a ``T``. A mode gives a Python object to that tensor before, and no
other can come in its place: torch raises *the raw Tensor object is already associated to a python object of type
Tensor*. What this constructor calls (``lift_fresh``, ``empty``, ``alias``) computes nothing, so it passes by the mode,
and is counted.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["Constructor"]

_REASON = "constructor of a tensor subclass"
_KEEPER = "torch._dynamo.polyfills.tensor"
"""Takes ``torch.Tensor.__new__`` by its identity when it is first imported, and compares signatures; since 2.13."""


class Constructor:
    """Lets subclasses be constructed while a comparison runs.

    It is a finder of modules too: where the program has ``torch._dynamo`` imported meanwhile (by its first
    `torch.compile`, or by a profiler), that is to see torch's own constructor, then and after the comparison.
    """

    def __init__(self) -> None:
        self._patched: Any = None

    def start(self) -> None:
        """Put a function before the constructor of tensors."""
        original: Callable[..., Any] = torch.Tensor.__new__

        def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if cls is not torch.Tensor:
                modes = torchapi.modes()
                if len(modes) == 1 and isinstance(modes[0], ShadowMode):
                    modes[0].count("torch.Tensor.__new__", _REASON)
                    with torchapi.without_modes():
                        return original(cls, *args, **kwargs)
            return original(cls, *args, **kwargs)

        if "__new__" not in vars(torch.Tensor):  # else somebody had the same idea
            self._patched = __new__
            torch.Tensor.__new__ = __new__  # type: ignore[method-assign]
            if _KEEPER not in sys.modules:
                sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Take it away, unless somebody put another in its place meanwhile (then ours passes on)."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        patched, self._patched = self._patched, None
        if patched is not None and vars(torch.Tensor).get("__new__") in (patched, staticmethod(patched)):
            del torch.Tensor.__new__

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Where the one module is that keeps the constructor, with a loader that takes ours away meanwhile."""
        spec = PathFinder.find_spec(name, path, target) if name == _KEEPER else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(spec.loader).pop("exec_module", None)
            self.stop()
            try:
                load(module)
            finally:
                self.start()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
