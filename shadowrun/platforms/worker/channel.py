"""Messages between a process and its worker, through shared memory.

Each message is answered before the next is sent. Nothing is pickled: `marshal` carries plain values only, in its
version 2, which every Python 3 reads and writes in the same way.

A small message lies in a `Mailbox`, and tensors of a larger one in a segment. Segments are made once, mapped by both
processes and reused. Shared memory has no name (`memfd`), so nothing is left behind however the processes end. Only
Linux has it; elsewhere everything goes through the socket.
"""

from __future__ import annotations

import ctypes
import itertools
import marshal
import mmap
import os
import select
import socket
import struct
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.worker.mailbox import DATA_BYTES, TEXT_BYTES, Mailbox, Slot
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

    def view(self) -> memoryview:
        """The memory; the segment is in use while this view or a storage over it lives."""
        view = memoryview(self._map)
        self._use = weakref.ref(view)
        return view

    @property
    def in_use(self) -> bool:
        """Whether the last view of `view`, or a storage over it, still lives."""
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
        free = self._free(held)
        fitting = [s for s in free if n_bytes <= s.size <= max(_SMALL, _WASTE * n_bytes)]
        chosen = min(fitting, key=lambda s: s.size, default=None)
        freed = self._given_back([s for s in free if s is not chosen], chosen)
        return chosen or self._make(n_bytes), freed

    def trim(self, held: Collection[int]) -> list[int]:
        """Give back what is more than is kept, for a message that needs no segment; returns numbers as `take` does."""
        if sum([s.size for s in self._segments.values()]) <= self._kept_bytes:
            return []
        return self._given_back(self._free(held), None)

    def _free(self, held: Collection[int]) -> list[_OwnSegment]:
        return [s for s in self._segments.values() if not s.in_use and s.number not in held]

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


# Before each message in the socket: the length of its text. With the highest bit: the number of a message in the
# mailbox, for an end that slept; one that woke by itself finds it later.
_HEAD = struct.Struct("<Q")
_WAKE = 1 << 63
_MAX_DESCRIPTORS = 3
_MARSHAL = 2
_ALIGNMENT = 64
_COPY_UP_TO = 1 << 20

_BYTE = torch.uint8

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

    Attributes:
        carried: Descriptors that came with the last message, for the receiver to close.
    """

    def __init__(self, connection: socket.socket, *, answers: bool = False, shared: bool = True) -> None:
        self.connection = connection
        self._answers = answers
        self._pool = SegmentPool() if shared else None
        self._mailbox: Mailbox | None = None
        self._n_sent = self._n_received = 0
        self._sent: _Segment | Slot | None = None
        self._received: _Segment | Slot | None = None
        self._others: dict[int, _Segment] = {}
        self._held_there: Sequence[int] = ()
        self._deadline: float | None = None
        self._last: tuple[Any, list[torch.UntypedStorage], list[int]] | None = None
        self.carried: list[int] = []

    @property
    def is_shared(self) -> bool:
        """Whether both ends share memory."""
        return self._mailbox is not None

    def limit(self, seconds: float | None) -> None:
        """Set a deadline for what follows; after it, `TimeoutError` is raised and the channel is unusable."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def send(self, message: Any, carried: Sequence[int] = ()) -> None:
        """Send what `wire.encode` can encode.

        Args:
            message: The message.
            carried: Descriptors that go with it, at most one.

        Raises:
            Unsendable: It has a value of another kind; nothing was sent.
            OSError: The other end is closed, or does not read.
        """
        # Encoded before anything is sent: an unsendable value must leave the channel usable.
        tree, regions = encode(message)
        self._last = None
        self._n_sent += 1
        opening = self._open()
        spans, total = self._lay_out(regions)
        freed: list[int] = []
        segment: _OwnSegment | Slot | None = None
        if total and self._mailbox is not None and total <= DATA_BYTES and not opening:
            segment = self._mailbox.mine
            # Many small messages may follow a large one.
            assert self._pool is not None
            freed = self._pool.trim(self._held_there)
        elif total and self._pool is not None:
            segment, freed = self._pool.take(total, self._held_there)
        self._sent = segment
        name = None
        if segment is None:
            spans = [(low, high, at, where if where != _IN_SEGMENT else _IN_MESSAGE) for low, high, at, where in spans]
        else:
            name = (segment.number, segment.size) if isinstance(segment, _OwnSegment) else ()
            for r, (_, _, at, where) in zip(regions, spans, strict=True):
                if where == _IN_SEGMENT:
                    ctypes.memmove(segment.address + at, r.address, r.size)
        # The worker must not overwrite a segment in which the program still has a result.
        held = [] if self._answers else [number for number, mapped in self._others.items() if mapped.in_use]
        text = marshal.dumps((tree, spans, name, freed, held, bool(opening), len(carried)), _MARSHAL)
        # Once for each segment: both ends then know it by its number.
        made = [segment] if isinstance(segment, _OwnSegment) and segment.fd >= 0 else []
        try:
            self._send_text(text, [*opening, *(m.fd for m in made), *carried], regions, spans)
        finally:
            for m in made:
                m.close()
            for descriptor in opening:
                os.close(descriptor)

    def _open(self) -> list[int]:
        """Make the mailbox with the first question; returns its descriptor, which goes with the message."""
        if self._n_sent > 1 or self._answers or self._pool is None:
            return []
        memory = Mailbox.memory()
        if memory is None:
            return []
        self._mailbox = Mailbox(memory, answers=False)
        return [memory]

    def _send_text(
        self, text: bytes, descriptors: list[int], regions: list[Region], spans: list[tuple[int, int, int, int]]
    ) -> None:
        """Send a message through the mailbox, or through the socket what the mailbox cannot hold."""
        through_socket = [r for r, span in zip(regions, spans, strict=True) if span[3] == _IN_MESSAGE and r.size]
        if self._mailbox is not None and not descriptors and not through_socket and len(text) <= TEXT_BYTES:
            if self._mailbox.put(self._n_sent, text):
                self._block()
                self.connection.sendall(_HEAD.pack(_WAKE | self._n_sent))
            return
        if self._mailbox is not None:
            # An end that looks at the mailbox goes on to the socket.
            self._mailbox.put(self._n_sent, b"")
        self._block()
        head = _HEAD.pack(len(text))
        if descriptors:
            socket.send_fds(self.connection, [head], descriptors)
            head = b""
        self.connection.sendall(head + text)
        for r in through_socket:
            self.connection.sendall(_bytes_at(r.address, r.size))

    def arrives(self, seconds: float) -> bool:
        """Whether the next message comes, or the other end is closed, within so much time.

        With 0 and shared memory, the end of the other end is not noticed: no call of the system is made.
        """
        if self._mailbox is not None:
            arrived = self._mailbox.arrived(self._n_received + 1, wakes=seconds > 0)
            if arrived or not seconds:
                return arrived
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while poll.poll(1000 * seconds):
            try:
                head = self.connection.recv(_HEAD.size, socket.MSG_PEEK)
            except OSError:  # it is closed, as `receive` finds
                return True
            word = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0
            if not word & _WAKE or word > _WAKE | self._n_received:
                return True
            # Of a message that this end saw before it was woken.
            self.connection.recv(_HEAD.size)
        return False

    def receive(self) -> Any:
        """Wait for a message, and build its values.

        Raises:
            Unsendable: It has a dtype or layout that this torch does not know; the channel stays usable.
            Closed: The other end is closed.
            TimeoutError: The time of `limit` is over.
        """
        self._n_received += 1
        text = b"" if self._mailbox is None else self._mailbox.take(self._n_received)
        descriptors: list[int] = []
        if not text:
            text, descriptors = self._text_of_socket()
        tree, spans, name, freed, self._held_there, opening, n_carried = marshal.loads(text)  # noqa: S302 - as `send`
        self.carried = [descriptors.pop() for _ in range(n_carried)]
        if opening:
            self._mailbox = Mailbox(descriptors[0], answers=True)
            os.close(descriptors.pop(0))
        for number in freed:
            self._others.pop(number, None)
        self._received = None
        if name == ():
            assert self._mailbox is not None
            self._received = self._mailbox.theirs
        elif name is not None:
            number, size = name
            if descriptors:
                self._others[number] = _Segment(descriptors[0], size)
                os.close(descriptors[0])
            self._received = self._others[number]
        message = (tree, self._memory(spans), [low for low, *_ in spans])
        self._last = message if self._answers else None
        return decode(*message)

    def _text_of_socket(self) -> tuple[bytes, list[int]]:
        """The next message's text from the socket, or from the mailbox if the socket says so; descriptors with it."""
        while True:
            head = bytearray(_HEAD.size)
            descriptors = self._begin(head)
            (word,) = _HEAD.unpack(head)
            if not word & _WAKE:
                text = bytearray(word)
                # A deadline is for the whole message: a slow sender may give one byte at a time.
                self._fill(memoryview(text))
                return bytes(text), descriptors
            # The number of a message that this end has seen before the byte arrived is of no use now.
            if word == _WAKE | self._n_received and self._mailbox is not None:
                return self._mailbox.text(), descriptors

    def receive_again(self) -> Any:
        """The last message once more, in memory of this process, which can be resized."""
        assert self._last is not None
        tree, memory, lows = self._last
        own = [storage.clone() for storage in memory]  # type: ignore[no-untyped-call]
        return decode(tree, own, lows)

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

    def _memory(self, spans: Sequence[tuple[int, int, int, int]]) -> list[torch.UntypedStorage]:
        """The memory of a message's regions."""
        # Small results are copied out, so that their segment is free for the next call.
        copied = not self._answers and sum([span[1] - span[0] for span in spans if span[3]]) <= _COPY_UP_TO
        views: dict[int, memoryview] = {}
        memory = []
        for low, high, at, where in spans:
            n = high - low
            segment = self._received if where == _IN_SEGMENT else self._sent
            if where and not copied:
                if where not in views:
                    assert segment is not None
                    views[where] = segment.view()
                raw = torch.frombuffer(views[where], dtype=_BYTE, count=n, offset=at).untyped_storage()
            else:
                raw = torch.UntypedStorage(n)  # type: ignore[no-untyped-call]
                if where:
                    assert segment is not None
                    # torch's own copy wakes its threads, which costs milliseconds where the processor is busy.
                    ctypes.memmove(raw.data_ptr(), segment.address + at, n)
                elif n:
                    self._fill(_bytes_at(raw.data_ptr(), n))
            memory.append(raw)
        return memory

    def _block(self) -> None:
        """Let what the socket does next take the time that is left."""
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)

    def _begin(self, head: bytearray) -> list[int]:
        """Receive the first bytes, and the descriptors that may come with them."""
        self._block()
        try:
            data, fds, _, _ = socket.recv_fds(self.connection, len(head), _MAX_DESCRIPTORS)
        except ConnectionError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        head[: len(data)] = data
        self._fill(memoryview(head)[len(data) :])
        return fds

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                # The socket's timeout is for each read, and the deadline is for all.
                self._block()
                n = self.connection.recv_into(view[done:])
            except ConnectionError as error:
                raise ChannelClosed from error
            if not n:
                raise ChannelClosed
            done += n


def _bytes_at(address: int, n: int) -> memoryview:
    """Memory of this process, which must live as long."""
    return memoryview((ctypes.c_char * n).from_address(address)).cast("B")
