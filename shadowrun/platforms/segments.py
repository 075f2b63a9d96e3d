"""Shared memory between a process and its worker: made once, mapped by both, used again.

Segments have no name (`memfd`): whatever kills the two processes, nothing is left behind. Only Linux has them.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["KEPT_BYTES", "Mapped", "Pool"]

KEPT_BYTES = 256 << 20
"""Memory that a process keeps for its next messages; what is more is given back when the next one is sent."""

_PAGE = 1 << 16
# A segment that holds a much smaller message would be held as a whole as long as one tensor of it lives.
_WASTE = 4
_SMALL = 1 << 20


class Mapped:
    """A segment as one process sees it.

    Attributes:
        size: In bytes.
        address: Where it lies in this process.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(fd, size)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._use: weakref.ref[memoryview] | None = None

    def tensors(self, places: Collection[tuple[int, int]]) -> list[torch.Tensor]:
        """Bytes at some positions, given with their number, each a storage of its own over the segment.

        As long as one of them lives, also as the memory of another tensor, the segment is in use.
        """
        view = memoryview(self._map)
        self._use = weakref.ref(view)
        return [torch.frombuffer(view, dtype=torch.uint8, count=n, offset=at) for at, n in places]

    @property
    def in_use(self) -> bool:
        """Whether a tensor of `tensors` still lives."""
        return self._use is not None and self._use() is not None


class _Own(Mapped):
    """A segment of this process's own: `fd` is there until the other one was given it."""

    def __init__(self, fd: int, size: int, number: int) -> None:
        super().__init__(fd, size)
        self.fd = fd
        self.number = number

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Pool:
    """Segments that this process writes its messages to.

    Args:
        kept_bytes: Memory to keep while it is not used.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._segments: dict[int, _Own] = {}
        self._numbers = itertools.count()
        weakref.finalize(self, _close_all, self._segments)

    def take(self, n_bytes: int, held: Collection[int]) -> tuple[_Own | None, list[int]]:
        """A segment for a message, and the numbers of those that are given back.

        Args:
            n_bytes: What the message needs.
            held: Numbers of segments that the other process still uses.

        Returns:
            None for the segment where the system has no memory for it, or no such segments.
        """
        free = [s for s in self._segments.values() if not s.in_use and s.number not in held]
        fitting = [s for s in free if n_bytes <= s.size <= max(_SMALL, _WASTE * n_bytes)]
        chosen = min(fitting, key=lambda s: s.size, default=None)
        gone = self._given_back([s for s in free if s is not chosen], chosen)
        return chosen or self._make(n_bytes), gone

    def _make(self, n_bytes: int) -> _Own | None:
        size = -(-n_bytes // _PAGE) * _PAGE
        try:
            fd = os.memfd_create("shadowrun", os.MFD_CLOEXEC)
        except (AttributeError, OSError):
            return None
        try:
            # Memory that is not there is better refused now than a fatal signal later.
            os.posix_fallocate(fd, 0, size)
            segment = _Own(fd, size, next(self._numbers))
        except OSError:
            os.close(fd)
            return None
        self._segments[segment.number] = segment
        return segment

    def _given_back(self, idle: list[_Own], chosen: _Own | None) -> list[int]:
        """Drop the oldest of the idle segments, until what is kept is within bounds."""
        total = sum(s.size for s in idle) + (chosen.size if chosen is not None else 0)
        gone = []
        for segment in idle:
            if total <= self._kept_bytes:
                break
            total -= segment.size
            gone.append(segment.number)
            self._segments.pop(segment.number).close()
        return gone


def _close_all(segments: dict[int, Any]) -> None:
    for segment in segments.values():
        segment.close()
