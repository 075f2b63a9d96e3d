"""Which operators compiled code calls one by one from Python, and which from inside of itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Listening", "unseen", "watches"]

_GENERATED = "<eval_with_key>"
_INTERPRETER = fx.interpreter.__file__


_COPIES = frozenset({"aten.detach.default", "aten.clone.default"})
"""Not told: keeping what was drawn calls them too."""


class Listening(torchapi.DispatchMode):  # type: ignore[no-untyped-call]
    """Tells which operators a graph's own Python code calls; these go on to the modes that are there.

    What is called from inside of compiled code (TorchScript for example) is part of that, and our mode does not see it.

    Args:
        hide: Keep calls from inside from our mode.

    Attributes:
        names: Of operators called from Python, in the order of their calls.
        from_inside: Whether there were other calls.
    """

    def __init__(self, *, hide: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hide = hide
        self.names: list[str] = []
        self.from_inside = False

    def run(self, call: Callable[[], Any]) -> Any:
        """Run compiled code."""
        with self:
            return call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _from_python():
            if str(func) not in _COPIES:
                self.names.append(str(func))
            return func(*args, **(kwargs or {}))
        self.from_inside = True
        run = torchapi.raw_operator(func) if isinstance(func, torch._ops.OpOverload) else func
        if not self._hide:
            return run(*args, **(kwargs or {}))
        return unseen(lambda: run(*args, **(kwargs or {})))


def _is_ours(mode: Any) -> bool:
    """Whether a mode compares operators."""
    return isinstance(mode, ShadowMode) and mode.sees


def watches() -> bool:
    """Whether operators of this thread are compared now; not while it traces."""
    return not torchapi.in_infra_mode() and any(map(_is_ours, torchcompile.modes()))


def unseen(call: Callable[[], Any]) -> Any:
    """Run code without our mode; the user's modes stay."""
    with torchcompile.without(_is_ours):
        return call()


def _from_python() -> bool:
    """Whether a graph's Python code is on the way from `Listening.run` to here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Listening.run.__code__:
        file = frame.f_code.co_filename
        if file.startswith(_GENERATED) or file == _INTERPRETER:
            return True
        frame = frame.f_back
    return False
