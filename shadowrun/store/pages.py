"""Rows from the pages of an SQLite file that SQLite refuses: each page is read on its own, and none is trusted."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

__all__ = ["OnDisk", "Pages", "Row"]

_INNER_INDEX, _INNER_TABLE, _LEAF_INDEX, _LEAF_TABLE = 2, 5, 10, 13
_INDEX = (_INNER_INDEX, _LEAF_INDEX)
_DEFAULT_SIZE = 4096
_MOST_READ = 4
"""Bytes of rows that are read, for each byte of the file: pages of a hostile one may lead to the same text again and
again."""
_MOST_READ_OF_DISK = 16
_LEAST_READ = 2**24
"""And for each byte that it takes on the disk, beyond these: a file of holes is of any size, and may be compressed."""
_MOST_BYTES = 2**36
_SIZES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 7: 8, 8: 0, 9: 0}

Row = tuple[int, tuple[Any, ...]]
"""Number of a row, -1 in a table that has none, and its values as they are stored."""


class OnDisk:
    """The bytes of a file, read where they are asked for.

    Args:
        file: Open for reading.

    Raises:
        ValueError: It is larger than any data file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._n_bytes = file.seek(0, os.SEEK_END)
        if self._n_bytes > _MOST_BYTES:
            raise ValueError(f"it has {self._n_bytes:,} bytes")
        taken = getattr(os.fstat(file.fileno()), "st_blocks", self._n_bytes) * 512
        self.most_read = min(_MOST_READ * self._n_bytes, _MOST_READ_OF_DISK * taken + _LEAST_READ)

    def __len__(self) -> int:
        return self._n_bytes

    def __getitem__(self, where: slice) -> bytes:
        """The bytes from a place to another; fewer at the end."""
        self._file.seek(where.start)
        return self._file.read(max(0, where.stop - where.start))


@dataclass
class Pages:
    """The pages of a file.

    Attributes:
        data: The file.
        size: Of a page, in bytes.
        n_said: Pages that the file says it has.
        seen: Pages that were read.
        bad: Pages that could not be read, or not all of them.
    """

    data: OnDisk
    size: int = 0
    n_said: int = 0
    seen: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    _left: int = 0

    def __post_init__(self) -> None:
        size = int.from_bytes(self.data[16:18], "big")
        size = 65536 if size == 1 else size
        self.size = size if size >= 512 and size & (size - 1) == 0 else _DEFAULT_SIZE
        (reserved,) = self.data[20:21]
        self._usable = self.size - reserved if reserved <= self.size - 480 else self.size
        self.n_present = len(self.data) // self.size
        said = int.from_bytes(self.data[28:32], "big")
        # What is more than twice what is there is no number of pages, but damage.
        self.n_said = said if self.n_present <= said <= 2**31 else self.n_present
        self._left = self.data.most_read

    def rows(self, root: int) -> Iterator[Row]:
        """Rows of the table whose first page this is, as far as pages lead to them."""
        waiting = [root]
        while waiting:
            number = waiting.pop()
            if number in self.seen or not 1 <= number <= self.n_said:
                continue
            self.seen.add(number)
            children, rows = self._page(number)
            yield from rows
            waiting += reversed(children)

    def orphans(self) -> Iterator[list[Row]]:
        """Rows of each page that no other one leads to."""
        for number in range(1, self.n_present + 1):
            if number not in self.seen and self._kind(number) in (_LEAF_TABLE, _LEAF_INDEX):
                _, rows = self._page(number)
                if rows:
                    self.seen.add(number)
                    yield rows

    @property
    def n_lost(self) -> int:
        """Pages that are missing, or could not be read in full."""
        return self.n_said - self.n_present + sum(number <= self.n_present for number in self.bad)

    def _kind(self, number: int) -> int:
        start = self._start(number)
        return self.data[start : start + 1][0] if number <= self.n_present else 0

    def _start(self, number: int) -> int:
        """Where the page's own header begins; the first page has that of the file before it."""
        return (number - 1) * self.size + (100 if number == 1 else 0)

    def _page(self, number: int) -> tuple[list[int], list[Row]]:
        """The pages below a page, and the rows on it that can be read."""
        kind = self._kind(number)
        if kind not in (_INNER_INDEX, _INNER_TABLE, _LEAF_INDEX, _LEAF_TABLE):
            self.bad.add(number)
            return [], []
        begin, start = (number - 1) * self.size, self._start(number)
        page = self.data[begin : begin + self.size]
        inner = kind in (_INNER_INDEX, _INNER_TABLE)
        head = start - begin + (12 if inner else 8)
        (n_cells,) = struct.unpack_from(">H", page, start - begin + 3)
        n_cells = min(n_cells, (self.size - head) // 2)
        children: list[int] = []
        rows: list[Row] = []
        for (cell,) in struct.iter_unpack(">H", page[head : head + 2 * n_cells]):
            try:
                if inner:
                    children.append(int.from_bytes(page[cell : cell + 4], "big"))
                if kind != _INNER_TABLE:
                    rows.append(self._row(page, cell + (4 if inner else 0), in_index=kind in _INDEX))
            except (ValueError, IndexError, struct.error):
                self.bad.add(number)
        if inner:
            children.append(int.from_bytes(page[head - 4 : head], "big"))
        return children, rows

    def _row(self, page: bytes, at: int, *, in_index: bool) -> Row:
        length, at = _varint(page, at)
        number = -1
        if not in_index:
            number, at = _varint(page, at)
        self._left -= length
        if self._left < 0:
            raise ValueError("too much")
        # As many bytes on the page itself, so that all of the last page of the rest is used: SQLite's own rule.
        u = self._usable
        most = (u - 12) * 64 // 255 - 23 if in_index else u - 35
        here = length
        if length > most:
            least = (u - 12) * 32 // 255 - 23
            here = least + (length - least) % (u - 4)
            here = here if here <= most else least
        payload = page[at : at + here]
        if len(payload) < here:
            raise ValueError("cut")
        if length > here:
            payload += self._overflow(int.from_bytes(page[at + here : at + here + 4], "big"), length - here)
        return number, tuple(_values(payload))

    def _overflow(self, number: int, n_bytes: int) -> bytes:
        parts: list[bytes] = []
        while n_bytes > 0:
            if not 1 < number <= self.n_present:
                raise ValueError("lost")
            self.seen.add(number)
            begin = (number - 1) * self.size
            part = self.data[begin + 4 : begin + 4 + min(n_bytes, self._usable - 4)]
            parts.append(part)
            n_bytes -= len(part)
            number = int.from_bytes(self.data[begin : begin + 4], "big")
        return b"".join(parts)


def _varint(data: Sequence[int], at: int) -> tuple[int, int]:
    value = 0
    for k in range(9):
        byte = data[at + k]
        if k == 8:
            value = value << 8 | byte
            return (value - 2**64 if value >= 2**63 else value), at + 9
        value = value << 7 | byte & 127
        if byte < 128:
            return value, at + k + 1
    raise ValueError("unreachable")


def _values(payload: bytes) -> Iterator[Any]:
    """Values of a record.

    Raises:
        ValueError, IndexError: It is none.
    """
    end, at = _varint(payload, 0)
    types = []
    while at < end:
        kind, at = _varint(payload, at)
        types.append(kind)
    at = end
    for kind in types:
        n = _SIZES[kind] if kind in _SIZES else (kind - 12) // 2
        part = payload[at : at + n]
        if len(part) < n or kind in (10, 11) or kind < 0:
            raise ValueError("no record")
        at += n
        if kind == 0:
            yield None
        elif kind == 7:
            yield struct.unpack(">d", part)[0]
        elif kind in (8, 9):
            yield kind - 8
        elif kind <= 6:
            yield int.from_bytes(part, "big", signed=True)
        else:
            yield part.decode("utf-8") if kind % 2 else part
