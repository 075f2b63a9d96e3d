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


class _New:
    """What stands for ``__new__`` in `torch.Tensor`: its own wherever it is read from there, or nothing is compared.

    Dynamo keeps what it knows of ``torch.Tensor.__new__`` by the function itself, which it may read while a comparison
    runs; so a function in its place would be known for ever, and its own not.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __get__(self, _: object, owner: type) -> Callable[..., Any]:
        return self.original if owner is torch.Tensor else self._below_no_mode

    def _below_no_mode(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        modes = torchapi.modes()  # none is left where a program kept ``T.__new__`` until after the comparison
        if cls is torch.Tensor or len(modes) != 1 or not isinstance(modes[0], ShadowMode):
            return self.original(cls, *args, **kwargs)
        modes[0].count("torch.Tensor.__new__", _REASON)
        with torchapi.without_modes():
            return self.original(cls, *args, **kwargs)


class Constructor:
    """Lets subclasses be constructed while a comparison runs."""

    def __init__(self) -> None:
        self._new: _New | None = None

    def start(self) -> None:
        """Stand before the constructor of tensors."""
        if "__new__" not in vars(torch.Tensor):  # else somebody had the same idea
            self._new = _New(torch.Tensor.__new__)
            torch.Tensor.__new__ = self._new  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """Go, unless somebody put another in its place meanwhile (then ours passes on)."""
        if self._new is not None and vars(torch.Tensor).get("__new__") is self._new:
            del torch.Tensor.__new__
        self._new = None
