"""Messages between a process and its worker: plain values through a socket, tensors through shared memory.

Each message is answered before the next is sent. Nothing is pickled: `marshal` carries plain values only, in its
version 2, which every Python 3 reads and writes in the same way.

Segments of shared memory are made once, mapped by both processes and reused. They have no name (`memfd`), so nothing is
left behind however the processes end. Only Linux has them; elsewhere the tensors' bytes follow through the socket.
"""

from __future__ import annotations

import ctypes
import itertools
import marshal
import mmap
import os
import socket
import struct
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.worker.wire import Region, decode, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["KEPT_BYTES", "PROBE", "Channel", "ChannelClosed", "SegmentPool"]

PROBE = (None, True, -(2**70), 0.1, float("inf"), 1j, "ä€", b"\x00\xff", [1, (2,)], {"a": torch.float32})
"""First message of both ends: values that they must read alike, whatever their versions of Python."""

# New memory costs a page fault for each of its pages.
KEPT_BYTES = 256 << 20
"""Memory that a process keeps for its next messages; what is more is given back when the next one is sent."""

_PAGE = 1 << 16
# A tensor of a small message would keep a whole large segment alive.
_WASTE = 4
_SMALL = 1 << 20


class _Segment:
    """A segment as one process sees it.

    Attributes:
        size: In bytes.
        address: In this process.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(fd, size)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._use: weakref.ref[memoryview] | None = None

    def tensors(self, places: Collection[tuple[int, int]]) -> list[torch.Tensor]:
        """Bytes at pairs of position and size, each a separate storage over the segment.

        As long as one of them lives, also as the memory of another tensor, the segment is in use.
        """
        # Each tensor keeps this view alive, so the weak reference shows when the last one is freed.
        view = memoryview(self._map)
        self._use = weakref.ref(view)
        return [torch.frombuffer(view, dtype=torch.uint8, count=n, offset=at) for at, n in places]

    @property
    def in_use(self) -> bool:
        """Whether a tensor of `tensors` still lives."""
        return self._use is not None and self._use() is not None


class _OwnSegment(_Segment):
    """A segment of this process's own: `fd` is there until the other one was given it."""

    def __init__(self, fd: int, size: int, number: int) -> None:
        super().__init__(fd, size)
        self.fd = fd
        self.number = number

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SegmentPool:
    """Segments that this process writes its messages to.

    Args:
        kept_bytes: Memory to keep while it is not used.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._segments: dict[int, _OwnSegment] = {}
        self._numbers = itertools.count()
        weakref.finalize(self, _close_all, self._segments)

    def take(self, n_bytes: int, held: Collection[int]) -> tuple[_OwnSegment | None, list[int]]:
        """A segment for a message, and the numbers of those that are given back.

        Args:
            n_bytes: What the message needs.
            held: Numbers of segments that the other process still uses.

        Returns:
            None for the segment where the system has no memory for it, or no such segments.
        """
        # A segment is free when neither process has a tensor in it.
        free = [s for s in self._segments.values() if not s.in_use and s.number not in held]
        fitting = [s for s in free if n_bytes <= s.size <= max(_SMALL, _WASTE * n_bytes)]
        chosen = min(fitting, key=lambda s: s.size, default=None)
        freed = self._given_back([s for s in free if s is not chosen], chosen)
        return chosen or self._make(n_bytes), freed

    def _make(self, n_bytes: int) -> _OwnSegment | None:
        size = -(-n_bytes // _PAGE) * _PAGE
        try:
            # A named segment would stay in the system after a crash.
            fd = os.memfd_create("shadowrun", os.MFD_CLOEXEC)
        except (AttributeError, OSError):
            return None
        try:
            # Allocated now: memory that is missing later would be a fatal signal.
            os.posix_fallocate(fd, 0, size)
            segment = _OwnSegment(fd, size, next(self._numbers))
        except OSError:
            os.close(fd)
            return None
        self._segments[segment.number] = segment
        return segment

    def _given_back(self, idle: list[_OwnSegment], chosen: _OwnSegment | None) -> list[int]:
        """Drop the oldest of the idle segments, until what is kept is within bounds."""
        total = sum(s.size for s in idle) + (chosen.size if chosen is not None else 0)
        freed = []
        for segment in idle:
            if total <= self._kept_bytes:
                break
            total -= segment.size
            freed.append(segment.number)
            self._segments.pop(segment.number).close()
        return freed


def _close_all(segments: dict[int, Any]) -> None:
    for segment in segments.values():
        segment.close()


_HEAD = struct.Struct("<Q")
_MARSHAL = 2
_ALIGNMENT = 64
_COPY_UP_TO = 1 << 20

_IN_MESSAGE, _IN_SEGMENT, _IN_RECEIVED = range(3)


class ChannelClosed(Exception):  # noqa: N818 - an end, not a failure
    """The other end is closed."""


class Channel:
    """One end. Each message of the asking end is answered by one of the other before the next.

    The asking end may keep what it receives: small messages are copied out of the shared memory, large ones keep their
    segment. What the answering end receives is valid until its answer is sent.

    Args:
        connection: One of a pair of sockets.
        answers: Whether this is the answering end.
        shared: Whether to use shared memory, where the system has it.
    """

    def __init__(self, connection: socket.socket, *, answers: bool = False, shared: bool = True) -> None:
        self.connection = connection
        self._answers = answers
        self._pool = SegmentPool() if shared else None
        self._sent: _Segment | None = None
        self._received: _Segment | None = None
        self._others: dict[int, _Segment] = {}
        self._held_there: Sequence[int] = ()
        self._deadline: float | None = None
        self._last: tuple[Any, list[torch.Tensor], list[int]] | None = None

    def limit(self, seconds: float | None) -> None:
        """Set a deadline for what follows; after it, `TimeoutError` is raised and the channel is unusable."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.connection.settimeout(seconds)

    def send(self, message: Any) -> None:
        """Send what `wire.encode` can encode.

        Raises:
            Unsendable: It has a value of another kind; nothing was sent.
            OSError: The other end is closed, or does not read.
        """
        # Encoded before anything is sent: an unsendable value must leave the channel usable.
        tree, regions = encode(message)
        self._last = None
        spans, total = self._lay_out(regions)
        freed: list[int] = []
        segment = None
        if total and self._pool is not None:
            segment, freed = self._pool.take(total, self._held_there)
        self._sent = segment
        if segment is None:
            spans = [(low, high, at, where if where != _IN_SEGMENT else _IN_MESSAGE) for low, high, at, where in spans]
        else:
            moved = [(r, at) for r, (_, _, at, where) in zip(regions, spans, strict=True) if where == _IN_SEGMENT]
            for (r, _), to in zip(moved, segment.tensors([(at, r.size) for r, at in moved]), strict=True):
                _copy(to, r.raw())
        # The worker must not overwrite a segment in which the program still has a result.
        held = [] if self._answers else [number for number, mapped in self._others.items() if mapped.in_use]
        name = None if segment is None else (segment.number, segment.size)
        text = marshal.dumps((tree, spans, name, freed, held), _MARSHAL)
        head = _HEAD.pack(len(text))
        if segment is not None and segment.fd >= 0:
            # Once for each segment: both ends then know it by its number.
            socket.send_fds(self.connection, [head], [segment.fd])
            segment.close()
            self.connection.sendall(text)
        else:
            self.connection.sendall(head + text)
        for r, (_, _, _, where) in zip(regions, spans, strict=True):
            if where == _IN_MESSAGE and r.size:
                raw = r.raw()
                self.connection.sendall(_bytes_of(raw))

    def receive(self) -> Any:
        """Wait for a message, and build its values.

        Raises:
            Unsendable: It has a dtype or layout that this torch does not know; the channel stays usable.
            Closed: The other end is closed.
            TimeoutError: The time of `limit` is over.
        """
        head = bytearray(_HEAD.size)
        fd = self._begin(head)
        text = bytearray(_HEAD.unpack(head)[0])
        # A deadline is for the whole message: a slow sender may give one byte at a time.
        self._fill(memoryview(text))
        tree, spans, name, freed, self._held_there = marshal.loads(text)  # noqa: S302 - words of our own other end
        for number in freed:
            self._others.pop(number, None)
        self._received = None
        if name is not None:
            number, size = name
            if fd >= 0:
                self._others[number] = _Segment(fd, size)
                os.close(fd)
            self._received = self._others[number]
        message = (tree, self._memory(spans), [low for low, *_ in spans])
        self._last = message if self._answers else None
        return decode(*message)

    def receive_again(self) -> Any:
        """The last message once more, in memory of this process, which can be resized."""
        assert self._last is not None
        tree, memory, lows = self._last
        return decode(tree, [t.clone() for t in memory], lows)

    def _lay_out(self, regions: list[Region]) -> tuple[list[tuple[int, int, int, int]], int]:
        """For each region its part, its position and which memory it is in; and the size of the segment."""
        spans, end = [], 0
        for r in regions:
            if self._answers and self._received is not None and r.size:
                at = r.address - self._received.address
                # What the worker wrote in place needs no copy back.
                if 0 <= at < self._received.size:
                    # An argument that was written to, or returned: the asking end has that memory.
                    spans.append((r.low, r.high, at, _IN_RECEIVED))
                    continue
            if not r.size:
                spans.append((0, 0, 0, _IN_MESSAGE))
                continue
            # Kernels may branch on alignment: memory starts at the same offset in a cache line.
            at = -(-end // _ALIGNMENT) * _ALIGNMENT + r.address % _ALIGNMENT
            end = at + r.size
            spans.append((r.low, r.high, at, _IN_SEGMENT))
        return spans, end

    def _memory(self, spans: Sequence[tuple[int, int, int, int]]) -> list[torch.Tensor]:
        memory = [
            torch.empty(high - low if where == _IN_MESSAGE else 0, dtype=torch.uint8, device="cpu")
            for low, high, _, where in spans
        ]
        for kind, segment in ((_IN_SEGMENT, self._received), (_IN_RECEIVED, self._sent)):
            chosen = [k for k, (_, _, _, where) in enumerate(spans) if where == kind]
            if chosen:
                assert segment is not None
                found = segment.tensors([(spans[k][2], spans[k][1] - spans[k][0]) for k in chosen])
                if not self._answers and sum(t.numel() for t in found) <= _COPY_UP_TO:
                    # Small results are copied out, so that their segment is free for the next call.
                    found = [_copy(torch.empty_like(t), t) for t in found]
                for k, t in zip(chosen, found, strict=True):
                    memory[k] = t
        for raw, (_, _, _, where) in zip(memory, spans, strict=True):
            if where == _IN_MESSAGE and raw.numel():
                self._fill(_bytes_of(raw))
        return memory

    def _begin(self, head: bytearray) -> int:
        """Receive the first bytes, and the descriptor that may come with them."""
        try:
            data, fds, _, _ = socket.recv_fds(self.connection, len(head), 1)
        except ConnectionError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        head[: len(data)] = data
        self._fill(memoryview(head)[len(data) :])
        return fds[0] if fds else -1

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                n = self.connection.recv_into(view[done:])
            except ConnectionError as error:
                raise ChannelClosed from error
            if not n:
                raise ChannelClosed
            done += n
            if done < len(view) and self._deadline is not None:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                # The socket's timeout is for each read, and the deadline is for all.
                self.connection.settimeout(left)


def _copy(to: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    # torch's own copy wakes its threads, which costs milliseconds where the processor is busy.
    ctypes.memmove(to.data_ptr(), raw.data_ptr(), raw.numel())
    return to


def _bytes_of(raw: torch.Tensor) -> memoryview:
    """Memory of a tensor, which must live as long."""
    return memoryview((ctypes.c_char * raw.numel()).from_address(raw.data_ptr())).cast("B")
