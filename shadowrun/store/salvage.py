"""`--salvage`: the readable rows of a damaged data file, copied to a new database with a note on what is missing.

SQLite refuses a damaged file as a whole. `Pages` parses the file format itself, one page at a time, and trusts none of
them. The rows then pass the same checks as those of any untrusted file (`validation`).

The format: https://www.sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import struct
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.store.codec import decode_info, encode_info
from shadowrun.store.connect import SALVAGED
from shadowrun.store.migrations import fill_from, schema_of
from shadowrun.store.schema import SCHEMA, SCHEMA_VERSION
from shadowrun.store.validation import COLUMNS, GuardedConnection, check_datafile_values, check_sources, violation_sql
from shadowrun.types import RunInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

__all__ = ["OnDisk", "Pages", "Row", "salvaged"]


_INNER_INDEX, _INNER_TABLE, _LEAF_INDEX, _LEAF_TABLE = 2, 5, 10, 13
_INDEX = (_INNER_INDEX, _LEAF_INDEX)
_DEFAULT_SIZE = 4096
# Bytes of rows that are read for each byte of the file: pages of a hostile file may refer to one text many times.
_MAX_READ = 4
_MAX_READ_OF_DISK = 16
# The same for each byte on disk, plus a constant: a sparse or compressed file may have any size at no cost.
_MIN_READ = 2**24
# `orphans` looks at each page: a sparse file would take as long as it claims to be large.
_MAX_BYTES = 2**36
# Serial type of a value to its size in bytes; 10 and 11 are reserved, larger ones are blobs (even) and texts (odd).
_SIZES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 7: 8, 8: 0, 9: 0}

Row = tuple[int, tuple[Any, ...]]
"""Row id, -1 in a table ``without rowid``, and the values as stored."""


class OnDisk:
    """A file that is sliced like bytes, and read lazily.

    Args:
        file: Open for reading.

    Raises:
        ValueError: The file is larger than any data file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._n_bytes = file.seek(0, os.SEEK_END)
        if self._n_bytes > _MAX_BYTES:
            raise ValueError(f"it has {self._n_bytes:,} bytes")
        taken = getattr(os.fstat(file.fileno()), "st_blocks", self._n_bytes) * 512
        self.max_read = min(_MAX_READ * self._n_bytes, _MAX_READ_OF_DISK * taken + _MIN_READ)

    def __len__(self) -> int:
        return self._n_bytes

    def __getitem__(self, where: slice) -> bytes:
        """The bytes of a slice; fewer at the end of the file."""
        self._file.seek(where.start)
        return self._file.read(max(0, where.stop - where.start))


@dataclass
class Pages:
    """The pages of a file.

    Attributes:
        data: The file.
        size: Bytes of a page.
        n_said: Pages in the file, as its header says.
        seen: Pages that were read.
        bad: Pages that could not be read in full.
    """

    data: OnDisk
    size: int = 0
    n_said: int = 0
    seen: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    _left: int = 0

    def __post_init__(self) -> None:
        size = int.from_bytes(self.data[16:18], "big")
        # Two bytes hold no 65,536: the format writes 1 for it.
        size = 65536 if size == 1 else size
        # The header may be what is damaged: then the size that SQLite gives a new file.
        self.size = size if size >= 512 and size & (size - 1) == 0 else _DEFAULT_SIZE
        # SQLite allows no page with fewer than 480 usable bytes.
        (reserved,) = self.data[20:21]
        self._usable = self.size - reserved if reserved <= self.size - 480 else self.size
        self.n_present = len(self.data) // self.size
        said = int.from_bytes(self.data[28:32], "big")
        # A truncated file has fewer pages than its header says. A smaller number, or one beyond SQLite's limit, is
        # itself damaged.
        self.n_said = said if self.n_present <= said <= 2**31 else self.n_present
        self._left = self.data.max_read

    def rows(self, root: int) -> Iterator[Row]:
        """Rows of the table with this root page, as far as the pages of its tree can be read."""
        waiting = [root]
        while waiting:
            number = waiting.pop()
            # Each page once: pages of a hostile file may contain each other.
            if number in self.seen or not 1 <= number <= self.n_said:
                continue
            self.seen.add(number)
            children, rows = self._page(number)
            yield from rows
            waiting += reversed(children)

    def orphans(self) -> Iterator[list[Row]]:
        """Rows of each leaf page that no other page leads to, since its parent is damaged."""
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
        """Offset of the header of the page; on the first page, the header of the file comes before it."""
        return (number - 1) * self.size + (100 if number == 1 else 0)

    def _page(self, number: int) -> tuple[list[int], list[Row]]:
        """The children of a page, and its readable rows."""
        kind = self._kind(number)
        if kind not in (_INNER_INDEX, _INNER_TABLE, _LEAF_INDEX, _LEAF_TABLE):
            self.bad.add(number)
            return [], []
        begin, start = (number - 1) * self.size, self._start(number)
        page = self.data[begin : begin + self.size]
        inner = kind in (_INNER_INDEX, _INNER_TABLE)
        # The header of an inner page ends in the number of its last child.
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
        if length < 0:  # it would be given back to `_left`
            raise ValueError("no length")
        self._left -= length
        if self._left < 0:
            raise ValueError("too much")
        # How many bytes of a long row are on the page itself, and not on overflow pages: the formulas of the file
        # format, which fill the last overflow page where they can.
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
        if k == 8:  # the ninth byte gives all its bits, the others seven
            value = value << 8 | byte
            return (value - 2**64 if value >= 2**63 else value), at + 9
        value = value << 7 | byte & 127
        if byte < 128:
            return value, at + k + 1
    raise ValueError("unreachable")


def _values(payload: bytes) -> Iterator[Any]:
    """Values of a record.

    Raises:
        ValueError, IndexError: The bytes are not a record.
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


_UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """A table of the schema.

    Attributes:
        columns: Names, in the order of storage.
        types: Declared type of each column.
        key: Index of the column that is an alias of the row id; -1 if there is none.
        in_index: Whether the table is ``without rowid``, and so stored like an index.
    """

    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    key: int
    in_index: bool

    def values(self, row: Row) -> tuple[Any, ...]:
        """Values of a row, with the row id in the column that is an alias of it (stored as NULL)."""
        number, values = row
        return values if self.key < 0 else (*values[: self.key], number, *values[self.key + 1 :])

    def may_have(self, row: Row) -> bool:
        """Whether a row may belong to this table, by number and types of its values."""
        number, values = row
        if (number < 0) != self.in_index or len(values) != len(self.columns):
            return False
        return all(
            value is None if k == self.key else _may_be(value, kind)
            for k, (value, kind) in enumerate(zip(values, self.types, strict=True))
        )


def salvaged(path: Path) -> sqlite3.Connection:
    """A database with the readable rows of a data file; a note of its `RunInfo` says what is missing.

    Raises:
        ValueError: The schema is unknown.
        sqlite3.Error, OSError: The file cannot be read at all, or the database cannot be written.
    """
    with path.open("rb") as file:
        return _of_pages(Pages(OnDisk(file)))


def _of_pages(pages: Pages) -> sqlite3.Connection:
    version = int.from_bytes(pages.data[60:64], "big")
    if version > SCHEMA_VERSION:
        raise ValueError(f"schema {version} is newer")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "old" if version < SCHEMA_VERSION else ""
        old = _database(file, schema_of(version) if file else SCHEMA)
        _fill(old, pages)
        connection = old
        if file:
            connection = _database("", SCHEMA)
            old.close()
            fill_from(connection, Path(file), version)
    try:
        connection.guard(len(pages.data))
        left_out = _delete_invalid_rows(connection)
        _annotate(connection, pages, left_out)
        check_datafile_values(connection)
        connection.execute("pragma query_only = on")
    except BaseException:
        connection.close()
        raise
    return connection


def _database(file: Path | str, schema: str) -> GuardedConnection:
    connection = sqlite3.connect(
        file, uri=True, isolation_level=None, check_same_thread=False, factory=GuardedConnection
    )
    connection.executescript(schema)
    return connection


def _fill(connection: sqlite3.Connection, pages: Pages) -> None:
    tables = {table.name: table for table in _tables(connection)}
    connection.execute("begin")
    # Page 1 is the root of `sqlite_master`, which names the root pages of all tables.
    for _, master in list(pages.rows(1)):
        if len(master) == 5 and master[0] == "table" and master[1] in tables and isinstance(master[3], int):
            _insert(connection, tables[master[1]], pages.rows(master[3]))
    for rows in pages.orphans():
        wanted = [table for table in tables.values() if all(map(table.may_have, rows))]
        # Rows of `op` and `site` have the same types; only names of operators have a namespace.
        if {table.name for table in wanted} == {"op", "site"}:
            is_op = all("::" in str(values[1]) for _, values in rows)
            wanted = [tables["op" if is_op else "site"]]
        # A page that fits several tables is left out: a wrong row is worse than a missing one.
        if len(wanted) == 1:
            _insert(connection, wanted[0], rows)
    connection.execute("commit")


def _insert(connection: sqlite3.Connection, table: _Table, rows: Iterator[Row] | list[Row]) -> None:
    marks = ", ".join("?" * len(table.columns))
    sql = f"insert or ignore into {table.name} ({', '.join(table.columns)}) values ({marks})"  # noqa: S608 - names from our schema
    for row in rows:
        if len(row[1]) == len(table.columns):
            # One bad row must not cost the readable ones after it.
            with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):
                connection.execute(sql, table.values(row))


def _tables(connection: sqlite3.Connection) -> Iterator[_Table]:
    names = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
    for name in names:
        described = connection.execute(f"pragma table_info({name})").fetchall()
        types = {column: kind.lower() for _, column, kind, *_ in described}
        keys = [column for _, column, kind, _, _, key in described if key and kind.lower() == "integer"]
        index = connection.execute(f"pragma index_xinfo(sqlite_autoindex_{name}_1)").fetchall()
        stored = [column for _, _, column, *_ in index]
        # A table ``without rowid`` is its own index, which stores all its columns, those of the key first.
        in_index = len(stored) == len(described) and None not in stored
        columns = tuple(stored if in_index else types)
        key = columns.index(keys[0]) if keys and not in_index else -1
        yield _Table(name, columns, tuple(types[column] for column in columns), key, in_index)


def _may_be(value: Any, kind: str) -> bool:
    if kind == "integer":
        return value is None or isinstance(value, (int, float))
    if kind == "text":
        return isinstance(value, str)
    return value is None or not isinstance(value, bytes)


def _delete_invalid_rows(connection: sqlite3.Connection) -> Counter[str]:
    """Delete invalid rows, and rows that refer to missing ones; returns how many of each table."""
    left_out: Counter[str] = Counter()
    run = connection.execute
    for table, columns in COLUMNS.items():
        left_out[table] += run(f"delete from {table} where {violation_sql(columns)}").rowcount  # noqa: S608 - names from `COLUMNS`
    for table in COLUMNS:  # ordered so that each table refers only to those before it
        for _, _, other, column, *_ in run(f"pragma foreign_key_list({table})").fetchall():
            sql = f"delete from {table} where {column} not in (select id from {other})"  # noqa: S608 - names from our schema
            left_out[table] += run(sql).rowcount
    for seq, info in run("select id, info from source").fetchall():
        try:
            decode_info(info)
        except ValueError:
            left_out["source"] += run("delete from source where id = ?", (seq,)).rowcount
    try:
        check_sources(connection)
    except ValueError:
        left_out["source"] += run("delete from source").rowcount
    return +left_out


def _annotate(connection: sqlite3.Connection, pages: Pages, left_out: Counter[str]) -> None:
    row = connection.execute("select value from meta").fetchone()
    try:
        info = decode_info(row[0] if row else "")
        lost = ""
    except ValueError:
        info = RunInfo(_UNKNOWN, _UNKNOWN)
        lost = " What the run was (platforms, versions, options) is lost."
    rows = ", ".join(f"{n:,} of {table}" for table, n in left_out.items())
    dropped = f" Rows left out, being damaged or referring to what is lost: {rows}." if rows else ""
    n, greatest = connection.execute("select count(*), coalesce(max(seq), -1) from call").fetchone()
    gaps = f" {greatest + 1 - n:,} calls before the last one are missing." if 0 < n <= greatest else ""
    note = (
        f"{SALVAGED}: {pages.n_lost:,} of its {pages.n_said:,} pages are missing or unreadable; "
        f"{n:,} calls could be read.{gaps}{dropped}{lost} Figures are of what could be read."
    )
    connection.execute("delete from meta")
    value = encode_info(dataclasses.replace(info, notes=(note, *info.notes)))
    connection.execute("insert into meta values ('info', ?)", (value,))
