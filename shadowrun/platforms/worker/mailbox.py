"""Shared memory for small messages between two processes, each of which waits in a loop before it sleeps.

Waking a process that sleeps on another processor costs 40 to 90 µs, more than most small operators: a reader first
looks at a word of shared memory for a while, and the writer sends a byte through the socket only to a reader that
sleeps. Text and tensors of a small message lie in the same memory.
"""

from __future__ import annotations

import mmap
import os
import threading
import time

import torch

__all__ = ["DATA_BYTES", "TEXT_BYTES", "Mailbox", "Slot", "fence"]

TEXT_BYTES = 1 << 14
"""Longest text that a slot holds."""
DATA_BYTES = 3 << 14
"""Memory of tensors that a slot holds."""

_PAGE = 1 << 12
_SLOT = TEXT_BYTES + DATA_BYTES
_SIZE = _PAGE + 2 * _SLOT
# Words of the first page, each in a cache line of its own: two processes write to them at the same time.
_LINE = 8
_WRITTEN, _LENGTH, _ASLEEP, _WORDS = 0, _LINE, 2 * _LINE, 3 * _LINE

# A wait that is longer than a wake-up would cost more than it saves. In a program that calls one operator after another
# the next question comes within a millisecond: the end that answers looks for as long.
_SPIN_NS = 100_000
_MOST_SPIN_NS = 1_000_000
_PATIENT, _LONGEST = 2, 4 * _MOST_SPIN_NS
_LOOKS = 32
# A third process had this one's processor for so long: who sleeps is run sooner there than who gives way. It is tried
# again after some waits.
_CROWDED_NS = 30_000
_CROWDED_WAITS = 64
# A program that may use one processor only would keep the other process from answering.
_SPINS = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))

_give_way = getattr(os, "sched_yield", lambda: None)
_clock = time.perf_counter_ns
_lock = threading.Lock()


def fence() -> None:
    """Full memory barrier: what was written before is seen by the other process before what is written after."""
    # One lock only keeps accesses from moving out of it; what comes before and after two of them stays in order.
    with _lock:
        pass
    with _lock:
        pass


class Slot:
    """Memory of one direction: tensors of a small message. A reader's tensors are valid until its answer is sent.

    Attributes:
        size: In bytes.
        address: In this process.
    """

    def __init__(self, memory: memoryview) -> None:
        self.size = len(memory)
        self.address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._memory = memory

    def view(self) -> memoryview:
        """The memory."""
        return self._memory


class Mailbox:
    """Memory that both ends of a channel map.

    Args:
        descriptor: Of the memory; it may be closed afterwards.
        answers: Whether this is the end that answers.

    Attributes:
        mine: Slot that this end writes to.
        theirs: Slot that this end reads.
    """

    def __init__(self, descriptor: int, *, answers: bool) -> None:
        self._texts = memoryview(mmap.mmap(descriptor, _SIZE))
        self._words = self._texts[:_PAGE].cast("Q")
        begins = (_PAGE, _PAGE + _SLOT)
        self._write_at, self._read_at = begins[answers], begins[not answers]
        self._out, self._in = (_WORDS, 0) if answers else (0, _WORDS)
        self.mine, self.theirs = (
            Slot(self._texts[at + TEXT_BYTES : at + _SLOT]) for at in (self._write_at, self._read_at)
        )
        self._spins = len(_SPINS(0)) > 1
        self._answers = answers
        self._since = self._crowded = 0
        self._usual_ns = 0.0

    @staticmethod
    def memory() -> int | None:
        """Descriptor of new memory without a name; None where the system has none."""
        try:
            descriptor = os.memfd_create("shadowrun", os.MFD_CLOEXEC)
        except (AttributeError, OSError):
            return None
        try:
            # Allocated now: memory that is missing later would be a fatal signal.
            os.posix_fallocate(descriptor, 0, _SIZE)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def put(self, number: int, text: bytes) -> bool:
        """Write a message of at most `TEXT_BYTES`; returns whether its reader sleeps and has to be woken.

        Args:
            number: Of the message, from 1; each direction counts its own.
            text: What `take` returns at the other end.
        """
        begin, words, out = self._write_at, self._words, self._out
        self._texts[begin : begin + len(text)] = text
        words[out + _LENGTH] = len(text)
        fence()
        # Last: a reader that sees the number reads the rest.
        words[out + _WRITTEN] = number
        fence()
        return words[out + _ASLEEP] == number

    def take(self, number: int) -> bytes | None:
        """The message of this number if it arrives soon; None afterwards, when a writer wakes this end.

        Either the message was seen here or the writer has seen that this end sleeps, or both.
        """
        words, at = self._words, self._in + _WRITTEN
        if words[at] != number:
            self._crowded -= self._crowded > 0
            if self._spins and not self._crowded:
                self._since = now = _clock()
                end = now + self._spin_ns()
                while words[at] != number and now < end:
                    for _ in range(_LOOKS):
                        if words[at] == number:
                            break
                    else:
                        before = _clock()
                        # The other process, or a thread of the kernel that it runs, may want this processor.
                        _give_way()
                        if _clock() - before > _CROWDED_NS:
                            self._crowded = _CROWDED_WAITS
                            break
                    now = _clock()
            words[self._in + _ASLEEP] = number
            fence()
            if words[at] != number:
                return None
        return self.text()

    def arrived(self, number: int, *, wakes: bool) -> bool:
        """Whether the message of this number is there; if not, its writer `wakes` this end."""
        words, at = self._words, self._in + _WRITTEN
        if wakes and words[at] != number:
            words[self._in + _ASLEEP] = number
            fence()
        return words[at] == number

    def _spin_ns(self) -> int:
        """How long to look for the next message: twice as long as the last ones took, if they came soon."""
        usual = _PATIENT * self._usual_ns
        return int(max(usual, _SPIN_NS)) if self._answers and usual <= _MOST_SPIN_NS else _SPIN_NS

    def text(self) -> bytes:
        """The message that is there."""
        if self._since:
            waited, self._since = min(_clock() - self._since, _LONGEST), 0
            # One pause of the program is forgotten after some calls.
            self._usual_ns += (waited - self._usual_ns) / 4
        begin = self._read_at
        return bytes(self._texts[begin : begin + self._words[self._in + _LENGTH]])
