"""Devices that run behind their host: copies to the host in the order of the stream, and marks to wait for.

Only public torch APIs, all older than torch 2.11: each such device has a module ``torch.<device>`` with ``Event``,
``current_stream`` and ``synchronize``, as ``torch.cuda`` has. `sim` has the same when it is told to lag behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform

__all__ = ["Mark", "Transfers", "transfers"]

_STREAMED = ("cuda", "xpu", "npu", "musa", "mlu")
"""Device types whose module has the names of ``torch.cuda``. Not MPS: it has one memory with the host."""
_CPU = torch.device("cpu")


class Mark(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


@dataclass(slots=True)
class Transfers:
    """Copies from one device to the host that nobody waits for.

    Attributes:
        module: ``torch.cuda``.
        pinned: Host memory is page-locked, without which a copy would wait.
    """

    module: Any
    pinned: bool

    def host(self, shape: int | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for a copy; torch keeps what is given back, and gives it again."""
        if self.pinned:
            try:
                return torch.empty(shape, dtype=dtype, device=_CPU, pin_memory=True)
            except RuntimeError:  # the machine locks no more memory: copies go on, and wait
                self.pinned = False
        return torch.empty(shape, dtype=dtype, device=_CPU)

    def copy(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy to the host when the current stream of the device gets there."""
        host.copy_(device, non_blocking=True)

    def mark(self, device: torch.device) -> Mark:
        """Mark where the current stream of a device is now."""
        mark: Mark = self.module.Event()
        mark.record(self.module.current_stream(device))  # type: ignore[attr-defined]
        return mark

    def capturing(self) -> bool:
        """Whether calls are recorded into a graph just now, and do not run."""
        ask = getattr(self.module, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())


def transfers(platform: Platform) -> Transfers | None:
    """How to copy from a platform without waiting; None where its calls have ended when they return."""
    device_type = platform.device.type
    module = getattr(torch, device_type, None)
    if platform.remote is not None or platform.functionalizes or module is None:
        return None
    simulated = getattr(module, "is_asynchronous", None)
    if simulated is not None:
        return Transfers(module, pinned=False) if simulated() else None
    if device_type not in _STREAMED or not all(hasattr(module, name) for name in ("Event", "current_stream")):
        return None
    return Transfers(module, pinned=True)
