"""What can still be read of a damaged data file, as a data file that is whole and says what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.store.checking import COLUMNS, check_sources, check_values
from shadowrun.store.codec import decode_info, encode_info
from shadowrun.store.opening import SALVAGED
from shadowrun.store.pages import OnDisk, Pages
from shadowrun.store.schema import SCHEMA, SCHEMA_VERSION
from shadowrun.store.untrusted import Guarded, unfit
from shadowrun.store.upgrading import fill_from, schema_of
from shadowrun.types import RunInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.store.pages import Row

__all__ = ["salvaged"]

_UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """A table of the schema.

    Attributes:
        columns: In the order in which a row has them.
        types: Of each, as declared.
        key: Place of the column that is the row's number; -1 where there is none.
        in_index: Whether it is stored like an index, without numbers of rows.
    """

    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    key: int
    in_index: bool

    def values(self, row: Row) -> tuple[Any, ...]:
        """A row's values, its number in its place."""
        number, values = row
        return values if self.key < 0 else (*values[: self.key], number, *values[self.key + 1 :])

    def may_have(self, row: Row) -> bool:
        """Whether a row looks like one of this table."""
        number, values = row
        if (number < 0) != self.in_index or len(values) != len(self.columns):
            return False
        return all(
            value is None if k == self.key else _may_be(value, kind)
            for k, (value, kind) in enumerate(zip(values, self.types, strict=True))
        )


def salvaged(path: Path) -> sqlite3.Connection:
    """A database with what can be read of a data file; its run information has a note on what cannot.

    Raises:
        ValueError: It is not of a schema that this shadowrun knows.
        sqlite3.Error, OSError: It cannot be read at all, or the database not be written.
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
        left_out = _tidy(connection)
        _annotate(connection, pages, left_out)
        check_values(connection)
        connection.execute("pragma query_only = on")
    except BaseException:
        connection.close()
        raise
    return connection


def _database(file: Path | str, schema: str) -> Guarded:
    connection = sqlite3.connect(file, uri=True, isolation_level=None, check_same_thread=False, factory=Guarded)
    connection.executescript(schema)
    return connection


def _fill(connection: sqlite3.Connection, pages: Pages) -> None:
    tables = {table.name: table for table in _tables(connection)}
    connection.execute("begin")
    for _, master in list(pages.rows(1)):
        if len(master) == 5 and master[0] == "table" and master[1] in tables and isinstance(master[3], int):
            _insert(connection, tables[master[1]], pages.rows(master[3]))
    for rows in pages.orphans():
        wanted = [table for table in tables.values() if all(map(table.may_have, rows))]
        if {table.name for table in wanted} == {"op", "site"}:
            is_op = all("::" in str(values[1]) for _, values in rows)
            wanted = [tables["op" if is_op else "site"]]
        if len(wanted) == 1:
            _insert(connection, wanted[0], rows)
    connection.execute("commit")


def _insert(connection: sqlite3.Connection, table: _Table, rows: Iterator[Row] | list[Row]) -> None:
    marks = ", ".join("?" * len(table.columns))
    sql = f"insert or ignore into {table.name} ({', '.join(table.columns)}) values ({marks})"  # noqa: S608 - of ours
    for row in rows:
        if len(row[1]) == len(table.columns):
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
        # A table without numbers of rows is its own index: that has all its columns, those of the key first.
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


def _tidy(connection: sqlite3.Connection) -> Counter[str]:
    """Leave out rows that hold, or refer to, what no row may; returns how many of each table."""
    left_out: Counter[str] = Counter()
    run = connection.execute
    for table, columns in COLUMNS.items():
        left_out[table] += run(f"delete from {table} where {unfit(columns)}").rowcount  # noqa: S608 - names of ours
    for table in COLUMNS:  # in an order in which each refers to those before it
        for _, _, other, column, *_ in run(f"pragma foreign_key_list({table})").fetchall():
            sql = f"delete from {table} where {column} not in (select id from {other})"  # noqa: S608 - names of ours
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
