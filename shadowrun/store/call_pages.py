"""The calls of a large data file, from the bytes of its pages: a tenth of the time of a query.

A query makes Python objects of ten million rows; `native/call_rows.c` makes one array of those of some pages. SQLite
stays the specification: there are no pages to read without native code, of a small file, of a database in memory, and
of one that holds anything but what the recorder writes. Then a query has to be made.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.native import core

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CallPages", "find", "last_of"]

MIN_BYTES = 4 << 20
"""Of a smaller file, a query takes less time than the import of numpy, which the arrays need."""
LEAVES = 1024
"""Read at once, of some 150 calls each: neither memory nor the lock on the file is held for a whole pass."""

_LEAF, _INTERIOR = 13, 5
_HEADER = 12
# A crafted file may have pages that name each other in a circle; no tree of SQLite's is as deep.
_MAX_DEPTH = 20
_MAX_VARINT = 9
_UTF_8 = 1
_WIDTH = 8 * 8


class CallPages:
    """The table ``call`` of a data file.

    Args:
        path: The file.
        root: Number of the first page of the table.
    """

    def __init__(self, path: str, root: int) -> None:
        self._path, self._root = path, root

    def rows(self, connection: sqlite3.Connection, after: float) -> bytes:
        """Some calls after call `after`, in their order; none at the end. Each is eight float64.

        Number, step, context, verdict, nanoseconds on reference and target, accumulated error, absolute and relative;
        -1 for what was not measured.

        Args:
            connection: To the file; its lock is held meanwhile.
            after: A call's number, or -1.

        Raises:
            sqlite3.Error, OSError: The file cannot be read, or holds what the recorder does not write.
        """
        assert core is not None
        # `select` takes the lock: `begin` alone takes none before the first statement.
        # In a transaction, SQLite's shared lock keeps writers away.
        connection.execute("begin")
        try:
            connection.execute("select 1 from call limit 1").fetchall()
            file = os.open(self._path, os.O_RDONLY)
            try:
                pages = _Pages(file)
                leaves = b"".join(pages.leaves(self._root, after))
            finally:
                # This ends all locks of the process on the file: the connection of a reader needs none any more.
                os.close(file)
        finally:
            connection.execute("commit")
        rows: bytes | None = core.call_rows(leaves, pages.size, pages.usable, after)
        if rows is None:
            raise _irregular()
        return rows


def _irregular() -> sqlite3.DatabaseError:
    return sqlite3.DatabaseError("a page of calls holds what shadowrun does not write")


def last_of(rows: bytes) -> float:
    """Number of the last call."""
    (seq,) = memoryview(rows)[-_WIDTH : -_WIDTH + 8].cast("d")
    return float(seq)


def find(connection: sqlite3.Connection) -> CallPages | None:
    """The calls of the file of a connection, if each of them is as the recorder writes it; else None."""
    try:
        path = connection.execute("pragma database_list").fetchone()[2]
        # Windows has no pread; a database in memory has no path.
        if core is None or not hasattr(os, "pread") or not path or Path(path).stat().st_size < MIN_BYTES:
            return None
        ((root,),) = connection.execute("select rootpage from sqlite_master where name = 'call'").fetchall()
        pages, last = CallPages(path, root), -1.0
        # All at once, before the first use: a reader that met an irregular page in the middle would have counted half
        # of it.
        while rows := pages.rows(connection, last):
            last = last_of(rows)
    except (sqlite3.Error, OSError, UnicodeError):
        return None
    return pages


class _Pages:
    """Pages of a file, while nothing writes it."""

    def __init__(self, file: int) -> None:
        self._file = file
        header = os.pread(file, 100, 0)
        if len(header) < 100 or header[56:60] != _UTF_8.to_bytes(4, "big"):
            raise sqlite3.DatabaseError("its texts are not UTF-8")
        size = int.from_bytes(header[16:18], "big")
        # The header has two bytes for it, in which 65,536 does not fit: SQLite's format writes 1.
        self.size = 1 << 16 if size == 1 else size
        self.usable = self.size - header[20]
        # A page is in the tree once: a hostile file may have a circle of pages.
        self._n_left = os.fstat(file).st_size // max(self.size, 1)

    def leaves(self, root: int, after: float) -> list[bytes]:
        """The next leaves of a table, from the one with the first key after `after` on."""
        found: list[bytes] = []
        self._walk(root, after, found, _MAX_DEPTH)
        return found

    def _walk(self, number: int, after: float, found: list[bytes], depth: int) -> None:
        page = self._read(number)
        if page[0] == _LEAF:
            found.append(page)
            return
        if page[0] != _INTERIOR or depth == 0:
            raise sqlite3.DatabaseError("a page of calls is of no table")
        for child, greatest in self._children(page):
            if greatest > after:
                self._walk(child, after, found, depth - 1)
            if len(found) >= LEAVES:
                return

    def _children(self, page: bytes) -> Iterator[tuple[int, float]]:
        """Each page below an interior one, with the greatest key in it."""
        n = int.from_bytes(page[3:5], "big")
        for at in range(_HEADER, _HEADER + 2 * n, 2):
            cell = int.from_bytes(page[at : at + 2], "big")
            yield int.from_bytes(page[cell : cell + 4], "big"), _varint(page[cell + 4 : cell + 4 + _MAX_VARINT])
        yield int.from_bytes(page[8:12], "big"), float("inf")

    def _read(self, number: int) -> bytes:
        self._n_left -= 1
        page = os.pread(self._file, self.size, (number - 1) * self.size) if number > 1 else b""
        if len(page) < self.size or self._n_left < 0:
            raise sqlite3.DatabaseError("a page of calls is missing")
        return page


def _varint(data: bytes) -> int:
    value = 0
    for byte in data[: _MAX_VARINT - 1]:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value
    raise sqlite3.DatabaseError("a key of a call is out of range")
