"""The device's stream in asynchronous mode: copies to the host that are written late.

The kernels of `sim` compute on the CPU when they are called, in the order of the stream, and only kernels read the
device's memory. So a program can notice that the device is asynchronous only by host memory: a non-blocking copy is
written when the stream reaches it, and the memory holds a poison pattern until then. This stream advances only on
synchronization, so a missing synchronization reads the poison every time.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["STREAM", "Event", "Stream", "current_stream"]

# As float32 -1.2e17, as int32 -606348325: what no test computes by chance.
_POISON = 0xDB


class Stream:
    """A queue of copies to the host. Safe for threads; no operator of torch is called to run it.

    Attributes:
        asynchronous: Whether copies are deferred.
        waits: How often each thread (by its ident) has synchronized.
    """

    def __init__(self) -> None:
        self.asynchronous = False
        self.waits: Counter[int] = Counter()
        self._lock = threading.RLock()
        self._pending: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._n_deferred = 0
        self._n_written = 0

    def defer_copy(self, host: torch.Tensor, value: torch.Tensor) -> None:
        """Write to the host when the stream reaches this copy.

        Args:
            host: Contiguous tensor on the CPU; poisoned at once.
            value: What it is going to hold: same dtype and size, contiguous, not shared.
        """
        with self._lock:
            # memset and memmove, no operators: a comparison would see those.
            ctypes.memset(host.data_ptr(), _POISON, host.nbytes)
            # It holds both: the program may free its host tensor, and the device would write to freed memory.
            self._pending.append((host, value))
            self._n_deferred += 1

    @property
    def position(self) -> int:
        """Position after all copies so far."""
        return self._n_deferred

    def reached(self, position: int) -> bool:
        """Whether the stream has reached a position."""
        return self._n_written >= position

    def run_to(self, position: int) -> None:
        """Advance the stream to a position."""
        with self._lock:
            # In order, as a stream does: a later copy never arrives before an earlier one.
            while self._n_written < position:
                host, value = self._pending.popleft()
                ctypes.memmove(host.data_ptr(), value.data_ptr(), value.nbytes)
                self._n_written += 1

    def synchronize(self) -> None:
        """Run all copies."""
        if self.asynchronous or self._pending:
            # Counted by thread, so that a test can separate the host syncs of the program and those of the worker.
            self.waits[threading.get_ident()] += 1
            self.run_to(self._n_deferred)

    def record_event(self, event: Event | None = None) -> Event:
        """Record the current position in an event."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Nothing to do: there is one stream."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing to do: there is one stream."""

    def query(self) -> bool:
        """Whether all copies are done; each query advances the stream by one copy, as time passes."""
        done = self.reached(self._n_deferred)
        if not done:
            # A loop that polls must end, so each query is taken for the passage of time.
            self.run_to(self._n_written + 1)
        return done


STREAM = Stream()
"""The one stream of the device."""


class Event:
    """A recorded position, with the methods of ``torch.cuda.Event``."""

    def __init__(self, **_: Any) -> None:
        self._position = 0

    def record(self, stream: Stream | None = None) -> None:  # noqa: ARG002 - there is one
        """Record the current position."""
        self._position = STREAM.position

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to do: there is one stream."""

    def query(self) -> bool:
        """Whether the stream has reached the event; each query advances the stream by one copy."""
        done = STREAM.reached(self._position)
        if not done:
            STREAM.query()
        return done

    def synchronize(self) -> None:
        """Advance the stream to the event."""
        if not STREAM.reached(self._position):
            STREAM.waits[threading.get_ident()] += 1
            STREAM.run_to(self._position)


def current_stream(device: Any = None) -> Stream:  # noqa: ARG001 - there is one
    """The stream of the device."""
    return STREAM
