"""Validation of untrusted data files: guarded connections, and a check of the whole file before anything is read.

An SQLite file from another person may hold views and triggers that never end, pages that contain each other, and values
of any type in any column. So four checks run first: the schema equals that of shadowrun token by token, SQLite's
integrity check passes, each value has the type and the range of its column (`COLUMNS`), and each foreign key leads to a
row. Readers trust a file that passed. The checks take time in proportion to the size of the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import struct
from typing import IO, TYPE_CHECKING, Any

from shadowrun.store.codec import SIZES, decode_info
from shadowrun.store.schema import DIFF_COLUMNS, POSITIONS
from shadowrun.types import Cause, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from shadowrun.store.call_pages import CallPages

__all__ = [
    "COLUMNS",
    "COUNT",
    "INTEGER",
    "NUMBER",
    "SHAPE",
    "SIGNED",
    "TEXT",
    "Columns",
    "GuardedConnection",
    "check",
    "check_datafile_values",
    "check_schema",
    "check_sources",
    "check_values",
    "connect",
    "connect_and_recover",
    "one_of",
    "optional",
    "text_up_to",
    "violation_sql",
]


MAX_VALUE_BYTES = 2**28
_LONG = 200
_STEPS_AT_ONCE = 100_000
_STEPS = 100_000_000
# Virtual machine instructions of SQLite for one query. A file of a million calls takes some 3 per byte. A limit in
# seconds would depend on the load of the machine.
_STEPS_PER_BYTE = 50
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
# From this size on, SQLite looks for the name of a super-journal in a journal.
_MIN_WITH_NAME = 16
# Bytes 18 and 19 of the header of a file with a rollback journal; a file with a write-ahead log has 2 and 2.
_ROLLBACK_MODES = b"\x01\x01"
# A first page with others. SQLite takes no page for the first that does not begin so.
_OTHER_MODES = re.compile(rb"SQLite format 3\0..(?:[^\x01].|.[^\x01])", re.DOTALL)
_N_HEAD = 20

# Kinds of pages that have others below them, bytes of the head of one, and levels of a tree that SQLite follows.
_INNER = (2, 5)
_INNER_HEAD = 12
_MAX_DEPTH = 20

Columns = dict[str, dict[str, str]]
"""Table to column to an SQL condition on its values, ``{0}`` in place of the column."""

TEXT = "typeof({0}) = 'text' and ({0} = '' or is_text({0}))"
INTEGER = "typeof({0}) = 'integer'"
COUNT = f"{INTEGER} and {{0}} >= 0"
NUMBER = "(typeof({0}) in ('integer', 'real') or typeof({0}) = 'text' and {0} = 'nan')"
SIGNED = f"{INTEGER} and {{0}} >= -1"
"""A count, or -1 where there is none."""
SHAPE = "typeof({0}) = 'text' and is_shape({0})"
"""A JSON list of whole numbers."""

# Tokens of SQL, comments and white space apart. Strings and quoted names are tokens: they may contain ``--``.
#
# The rules are those of SQLite: every character beyond ASCII is part of a name, white space too, and NUL ends the text.
# A comment that nothing closes ends with the text: to look for its end from each ``/*`` again would take hours.
_TOKEN = re.compile(
    r"""(?P<skipped>--[^\n\0]*|/\*[^\0]*?(?:\*/|(?=\0)|\Z)|[ \t\n\f\r]+)"""
    r"""|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*(?:\]|\Z)|\w+|.""",
    re.DOTALL | re.ASCII,
)


def optional(condition: str) -> str:
    """The condition holds, or the value is NULL."""
    return f"({{0}} is null or {condition})"


def one_of(*values: str) -> str:
    """The value is one of these texts, none of which has a quotation mark."""
    return f"typeof({{0}}) = 'text' and {{0}} in ({', '.join(repr(str(value)) for value in values)})"


def text_up_to(n: int) -> str:
    """The value is a text of at most so many characters."""
    # SQLite counts the characters before the first NUL; UTF-8 has up to 4 bytes for one.
    return f"{TEXT} and length({{0}}) <= {n} and length(cast({{0}} as blob)) <= {4 * n}"


class _Texts(dict[bytes, str]):
    """Texts of a file: a long one that many rows refer to is one object, not a copy for each row."""

    def __missing__(self, data: bytes) -> str:
        text = data.decode("utf-8")
        if len(data) >= _LONG:
            self[data] = text
        return text


class GuardedConnection(sqlite3.Connection):
    """A connection to an untrusted file: each query is bounded.

    Attributes:
        max_steps: Virtual machine instructions of SQLite that one query may take.
        call_pages: How to read the calls of a large file, once all of them were checked.
    """

    max_steps = _STEPS
    call_pages: CallPages | None = None
    _steps = 0

    def guard(self, n_bytes: int) -> None:
        """Switch on the defences of SQLite against hostile files.

        Args:
            n_bytes: Size of the file.
        """
        self.max_steps = _STEPS + _STEPS_PER_BYTE * n_bytes
        self.set_progress_handler(self._count, _STEPS_AT_ONCE)
        # A damaged record may claim any length, which SQLite would allocate.
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self.create_function("is_shape", 1, _is_shape, deterministic=True)
        self.create_function("is_text", 1, lambda _: True, deterministic=True)  # the call fails for invalid UTF-8
        self.text_factory = _Texts().__getitem__
        for pragma in ("trusted_schema = off", "cell_size_check = on", "mmap_size = 0"):
            super().execute(f"pragma {pragma}")
        if hasattr(self, "setconfig"):  # from Python 3.12 on
            for name in ("DEFENSIVE", "ENABLE_TRIGGER", "ENABLE_FTS3_TOKENIZER"):
                self.setconfig(getattr(sqlite3, f"SQLITE_DBCONFIG_{name}"), name == "DEFENSIVE")

    def execute(self, *args: Any) -> sqlite3.Cursor:
        """Execute a query; the count of its steps starts at 0."""
        self._steps = 0
        return super().execute(*args)

    def _count(self) -> bool:
        """Whether to interrupt the query; SQLite calls this every `_STEPS_AT_ONCE` steps."""
        self._steps += _STEPS_AT_ONCE
        return self._steps > self.max_steps


def _is_shape(value: Any) -> bool:
    return isinstance(value, str) and SIZES.fullmatch(value) is not None


def connect(path: Path, mode: str, timeout_s: float) -> GuardedConnection:
    """Open an existing file.

    Raises:
        sqlite3.Error: The file cannot be opened, or a file next to it would make SQLite touch a third file.
    """
    _check_journals(path)
    # as_uri() escapes '?', '#' and '%', which would end or change the name in a URI.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        timeout=timeout_s,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        factory=GuardedConnection,
    )
    try:
        connection.guard(path.stat().st_size)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_and_recover(path: Path, timeout_s: float) -> tuple[GuardedConnection, int]:
    """Open an existing file to read, and roll back what a killed process left.

    Returns:
        The connection, and the version of the file's schema.

    Raises:
        sqlite3.Error: As `connect`, or the file is damaged.
    """
    mode = "ro"
    while True:
        connection = connect(path, mode, timeout_s)
        try:
            connection.execute("select 1 from sqlite_master").fetchall()
            return connection, int(connection.execute("pragma user_version").fetchone()[0])
        except sqlite3.OperationalError:
            connection.close()
            if mode == "rw":
                raise
            mode = "rw"  # rolling back a journal needs write access
        except BaseException:
            connection.close()
            raise


def _check_journals(path: Path) -> None:
    """Refuse a file whose journal or write-ahead log, which SQLite opens by itself, could touch another file.

    Raises:
        sqlite3.DatabaseError: shadowrun writes no such file.
    """
    path = path.resolve()  # SQLite follows links, and opens the journal next to their target
    # To open a named pipe would block until it has a writer.
    if not path.is_file():
        raise sqlite3.DatabaseError("it is not a regular file")
    with path.open("rb") as file:
        modes = file.read(_N_HEAD)[18:]
    # SQLite would write to a write-ahead log, even through a symbolic link to another file.
    if modes != _ROLLBACK_MODES:
        raise sqlite3.DatabaseError("it wants a write-ahead log, which shadowrun does not make")
    for ending in ("-wal", "-shm"):
        if os.path.lexists(path.with_name(path.name + ending)):
            raise sqlite3.DatabaseError(f"{path.name + ending!r} lies next to it, which shadowrun does not make")
    journal = path.with_name(path.name + "-journal")
    if not os.path.lexists(journal):
        return
    if journal.is_symlink() or (journal.exists() and not journal.is_file()):
        raise sqlite3.DatabaseError(f"its journal {journal.name!r} is not a regular file")
    # A journal that ends in the name of a super-journal makes SQLite delete the file of that name.
    # The recording process may end a transaction, and so delete the journal, at any moment.
    with contextlib.suppress(FileNotFoundError), journal.open("rb", buffering=0) as file:
        n_bytes = file.seek(0, 2)
        file.seek(max(0, n_bytes - len(_JOURNAL_MAGIC)))
        if file.read() == _JOURNAL_MAGIC and n_bytes >= _MIN_WITH_NAME:
            raise sqlite3.DatabaseError(f"its journal {journal.name!r} names another file")
        if _has_other_modes(file):
            raise sqlite3.DatabaseError(f"its journal {journal.name!r} gives it a write-ahead log")


def _has_other_modes(journal: IO[bytes]) -> bool:
    """Whether SQLite could put back a first page of a file with a write-ahead log: it opens that log at once."""
    for start, end in _written(journal):
        # A page may begin at the end of what was written, and go on in a hole.
        journal.seek(max(0, start - _N_HEAD))
        tail = b""
        while chunk := journal.read(min(1 << 20, end + _N_HEAD - journal.tell())):
            if _OTHER_MODES.search(tail + chunk):
                return True
            tail = (tail + chunk)[-(_N_HEAD - 1) :]
    return False


def _written(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Where a file has bytes: a file of terabytes of holes takes no disk space, and hours to read."""
    end, n_bytes = 0, file.seek(0, os.SEEK_END)
    while end < n_bytes:
        try:
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        except (AttributeError, OSError) as error:  # Windows; ENXIO: the rest is a hole
            if getattr(error, "errno", 0) != errno.ENXIO:
                yield end, n_bytes
            return
        yield start, end


def check(connection: sqlite3.Connection, schema: str) -> None:
    """Refuse a file with another schema, corrupt pages, or foreign keys that lead nowhere.

    Raises:
        ValueError: Names the fault.
        sqlite3.Error, UnicodeError: The file cannot be read.
    """
    check_schema(connection, schema)
    _check_depth(connection)
    # Not `quick_check`, which does not compare indices with tables: readers may take a value from an index.
    (found,) = connection.execute("pragma integrity_check(1)").fetchone()
    if found != "ok":
        raise ValueError(" ".join(str(found).split())[:200])
    dangling = connection.execute("pragma foreign_key_check").fetchone()
    if dangling is not None:
        raise ValueError(f"a row of {dangling[0]} refers to a missing row of {dangling[2]}")


def _check_depth(connection: sqlite3.Connection) -> None:
    """Refuse a file with a deeper tree than any of SQLite's.

    `integrity_check` calls itself for each level: a hundred thousand of them end the process.

    Raises:
        ValueError: It has one.
    """
    path = connection.execute("pragma database_list").fetchone()[2]
    if not path:  # a database in memory, which we made
        return
    connection.execute("begin")  # no writer changes it meanwhile
    try:
        roots = connection.execute("select cast(rootpage as integer) from sqlite_master").fetchall()
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as SQLite names it
            level, seen = {root for (root,) in roots}, set[int]()
            size = int.from_bytes(file.read(18)[16:], "big")
            size = 1 << 16 if size == 1 else size  # the format writes 1 for 65,536
            # A page may have as many numbers as half its bytes: of those that no page has, the set had no bound.
            there = range(1, os.fstat(file.fileno()).st_size // max(1, size) + 1)
            for _ in range(_MAX_DEPTH):
                seen |= level
                below = (child for page in level if page in there for child in _pages_below(file, page, size))
                level = {child for child in below if child in there} - seen
    finally:
        connection.execute("commit")
    if level:
        raise ValueError("a tree of its pages is too deep")


def _pages_below(file: IO[bytes], number: int, size: int) -> Iterator[int]:
    """Numbers of the pages below one that there is; any number, since nothing of the file was checked."""
    file.seek((number - 1) * size)
    head = file.read(_INNER_HEAD)
    if len(head) < _INNER_HEAD or head[0] not in _INNER:
        return
    page = head + file.read(size - _INNER_HEAD)
    cells = page[_INNER_HEAD : _INNER_HEAD + 2 * int.from_bytes(head[3:5], "big")]
    for (at,) in struct.iter_unpack(">H", cells[: len(cells) & ~1]):
        yield int.from_bytes(page[at : at + 4], "big")
    yield int.from_bytes(head[8:], "big")


def check_schema(connection: sqlite3.Connection, schema: str) -> None:
    """Refuse a file whose tables, views, indices and triggers are not exactly those that `schema` makes.

    Raises:
        ValueError: Names the object.
        sqlite3.Error, UnicodeError: The file cannot be read.
    """
    # By what SQLite itself makes of our schema: automatic indices need no list here.
    model = sqlite3.connect(":memory:")
    try:
        model.executescript(schema)
        expected = set(_objects(model))
    finally:
        model.close()
    found = list(_objects(connection))
    for kind, name, _, _ in sorted(set(found) - expected):
        raise ValueError(f"it has the {kind} {name!r}, which shadowrun did not make")
    for kind, name, _, _ in sorted(expected - set(found)):
        raise ValueError(f"it lacks the {kind} {name!r}")
    if len(found) != len(expected):
        raise ValueError("a name stands for two tables")


def _objects(connection: sqlite3.Connection) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Kind, name, table and SQL tokens of each object."""
    # The limit bounds memory; no schema has so many objects.
    rows = connection.execute("select type, name, tbl_name, coalesce(sql, '') from sqlite_master limit 1000").fetchall()
    for row in rows:
        kind, name, table, sql = map(str, row)
        yield kind, name, table, tuple(token[0] for token in _TOKEN.finditer(sql) if token["skipped"] is None)


def check_values(connection: sqlite3.Connection, columns: Columns) -> None:
    """Refuse a file in which a value does not have the type or the range of its column.

    Raises:
        ValueError: Names the column.
        sqlite3.Error, UnicodeError: The file cannot be read.
    """
    for table, conditions in columns.items():
        if _holds(connection, table, conditions):
            continue
        # Only a bad table is read again, column by column, to name the column.
        for name, condition in conditions.items():
            if not _holds(connection, table, {name: condition}):
                raise ValueError(f"{table}.{name} has a value that shadowrun does not write")


def _holds(connection: sqlite3.Connection, table: str, conditions: Mapping[str, str]) -> bool:
    """Whether all rows of a table meet the conditions, and all their texts are UTF-8."""
    sql = f"select 1 from {table} where {violation_sql(conditions)} limit 1"  # noqa: S608 - names from `COLUMNS`
    try:
        return connection.execute(sql).fetchone() is None
    except sqlite3.OperationalError as error:
        # `is_text` got bytes that are not UTF-8.
        if "user-defined function" not in str(error):
            raise
        return False


def violation_sql(conditions: Mapping[str, str]) -> str:
    """SQL that is true of a row in which a column violates its condition.

    No condition is ever NULL, so that the first one that fails decides, and the others are not evaluated.
    """
    return f"not ({' and '.join(f'({text.format(name)})' for name, text in conditions.items())})"


# A call number: times `POSITIONS`, it fits 63 bits.
_NUMBERED = f"{COUNT} and {{0}} < {2**63 // POSITIONS}"
_TIME = f"{NUMBER} and {{0}} < 1e300"  # nan is greater
_FIGURE = "(typeof({0}) = 'integer' or typeof({0}) = 'real' and abs({0}) < 1e300)"

# What torch or shadowrun itself names; queries compare it for each row of ``diff``.
_SHORT = text_up_to(1000)

# Annotation of a field of `TensorDiff` to the condition on its column.
_OF_DIFF = {
    "Count": COUNT,
    "UnknownOrCount": SIGNED,
    "UlpDistance": _FIGURE,
    "float": NUMBER,
    "SignedFloat": NUMBER,
    "Excess": optional(NUMBER),
    "str": TEXT,
    "tuple[int, ...]": optional(f"({COUNT} or {SHAPE})"),
}

COLUMNS: Columns = {
    "meta": {"key": one_of("info"), "value": TEXT},
    "source": {"id": COUNT, "file": TEXT, "info": TEXT, "first_seq": _NUMBERED},
    "op": {"name": TEXT},
    "site": {"text": TEXT},
    "form": {"dtype": _SHORT, "shape": SHAPE, "stride": SHAPE, "device": _SHORT, "layout": _SHORT},
    "context": {
        **dict.fromkeys(("inputs", "dtypes", "shapes", "module"), TEXT),
        "device": _SHORT,
        "phase": one_of(*Phase),
    },
    "outcome": {
        "status": one_of(*Status),
        "cause": one_of("", *Cause),
        "explanation": TEXT,
        "missing_kernel": TEXT,
    },
    "verdict": {"evidence": TEXT, "confidence": NUMBER},
    "call": {
        "seq": _NUMBERED,
        "step": COUNT,
        "ref_ns": optional(COUNT),
        "target_ns": optional(COUNT),
        "drift_abs": optional(NUMBER),
        "drift_rel": optional(NUMBER),
    },
    "tensor": {"name": _SHORT, "n_elements": COUNT},
    "diff": {
        "seq": _NUMBERED,
        "position": f"{COUNT} and {{0}} < {POSITIONS}",
        **{name: _OF_DIFF[kind] for name, kind in DIFF_COLUMNS.items()},
    },
    "capture": {"file": TEXT, "bytes": COUNT},
    "api": {"name": TEXT},
    "moment": {
        "seq": _NUMBERED,
        **dict.fromkeys(("began_ns", "ended_ns"), COUNT),
        **dict.fromkeys(("target_at_ns", "ref_at_ns", "judge_at_ns", "judged_ns"), optional(COUNT)),
    },
    "region": {"backend": TEXT, "n_operators": SIGNED, "site": TEXT},
    "skipped": {"device": TEXT, "reason": TEXT, "n": COUNT},
    "folded": {
        **dict.fromkeys(("n", "first_step", "n_ref", "n_target", "n_mismatched", "n_nan", "n_inf"), COUNT),
        **dict.fromkeys(("first_seq", "worst_seq"), _NUMBERED),
        **dict.fromkeys(("ref_us_total", "ref_us_min", "target_us_total", "target_us_min", "severity"), _TIME),
        **dict.fromkeys(("max_abs", "max_rel", "drift_abs", "drift_rel"), NUMBER),
        "max_ulp": _FIGURE,
        "remaining_bits": SIGNED,
    },
    "step": {"source_id": COUNT, "step": COUNT, "started_s": _FIGURE, "wall_s": _FIGURE},
}


def check_datafile_values(connection: sqlite3.Connection, but: Collection[str] = ()) -> None:
    """Refuse a data file of the present schema with values that shadowrun does not write.

    Args:
        connection: To the file.
        but: Tables that were checked already.

    Raises:
        ValueError: Names the fault.
        sqlite3.Error: The file cannot be read.
    """
    check_values(connection, {table: columns for table, columns in COLUMNS.items() if table not in but})
    infos = connection.execute("select value from meta").fetchall()
    if len(infos) != 1:
        raise ValueError("it has no run information")
    decode_info(infos[0][0])
    check_sources(connection)


def check_sources(connection: sqlite3.Connection) -> None:
    """Refuse a combined file whose runs do not have adjacent blocks of call numbers of one length.

    Raises:
        ValueError: Names the fault.
    """
    sources = connection.execute("select id, first_seq, info from source order by id").fetchall()
    if not sources:
        return
    block = sources[1][1] if len(sources) > 1 else 2**63
    for number, (source, first, info) in enumerate(sources):
        decode_info(info)
        if source != number or first != number * block or block <= 0:
            raise ValueError("the numbers of its runs are not in order")
    end = len(sources) * block
    for table, column in (("call", "seq"), ("moment", "seq"), ("folded", "first_seq"), ("folded", "worst_seq")):
        (greatest,) = connection.execute(f"select max({column}) from {table}").fetchone()  # noqa: S608 - names from above
        if greatest is not None and greatest >= end:
            raise ValueError(f"a call of {table} belongs to no run")
