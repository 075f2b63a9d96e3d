"""SQLite files that may come from anybody: guarded connections, and checks of the whole before anything is believed.

A file may hold views and triggers that run for ever, pages that contain each other, and values of any type in any
column. So its schema has to be ours to the letter, SQLite's own check has to find its pages in order, each value has to
be of the type and in the range of its column, and each number that refers to another row has to lead to one. What has
passed is data that readers need not doubt. All of this takes time in proportion to the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from typing import TYPE_CHECKING, Any

from shadowrun.store.codec import SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = [
    "COUNT",
    "INTEGER",
    "NUMBER",
    "SHAPE",
    "SIGNED",
    "TEXT",
    "Columns",
    "Guarded",
    "check",
    "check_schema",
    "check_values",
    "connect",
    "one_of",
    "optional",
    "unfit",
]

MAX_VALUE_BYTES = 2**28
_STEPS_AT_ONCE = 100_000
_STEPS = 100_000_000
_STEPS_PER_BYTE = 50
"""Of SQLite's machine, for one query. A file of a million calls takes some 3 a byte; seconds would depend on how busy
the machine is."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_LEAST_WITH_NAME = 16
"""SQLite looks for the name in a journal of this many bytes, whatever else it lacks."""
_ROLLBACK_MODES = b"\x01\x01"
"""How a file that keeps a rollback journal says so, in bytes 18 and 19 of its header."""

Columns = dict[str, dict[str, str]]
"""Table to column to SQL that is true of a value of it, with ``{}`` in its place."""

TEXT = "typeof({0}) = 'text' and ({0} = '' or is_text({0}))"
INTEGER = "typeof({0}) = 'integer'"
COUNT = f"{INTEGER} and {{0}} >= 0"
NUMBER = "(typeof({0}) in ('integer', 'real') or typeof({0}) = 'text' and {0} = 'nan')"
SIGNED = f"{INTEGER} and {{0}} >= -1"
"""A count, or -1 where there is none."""
SHAPE = "typeof({0}) = 'text' and is_shape({0})"
"""A JSON list of whole numbers."""

_TOKEN = re.compile(
    r"""(?P<skipped>--[^\n]*|/\*.*?(?:\*/|\Z)|\s+)|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|\w+|.""", re.DOTALL
)
"""Strings and quoted names are tokens too: what looks like a comment in them is none."""


def optional(condition: str) -> str:
    """The condition, or NULL."""
    return f"({{0}} is null or {condition})"


def one_of(*values: str) -> str:
    """One of these texts; none has a quotation mark."""
    return f"typeof({{0}}) = 'text' and {{0}} in ({', '.join(repr(str(value)) for value in values)})"


class Guarded(sqlite3.Connection):
    """A connection to a file that nobody vouches for: what one query may take is bounded.

    Attributes:
        most_steps: Of SQLite's machine, for each query.
    """

    most_steps = _STEPS
    _steps = 0

    def guard(self, n_bytes: int) -> None:
        """Switch on what SQLite has against hostile files.

        Args:
            n_bytes: Size of the file.
        """
        self.most_steps = _STEPS + _STEPS_PER_BYTE * n_bytes
        self.set_progress_handler(self._count, _STEPS_AT_ONCE)
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self.create_function("is_shape", 1, _is_shape, deterministic=True)
        self.create_function("is_text", 1, lambda _: True, deterministic=True)  # to hand over what is no UTF-8 fails
        for pragma in ("trusted_schema = off", "cell_size_check = on", "mmap_size = 0"):
            super().execute(f"pragma {pragma}")
        if hasattr(self, "setconfig"):  # from Python 3.12 on
            for name in ("DEFENSIVE", "ENABLE_TRIGGER", "ENABLE_FTS3_TOKENIZER"):
                self.setconfig(getattr(sqlite3, f"SQLITE_DBCONFIG_{name}"), name == "DEFENSIVE")

    def execute(self, *args: Any) -> sqlite3.Cursor:
        """As always; counts anew."""
        self._steps = 0
        return super().execute(*args)

    def _count(self) -> bool:
        """Whether to interrupt the query."""
        self._steps += _STEPS_AT_ONCE
        return self._steps > self.most_steps


def _is_shape(value: Any) -> bool:
    return isinstance(value, str) and SIZES.fullmatch(value) is not None


def connect(path: Path, mode: str, timeout_s: float) -> Guarded:
    """Open a file that exists.

    Raises:
        sqlite3.Error: It cannot be opened, or what lies beside it would have SQLite touch another file.
    """
    _check_beside(path)
    # as_uri() escapes '?', '#' and '%', which would end or change the name in a URI.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        timeout=timeout_s,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        factory=Guarded,
    )
    try:
        connection.guard(path.stat().st_size)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_beside(path: Path) -> None:
    """Look at the file itself, and at what SQLite opens beside it without being asked.

    A journal that ends in a name makes SQLite remove the file of that name. A write-ahead log is never ours; SQLite
    would write to it, and through a link. To open a pipe takes for ever.

    Raises:
        sqlite3.DatabaseError: Something there is not ours.
    """
    path = path.resolve()  # SQLite follows links, and looks beside what they lead to
    if not path.is_file():
        raise sqlite3.DatabaseError("it is no regular file")
    with path.open("rb") as file:
        modes = file.read(20)[18:]
    if modes != _ROLLBACK_MODES:
        raise sqlite3.DatabaseError("it wants a write-ahead log, which shadowrun does not make")
    for ending in ("-wal", "-shm"):
        if os.path.lexists(path.with_name(path.name + ending)):
            raise sqlite3.DatabaseError(f"{path.name + ending!r} lies beside it, which shadowrun does not make")
    journal = path.with_name(path.name + "-journal")
    if not os.path.lexists(journal):
        return
    if journal.is_symlink() or (journal.exists() and not journal.is_file()):
        raise sqlite3.DatabaseError(f"its journal {journal.name!r} is no file of its own")
    # Who records it may end a transaction at any moment, and take the journal away.
    with contextlib.suppress(FileNotFoundError), journal.open("rb") as file:
        n_bytes = file.seek(0, 2)
        file.seek(max(0, n_bytes - len(_JOURNAL_MAGIC)))
        if file.read() == _JOURNAL_MAGIC and n_bytes >= _LEAST_WITH_NAME:
            raise sqlite3.DatabaseError(f"its journal {journal.name!r} names another file")


def check(connection: sqlite3.Connection, schema: str) -> None:
    """Refuse a file whose schema is another, whose pages are not in order, or whose rows refer to nothing.

    Raises:
        ValueError: What is wrong.
        sqlite3.Error, UnicodeError: It cannot be read.
    """
    check_schema(connection, schema)
    # Not `quick_check`: readers may take a value from an index, and there it could be another.
    (found,) = connection.execute("pragma integrity_check(1)").fetchone()
    if found != "ok":
        raise ValueError(" ".join(str(found).split())[:200])
    dangling = connection.execute("pragma foreign_key_check").fetchone()
    if dangling is not None:
        raise ValueError(f"a row of {dangling[0]} refers to one of {dangling[2]} that is not there")


def check_schema(connection: sqlite3.Connection, schema: str) -> None:
    """Refuse a file with any table, view, index or trigger that `schema` does not make, to the letter.

    Raises:
        ValueError: Which.
        sqlite3.Error, UnicodeError: It cannot be read.
    """
    ours = sqlite3.connect(":memory:")
    try:
        ours.executescript(schema)
        expected = set(_objects(ours))
    finally:
        ours.close()
    found = list(_objects(connection))
    for kind, name, _, _ in sorted(set(found) - expected):
        raise ValueError(f"it has the {kind} {name!r}, which shadowrun did not make")
    for kind, name, _, _ in sorted(expected - set(found)):
        raise ValueError(f"it lacks the {kind} {name!r}")
    if len(found) != len(expected):
        raise ValueError("a name stands for two tables")


def _objects(connection: sqlite3.Connection) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Kind, name, table, and the tokens of the SQL that made it."""
    rows = connection.execute("select type, name, tbl_name, coalesce(sql, '') from sqlite_master limit 1000").fetchall()
    for row in rows:
        kind, name, table, sql = map(str, row)
        yield kind, name, table, tuple(token[0] for token in _TOKEN.finditer(sql) if token["skipped"] is None)


def check_values(connection: sqlite3.Connection, columns: Columns) -> None:
    """Refuse a file in which a value is not of the type, or not in the range, of its column.

    Raises:
        ValueError: Which column.
        sqlite3.Error, UnicodeError: It cannot be read.
    """
    for table, conditions in columns.items():
        if _holds(connection, table, conditions):
            continue
        for name, condition in conditions.items():
            if not _holds(connection, table, {name: condition}):
                raise ValueError(f"a value of {table}.{name} is none that shadowrun writes")


def _holds(connection: sqlite3.Connection, table: str, conditions: Mapping[str, str]) -> bool:
    """Whether all rows of a table meet conditions, and their texts are UTF-8."""
    sql = f"select 1 from {table} where {unfit(conditions)} limit 1"  # noqa: S608 - names of ours
    try:
        return connection.execute(sql).fetchone() is None
    except sqlite3.OperationalError as error:
        if "user-defined function" not in str(error):
            raise
        return False


def unfit(conditions: Mapping[str, str]) -> str:
    """SQL that is true of a row in which one of these columns does not hold what it must.

    No condition is ever NULL, so that the first of them that fails decides, and no other one is looked at.
    """
    return f"not ({' and '.join(f'({text.format(name)})' for name, text in conditions.items())})"
