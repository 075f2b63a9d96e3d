"""Asynchronous devices: copies to the host in the order of the stream, and events to wait for.

Only public torch APIs are used, all older than torch 2.11: each such device has a module ``torch.<device>`` with
``Event``, ``current_stream`` and ``synchronize``, as ``torch.cuda`` has. `sim` has them when it is made asynchronous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shadowrun.platforms.backends import backend_of

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform

__all__ = ["AsyncCopies", "Event", "async_copies"]

_CPU = torch.device("cpu")


class Event(Protocol):
    """A recorded event of a stream."""

    def query(self) -> bool:
        """Whether the stream has reached it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


@dataclass(slots=True)
class AsyncCopies:
    """Copies from one device to the host that do not block.

    Attributes:
        module: ``torch.cuda``.
        pinned: Host memory is page-locked, without which a copy would block.
    """

    module: Any
    pinned: bool

    def host(self, shape: int | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for a copy; torch caches what is freed, and reuses it."""
        # A copy to pageable memory blocks until it is done: a host sync.
        if self.pinned:
            try:
                return torch.empty(shape, dtype=dtype, device=_CPU, pin_memory=True)
            except RuntimeError:  # the machine locks no more memory: copies still work, and block
                self.pinned = False
        return torch.empty(shape, dtype=dtype, device=_CPU)

    def copy(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy to the host when the current stream of the device gets there."""
        # In the current stream, so that it comes after what wrote the tensor and before what overwrites it.
        host.copy_(device, non_blocking=True)

    def record_event(self, device: torch.device) -> Event:
        """Record an event on the current stream of a device."""
        event: Event = self.module.Event()
        # The program may have chosen another stream than the default one.
        event.record(self.module.current_stream(device))  # type: ignore[attr-defined]
        return event

    def is_capturing(self) -> bool:
        """Whether calls are captured into a graph now, and do not run."""
        is_capturing = getattr(self.module, "is_current_stream_capturing", None)
        return is_capturing is not None and bool(is_capturing())


def async_copies(platform: Platform) -> AsyncCopies | None:
    """How to copy from a platform without blocking; None where its calls are synchronous."""
    device_type = platform.device.type
    module = getattr(torch, device_type, None)
    # A worker answers synchronously, and lazy devices have no stream to enqueue a copy in.
    if platform.remote is not None or platform.functionalizes or module is None:
        return None
    # Asked at each comparison: `sim.asynchronous()` switches it within a process.
    simulated = getattr(module, "is_asynchronous", None)
    if simulated is not None:
        return AsyncCopies(module, pinned=False) if simulated() else None
    if not backend_of(device_type).streams or not all(hasattr(module, name) for name in ("Event", "current_stream")):
        return None
    return AsyncCopies(module, pinned=True)
