"""Graphs of a device (CUDA's): what must be over before one is recorded.

While a graph is recorded, no thread of the process may wait for the device, ask an event, or get or return page-locked
memory: the recording would fail, or the process end in a destructor. So what goes on behind the program ends first.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Recordings"]


class Recordings:
    """Calls a function before each recording of a graph.

    Args:
        device_type: ``cuda``: its graphs are `torch.cuda.CUDAGraph`. Devices without graphs have nothing to watch.
        before: What is called.
    """

    def __init__(self, device_type: str, before: Callable[[], None]) -> None:
        module = getattr(torch, device_type, None)
        self._graph: Any = getattr(module, f"{device_type.upper()}Graph", None)
        self._before = before
        self._patches = Patches()

    def start(self) -> None:
        """Begin to watch."""
        if self._graph is not None and "capture_begin" in vars(self._graph):
            self._patches.put(self._graph, "capture_begin", self._announced)

    def stop(self) -> None:
        """End it."""
        self._patches.take_back()

    def _announced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):  # the user records, whatever happens to us
                self._before()
            return original(*args, **kwargs)

        return capture_begin
