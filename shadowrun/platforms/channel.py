"""Messages between a process and its worker, in turns: words through a socket, tensors through shared memory.

Where the system has no such memory (macOS), the tensors' bytes follow the words through the socket.

Nothing is pickled. `marshal` carries plain values only, in its version 2, which every Python 3 reads and writes alike.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.segments import Mapped, Pool
from shadowrun.platforms.wire import Region, decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Channel", "Closed"]

_HEAD = struct.Struct("<Q")
_MARSHAL = 2
_ALIGNMENT = 64
_COPY_UP_TO = 1 << 20

_IN_MESSAGE, _IN_SEGMENT, _IN_YOURS = range(3)


class Closed(Exception):  # noqa: N818 - an end, not a failure
    """The other end is gone."""


class Channel:
    """One end. Each message of the asking end is answered by one of the other before the next.

    What the asking end receives is its own to keep: small messages are copied out of the shared memory, large ones hold
    their segment. What the answering end receives is good until its answer is sent.

    Args:
        connection: One of a pair of sockets.
        answers: Whether this is the answering end.
        shared: Whether to use shared memory, where the system has it.
    """

    def __init__(self, connection: socket.socket, *, answers: bool = False, shared: bool = True) -> None:
        self.connection = connection
        self._answers = answers
        self._pool = Pool() if shared else None
        self._sent: Mapped | None = None
        self._received: Mapped | None = None
        self._others: dict[int, Mapped] = {}
        self._held_there: Sequence[int] = ()
        self._deadline: float | None = None
        self._last: tuple[Any, list[torch.Tensor], list[int]] | None = None

    def limit(self, seconds: float | None) -> None:
        """Allow what follows so much time; past it, `TimeoutError` is raised, and the channel is of no more use."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.connection.settimeout(seconds)

    def send(self, message: Any) -> None:
        """Send what `wire.encode` can encode.

        Raises:
            Unsendable: It has a value of another kind; nothing was sent.
            OSError: The other end is gone, or does not read.
        """
        tree, regions = encode(message)
        self._last = None
        spans, total = self._lay_out(regions)
        gone: list[int] = []
        segment = None
        if total and self._pool is not None:
            segment, gone = self._pool.take(total, self._held_there)
        self._sent = segment
        if segment is None:
            spans = [(low, high, at, where if where != _IN_SEGMENT else _IN_MESSAGE) for low, high, at, where in spans]
        else:
            moved = [(r, at) for r, (_, _, at, where) in zip(regions, spans, strict=True) if where == _IN_SEGMENT]
            for (r, _), to in zip(moved, segment.tensors([(at, r.size) for r, at in moved]), strict=True):
                _copy(to, r.raw())
        held = [] if self._answers else [number for number, mapped in self._others.items() if mapped.in_use]
        name = None if segment is None else (segment.number, segment.size)
        text = marshal.dumps((tree, spans, name, gone, held), _MARSHAL)
        head = _HEAD.pack(len(text))
        if segment is not None and segment.fd >= 0:
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
            Unsendable: It has a word that this torch does not know; the channel can go on.
            Closed: The other end is gone.
            TimeoutError: The time of `limit` is over.
        """
        head = bytearray(_HEAD.size)
        fd = self._begin(head)
        text = bytearray(_HEAD.unpack(head)[0])
        self._fill(memoryview(text))
        tree, spans, name, gone, self._held_there = marshal.loads(text)  # noqa: S302 - words of our own other end
        for number in gone:
            self._others.pop(number, None)
        self._received = None
        if name is not None:
            number, size = name
            if fd >= 0:
                self._others[number] = Mapped(fd, size)
                os.close(fd)
            self._received = self._others[number]
        message = (tree, self._memory(spans), [low for low, *_ in spans])
        self._last = message if self._answers else None
        return decode(*message)

    def again(self) -> Any:
        """The message that is to be answered once more, in memory of this process, which can grow."""
        assert self._last is not None
        tree, memory, lows = self._last
        return decode(tree, [t.clone() for t in memory], lows)

    def _lay_out(self, regions: list[Region]) -> tuple[list[tuple[int, int, int, int]], int]:
        """For each region its part, its position and where it lies; and how large a segment that takes."""
        spans, end = [], 0
        for r in regions:
            if self._answers and self._received is not None and r.size:
                at = r.address - self._received.address
                if 0 <= at < self._received.size:
                    # An argument that was written to, or returned: the asking end has that memory.
                    spans.append((r.low, r.high, at, _IN_YOURS))
                    continue
            if not r.size:
                spans.append((0, 0, 0, _IN_MESSAGE))
                continue
            # Kernels may choose by alignment: memory begins at the same place of a cache line.
            at = -(-end // _ALIGNMENT) * _ALIGNMENT + r.address % _ALIGNMENT
            end = at + r.size
            spans.append((r.low, r.high, at, _IN_SEGMENT))
        return spans, end

    def _memory(self, spans: Sequence[tuple[int, int, int, int]]) -> list[torch.Tensor]:
        memory = [
            torch.empty(high - low if where == _IN_MESSAGE else 0, dtype=torch.uint8, device="cpu")
            for low, high, _, where in spans
        ]
        for kind, segment in ((_IN_SEGMENT, self._received), (_IN_YOURS, self._sent)):
            chosen = [k for k, (_, _, _, where) in enumerate(spans) if where == kind]
            if chosen:
                assert segment is not None
                found = segment.tensors([(spans[k][2], spans[k][1] - spans[k][0]) for k in chosen])
                if not self._answers and sum(t.numel() for t in found) <= _COPY_UP_TO:
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
            raise Closed from error
        if not data:
            raise Closed
        head[: len(data)] = data
        self._fill(memoryview(head)[len(data) :])
        return fds[0] if fds else -1

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                n = self.connection.recv_into(view[done:])
            except ConnectionError as error:
                raise Closed from error
            if not n:
                raise Closed
            done += n
            if done < len(view) and self._deadline is not None:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self.connection.settimeout(left)


def _copy(to: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    # torch's own copy wakes its threads, which costs milliseconds where the processor is busy.
    ctypes.memmove(to.data_ptr(), raw.data_ptr(), raw.numel())
    return to


def _bytes_of(raw: torch.Tensor) -> memoryview:
    """Memory of a tensor, which must live as long."""
    return memoryview((ctypes.c_char * raw.numel()).from_address(raw.data_ptr())).cast("B")
