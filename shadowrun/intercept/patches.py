"""Attributes that are replaced while a comparison runs, and restored: `Patches`, and two of its uses.

`SubclassConstructor`: torch cannot run the old constructor of a tensor subclass, ``T([1.0, 2.0])``, under a dispatch
mode. It makes a tensor in C++ and then has it become a ``T``. A mode gives a Python object to that tensor before, and
no other can come in its place: torch raises *the raw Tensor object is already associated to a python object of type
Tensor*. What this constructor calls (``lift_fresh``, ``empty``, ``alias``) computes nothing, so it runs below the mode,
and is counted.

`GraphCaptures`: while a CUDA graph is captured, no thread of the process may wait for the device, query an event, or
get or return page-locked memory: the capture would fail, or the process end in a destructor. So asynchronous
comparisons end first.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GraphCaptures", "Patches", "SubclassConstructor"]


class Patches:
    """Replaced attributes of classes and modules."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by what `make` gives for it."""
        # `vars`, since an inherited attribute that is set back would stay on the class.
        original = vars(owner)[name]
        patched = make(original)
        setattr(owner, name, patched)
        self._made.append((owner, name, original, patched))

    def restore(self) -> None:
        """Put the originals back, except where other code has replaced the patch since (and may still call it)."""
        while self._made:
            # The last one first: two patches of one attribute lie on each other.
            owner, name, original, patched = self._made.pop()
            # Another library's patch calls ours: removing it would remove that library's work.
            if vars(owner)[name] is patched:
                setattr(owner, name, original)


class GraphCaptures:
    """Calls functions before and after each capture of a graph.

    Args:
        device_type: ``cuda``: its graphs are `torch.cuda.CUDAGraph`. Devices without graphs have nothing to watch.
        begins: Called before a capture.
        ends: Called after it, also where it failed.
    """

    def __init__(self, device_type: str, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        module = getattr(torch, device_type, None)
        self._graph: Any = getattr(module, f"{device_type.upper()}Graph", None)
        self._begins, self._ends = begins, ends
        self._patches = Patches()

    def start(self) -> None:
        """Begin to watch."""
        # `torch.cuda.graph` and `make_graphed_callables` both end in these methods.
        for name, make in (("capture_begin", self._beginning), ("capture_end", self._ending)):
            if self._graph is not None and name in vars(self._graph):
                self._patches.replace(self._graph, name, make)

    def stop(self) -> None:
        """End it."""
        self._patches.restore()

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):  # the program captures, whatever fails here
                self._begins()
            try:
                # Torch calls operators in here, on its random state, before the stream begins to capture: a copy of
                # theirs that another thread waits for would end the capture.
                return original(*args, **kwargs)
            except BaseException:
                self._ends()
                raise

        return capture_begin

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._ends()

        return capture_end


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
        # The constructor computes nothing, so nothing is lost to the comparison.
        with torchapi.without_modes():
            return self.original(cls, *args, **kwargs)


class SubclassConstructor:
    """Lets subclasses be constructed while a comparison runs."""

    def __init__(self) -> None:
        self._new: _New | None = None

    def start(self) -> None:
        """Patch the constructor of tensors."""
        if "__new__" not in vars(torch.Tensor):  # else other code has patched it
            # A descriptor, so that Dynamo reads torch's own function and remembers that one.
            self._new = _New(torch.Tensor.__new__)
            torch.Tensor.__new__ = self._new  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """Take the patch away, unless other code has replaced it since (then it only passes calls on)."""
        if self._new is not None and vars(torch.Tensor).get("__new__") is self._new:
            del torch.Tensor.__new__
        self._new = None
