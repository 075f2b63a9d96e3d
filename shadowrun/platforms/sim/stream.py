"""The device's stream, where it works asynchronously: what the host may not read before it has waited.

The kernels of `sim` compute on the CPU the moment they are called, in the order of the stream, and nobody but a
kernel can read the device's memory. So all that a program can notice of a device that lags behind is its own memory:
a copy to the host that does not block is written when the stream gets there, and the memory holds a poison until then.
Here, the stream gets there when somebody waits, and never before: a missing wait reads the poison, every time.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["STREAM", "Event", "Stream", "current_stream"]

_POISON = 0xDB


class Stream:
    """A queue of copies to the host. Safe for threads; no operator of torch is called to run it.

    Attributes:
        asynchronous: Whether the device works that way; if not, nothing is ever put off.
        waits: How often each thread (by its ident) has waited for it.
    """

    def __init__(self) -> None:
        self.asynchronous = False
        self.waits: Counter[int] = Counter()
        self._lock = threading.RLock()
        self._pending: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._n_put_off = 0
        self._n_written = 0

    def put_off(self, host: torch.Tensor, value: torch.Tensor) -> None:
        """Write to the host when the stream gets there.

        Args:
            host: Contiguous tensor on the CPU; poisoned at once.
            value: What it is going to hold: same dtype and size, contiguous, nobody else's.
        """
        with self._lock:
            ctypes.memset(host.data_ptr(), _POISON, host.nbytes)
            self._pending.append((host, value))
            self._n_put_off += 1

    @property
    def position(self) -> int:
        """Where the stream is after all that it was given so far."""
        return self._n_put_off

    def reached(self, position: int) -> bool:
        """Whether the stream has come so far."""
        return self._n_written >= position

    def run_to(self, position: int) -> None:
        """Let the stream come so far."""
        with self._lock:
            while self._n_written < position:
                host, value = self._pending.popleft()
                ctypes.memmove(host.data_ptr(), value.data_ptr(), value.nbytes)
                self._n_written += 1

    def synchronize(self) -> None:
        """Wait for all that it was given."""
        if self.asynchronous or self._pending:
            self.waits[threading.get_ident()] += 1
            self.run_to(self._n_put_off)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark where the stream is now."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Nothing to do: there is one stream."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing to do: there is one stream."""

    def query(self) -> bool:
        """Whether it has done all; the next one to ask finds it one copy further, as time passes."""
        done = self.reached(self._n_put_off)
        if not done:
            self.run_to(self._n_written + 1)
        return done


STREAM = Stream()
"""The one stream of the device."""


class Event:
    """A mark on the stream, with the methods of ``torch.cuda.Event``."""

    def __init__(self, **_: Any) -> None:
        self._position = 0

    def record(self, stream: Stream | None = None) -> None:  # noqa: ARG002 - there is one
        """Put the mark where the stream is now."""
        self._position = STREAM.position

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to do: there is one stream."""

    def query(self) -> bool:
        """Whether the stream has come to the mark; the next one to ask finds it one copy further."""
        done = STREAM.reached(self._position)
        if not done:
            STREAM.query()
        return done

    def synchronize(self) -> None:
        """Wait until the stream has come to the mark."""
        if not STREAM.reached(self._position):
            STREAM.waits[threading.get_ident()] += 1
            STREAM.run_to(self._position)


def current_stream(device: Any = None) -> Stream:  # noqa: ARG001 - there is one
    """The stream of the device."""
    return STREAM
