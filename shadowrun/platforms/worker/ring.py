"""Calls that wait in shared memory for a worker, which answers them one after another while the program goes on.

Each call has a slot: where its text lies, what became of it, how long the operator took. Text, inputs and the program's
own results lie in a ring of memory. The worker compares its results with the program's there: equal ones need no way
back, and others are put next to the program's.
"""

from __future__ import annotations

import ctypes
import marshal
import mmap
import os
from typing import Any

import torch

from shadowrun.platforms.worker.mailbox import fence

__all__ = ["DIFFERENT", "EQUAL", "N_SLOTS", "OPEN", "REDO", "RING_BYTES", "SERVE", "Ring", "as_text", "copy_bytes"]

OPEN, SERVE = "open ring", "serve ring"
"""Messages to a worker: take the memory that comes with it; answer what waits there, until nothing does."""

RING_BYTES = 32 << 20
"""Memory of texts and tensors."""
N_SLOTS = 64
"""Calls that may wait."""
_ALIGNMENT = 64

EQUAL, DIFFERENT, REDO = 1, 2, 3
"""What became of a call. To be done again, by itself: it raised, gave other forms, or needs what this way lacks."""

_PAGE = 1 << 12
_LINE = 8  # words in a cache line: two processes write at the same time
_WRITTEN, _ANSWERED, _SLOTS = 0, _LINE, 2 * _LINE
_AT, _LENGTH, _STATE, _NS, _SLOT_WORDS = 0, 1, 2, 3, 4
_MARSHAL = 2

copy_bytes = ctypes.memmove
_compare = None


def _compare_bytes() -> Any:
    """The C library's `memcmp`."""
    global _compare  # noqa: PLW0603 - found once, where it is needed
    if _compare is None:
        _compare = ctypes.CDLL(None).memcmp
        _compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return _compare


class Ring:
    """The memory as one of two processes sees it.

    Args:
        descriptor: Of the memory; it may be closed afterwards.

    Attributes:
        address: Of the ring of texts and tensors, in this process.
        size: Of that ring, in bytes.
    """

    def __init__(self, descriptor: int) -> None:
        n_bytes = os.fstat(descriptor).st_size
        memory = memoryview(mmap.mmap(descriptor, n_bytes))
        self._words = memory[:_PAGE].cast("Q")
        self.memory = memory[_PAGE:]
        self.size = n_bytes - _PAGE
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        # Where the next text or tensors go, and where those begin that are still of use; both only grow.
        self._head = self._tail = 0
        self.same_bytes = _compare_bytes()

    @staticmethod
    def make(n_bytes: int = RING_BYTES) -> int | None:
        """Descriptor of new memory without a name; None where the system has none."""
        try:
            descriptor = os.memfd_create("shadowrun", os.MFD_CLOEXEC)
        except (AttributeError, OSError):
            return None
        try:
            # Allocated now: memory that is missing later would be a fatal signal.
            os.posix_fallocate(descriptor, 0, _PAGE + n_bytes)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def storage(self, at: int, n: int) -> torch.UntypedStorage:
        """Memory of the ring as a storage."""
        if not n:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=n, offset=at).untyped_storage()

    # -- the asking end ------------------------------------------------------------------------------

    def take(self, n_bytes: int) -> int:
        """Position of that much unused memory, in one piece; -1 where there is not so much just now."""
        head, size = self._head, self.size
        at = head % size
        if at + n_bytes > size:
            head, at = head + size - at, 0
        if head + n_bytes - self._tail > size:
            return -1
        self._head = head + -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        return at

    @property
    def head(self) -> int:
        """What `release` takes to release all that was taken before."""
        return self._head

    def release(self, head: int) -> None:
        """Have all memory used again that was taken before `head` was read."""
        self._tail = head
        # From the start: memory that was just used is still in the caches.
        if self._tail >= self._head:
            self._head = self._tail = 0

    def give_back(self, n_bytes: int) -> int:
        """Give back the end of what was taken last; returns `head`."""
        self._head -= n_bytes // _ALIGNMENT * _ALIGNMENT
        return self._head

    def take_back(self, head: int) -> None:
        """Forget what was taken since `head` was read."""
        self._head = head

    def put(self, number: int, text: bytes, at: int) -> None:
        """Hand over a call.

        Args:
            number: Of the call, from 1.
            text: What `text` returns at the other end.
            at: Position of memory for it.
        """
        words, slot = self._words, _SLOTS + _SLOT_WORDS * (number % N_SLOTS)
        self.memory[at : at + len(text)] = text
        words[slot + _AT] = at
        words[slot + _LENGTH] = len(text)
        fence()
        # Last: a reader that sees the number reads the rest.
        words[_WRITTEN] = number
        fence()

    @property
    def answered(self) -> int:
        """Number of the last call that was answered."""
        return self._words[_ANSWERED]

    def answer(self, number: int) -> tuple[int, int]:
        """What became of a call that was answered, and the nanoseconds that its operator took."""
        slot = _SLOTS + _SLOT_WORDS * (number % N_SLOTS)
        return self._words[slot + _STATE], self._words[slot + _NS]

    # -- the answering end ---------------------------------------------------------------------------

    @property
    def written(self) -> int:
        """Number of the last call that was handed over."""
        return self._words[_WRITTEN]

    def text(self, number: int) -> Any:
        """Text of a call."""
        slot = _SLOTS + _SLOT_WORDS * (number % N_SLOTS)
        at = self._words[slot + _AT]
        return marshal.loads(self.memory[at : at + self._words[slot + _LENGTH]])  # noqa: S302 - of our own other end

    def settle(self, number: int, state: int, ns: int) -> None:
        """Answer a call."""
        words, slot = self._words, _SLOTS + _SLOT_WORDS * (number % N_SLOTS)
        words[slot + _STATE] = state
        words[slot + _NS] = ns
        fence()
        words[_ANSWERED] = number
        fence()


def as_text(message: Any) -> bytes:
    """A message as `Ring.text` reads it."""
    return marshal.dumps(message, _MARSHAL)
