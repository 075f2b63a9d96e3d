"""The old constructor of a tensor subclass, ``T([1.0, 2.0])``, which torch cannot run under a dispatch mode.

It makes a tensor in C++ and then has it become a ``T``. A mode gives a Python object to that tensor before, and no
other can come in its place: torch raises *the raw Tensor object is already associated to a python object of type
Tensor*. What this constructor calls (``lift_fresh``, ``empty``, ``alias``) computes nothing, so it passes by the mode,
and is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Constructor"]

_REASON = "constructor of a tensor subclass"


class Constructor:
    """Lets subclasses be constructed while a comparison runs."""

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

    def stop(self) -> None:
        """Take it away, unless somebody put another in its place meanwhile (then ours passes on)."""
        patched, self._patched = self._patched, None
        if patched is not None and vars(torch.Tensor).get("__new__") in (patched, staticmethod(patched)):
            del torch.Tensor.__new__
