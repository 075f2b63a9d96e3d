"""Opening, creating, upgrading and replacing data files, with a `DataFileError` for each fault of a path."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.errors import DataFileError
from shadowrun.store import call_pages, validation
from shadowrun.store.migrations import fill_from, schema_of
from shadowrun.store.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION
from shadowrun.store.validation import GuardedConnection, check_datafile_values

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "SALVAGED",
    "check_folder",
    "check_writable",
    "connect_existing",
    "connect_new",
    "corrupt",
    "move",
    "remove",
    "salvage",
    "unwritable",
    "up_to_date",
    "upgrade",
]

MAGIC = b"SQLite format 3\0"
SALVAGED = "Salvaged from a damaged file"
"""Prefix of the note that says what is missing."""
READ_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 0.1
"""The user's program never waits longer than this for a reader, which holds its lock for milliseconds."""


def connect_new(path: Path | None) -> sqlite3.Connection:
    """Create a data file, or a database in memory; a data file that exists is replaced.

    Raises:
        DataFileError: The folder is missing or not writable, or the file is not a shadowrun data file.
    """
    if path is not None:
        _clear(path)
    connection: sqlite3.Connection | None = None
    try:
        # Threads of the autograd engine record too; DataFile serialises them.
        connection = sqlite3.connect(
            ":memory:" if path is None else f"{path.absolute().as_uri()}?mode=rwc",
            timeout=WRITE_TIMEOUT_S,
            uri=True,  # `attach` takes `?mode=ro` only then
            isolation_level=None,
            check_same_thread=False,
        )
        # A rollback journal and not WAL: one file to copy, also on network file systems. A process
        # killed between two flushes leaves a clean file; killed within one, a journal that the next
        # reader rolls back. Only a power cut needs synchronous writes.
        connection.execute("pragma journal_mode = delete")
        connection.execute("pragma synchronous = off")
        _make_tables(connection)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise unwritable(path, error) from error
    return connection


def _make_tables(connection: sqlite3.Connection) -> None:
    # In one transaction: another process finds the file empty or complete.
    numbers = f"pragma application_id = {APPLICATION_ID}; pragma user_version = {SCHEMA_VERSION};"
    connection.executescript("begin;" + numbers + SCHEMA + "commit;")


def connect_existing(path: Path, *, write: bool = False) -> GuardedConnection:
    """Open an existing data file: for reading, which checks the whole file, or to write to a checked one.

    For an older schema, the connection is to a copy in the present one.

    Raises:
        DataFileError: The file is missing, unreadable, not a shadowrun data file, corrupt, or of a newer schema.
    """
    if write:
        connection = _connect(path, "rw")[0]
        connection.execute("pragma synchronous = off")
        connection.execute(f"pragma busy_timeout = {int(WRITE_TIMEOUT_S * 1000)}")
        return connection
    return _checked(path)


def salvage(path: Path) -> sqlite3.Connection:
    """Open a data file like `connect_existing`; for a damaged file, a database with its readable rows.

    Raises:
        DataFileError: As `connect_existing`, if no row can be read.
    """
    try:
        return _checked(path)
    except DataFileError as error:
        if error.slug != "data-file-corrupt":
            raise
    from shadowrun.store.salvage import salvaged

    try:
        return salvaged(path)
    except (sqlite3.Error, ValueError, OSError) as error:
        raise corrupt(path, error) from error


def _checked(path: Path) -> GuardedConnection:
    """A connection to a validated data file, or to a copy of one of an older schema."""
    connection, version = _connect(path, "ro")
    with _naming(path, connection):
        validation.check(connection, SCHEMA if version == SCHEMA_VERSION else schema_of(version))
        if version < SCHEMA_VERSION:
            connection.close()
            connection = _copy(path, version)
        connection.call_pages = call_pages.find(connection)
        check_datafile_values(connection, but=() if connection.call_pages is None else ("call",))
        connection.execute("pragma query_only = on")
    return connection


@contextlib.contextmanager
def _naming(path: Path, connection: sqlite3.Connection) -> Iterator[None]:
    """Raise an SQLite error of the block as a `DataFileError` on this file, and close the connection."""
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        connection.close()
        raise corrupt(path, error) from error
    except BaseException:
        connection.close()
        raise


def upgrade(path: Path) -> None:
    """Convert a checked data file of an older schema to the present one.

    Raises:
        DataFileError: As `connect_existing`, or the file cannot be written.
    """
    connection, version = _connect(path, "ro")
    connection.close()
    if version >= SCHEMA_VERSION:
        return
    new = path.with_name(path.name + ".part")
    try:
        with contextlib.closing(connect_new(new)) as written:
            fill_from(written, path, version)
        move(new, path)
    except sqlite3.Error as error:
        raise unwritable(path, error) from error
    finally:
        remove(new)


@contextlib.contextmanager
def up_to_date(path: Path) -> Iterator[Path]:
    """A data file of the present schema: `path` itself, or a temporary copy.

    Raises:
        DataFileError: As `connect_existing`.
    """
    connection, version = _connect(path, "ro")
    connection.close()
    if version >= SCHEMA_VERSION:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        with contextlib.closing(connect_new(copy)) as written:
            try:
                fill_from(written, path, version)
            except (sqlite3.DatabaseError, UnicodeError) as error:
                raise corrupt(path, error) from error
        yield copy


def _copy(path: Path, version: int) -> GuardedConnection:
    """A copy in the present schema."""
    # A database without a name is kept in memory; SQLite spills it to a temporary file if it is large.
    connection = sqlite3.connect("", uri=True, isolation_level=None, check_same_thread=False, factory=GuardedConnection)
    try:
        connection.guard(path.stat().st_size)
        _make_tables(connection)
        fill_from(connection, path, version)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path, mode: str) -> tuple[GuardedConnection, int]:
    """A connection to a data file, and its schema version, which this shadowrun can read."""
    if not path.exists():
        raise DataFileError(
            f"There is no data file {str(path)!r}. Record one with `shadowrun run --data FILE script.py` "
            "or compare(..., file=FILE).",
            slug="data-file-missing",
        )
    _check_magic(path)
    connection = _open(path, mode)
    try:
        version = _version(connection, path)
    except sqlite3.OperationalError:
        # A journal left by a killed process can only be rolled back by a connection that may write.
        connection.close()
        connection = _open(path, "rw")
        with _naming(path, connection):
            version = _version(connection, path)
    except BaseException:
        connection.close()
        raise
    if version > SCHEMA_VERSION:
        connection.close()
        raise DataFileError(
            f"{str(path)!r} was written by schema {version}; this shadowrun reads up to {SCHEMA_VERSION}: "
            "upgrade shadowrun.",
            slug="data-file-newer",
        )
    return connection, version


def corrupt(path: Path | None, error: Exception) -> DataFileError:
    """The error for a file with the header of a data file that cannot be read."""
    where = "in memory" if path is None else repr(str(path))
    return DataFileError(
        f"The data file {where} is damaged, or was not written by shadowrun ({error}). "
        "`shadowrun report --salvage` shows what can still be read of it; or record the run again.",
        slug="data-file-corrupt",
    )


def _open(path: Path, mode: str) -> GuardedConnection:
    try:
        return validation.connect(path, mode, READ_TIMEOUT_S)
    except (sqlite3.Error, OSError) as error:
        if mode == "rw":
            raise unwritable(path, error) from error
        raise corrupt(path, error) from error


def _version(connection: sqlite3.Connection, path: Path) -> int:
    try:
        application = connection.execute("pragma application_id").fetchone()[0]
        version = connection.execute("pragma user_version").fetchone()[0]
        # Has SQLite parse the schema: a malformed one is found here, and one of a foreign file is never parsed.
        connection.execute("select 1 from sqlite_master").fetchall() if application == APPLICATION_ID else None
    except sqlite3.OperationalError:
        raise
    except (sqlite3.DatabaseError, UnicodeError) as error:
        raise corrupt(path, error) from error
    if application != APPLICATION_ID:
        raise _not_ours(path)
    return int(version)


def _check_magic(path: Path) -> None:
    """Refuse a file without the header of a data file."""
    if not path.is_file():  # a folder, or a named pipe, on which `open` would block
        raise _not_ours(path)
    try:
        with path.open("rb") as file:
            start = file.read(72)
    except OSError as error:
        raise DataFileError(
            f"Cannot read the data file {str(path)!r}: {error.strerror}.", slug="data-file-unreadable"
        ) from error
    # SQLite's header has the application id at its byte 68.
    if not start.startswith(MAGIC) or start[68:] != APPLICATION_ID.to_bytes(4, "big"):
        raise _not_ours(path)


def check_folder(path: Path, what: str = "data file") -> None:
    """Refuse a file whose folder is missing.

    Raises:
        DataFileError: It is.
    """
    if not path.parent.is_dir():
        raise DataFileError(
            f"Cannot write the {what} {str(path)!r}: there is no folder {str(path.parent)!r}. Create it first.",
            slug="data-file-unwritable",
        )


def check_writable(path: Path) -> None:
    """Refuse what `connect_new` would refuse, without a write.

    Raises:
        DataFileError: The folder is missing, or the file is not a shadowrun data file.
    """
    check_folder(path)
    if not path.exists():
        return
    # In an empty file, nothing can be lost; a device or a pipe has no size.
    if not path.is_file() or path.stat().st_size > 0:
        _check_magic(path)  # only the header: a damaged data file may be replaced


def _clear(path: Path) -> None:
    """Remove a data file of an earlier run; refuse to touch anything else."""
    check_writable(path)
    try:
        remove(path)
    except OSError as error:
        raise unwritable(path, error) from error


def remove(path: Path) -> None:
    """Remove a file and its journal, if they exist.

    Raises:
        OSError: They cannot be removed.
    """
    path.unlink(missing_ok=True)
    path.with_name(path.name + "-journal").unlink(missing_ok=True)


def move(new: Path, path: Path) -> None:
    """Replace a data file by a complete new one.

    Raises:
        DataFileError: The old file cannot be replaced.
    """
    try:
        # SQLite would roll the journal of the old file back into the new one.
        path.with_name(path.name + "-journal").unlink(missing_ok=True)
        new.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error


def _not_ours(path: Path) -> DataFileError:
    return DataFileError(
        f"{str(path)!r} is not a shadowrun data file; it is left as it is. Choose another name.",
        slug="data-file-not-ours",
    )


def unwritable(path: Path | None, error: Exception, what: str = "data file") -> DataFileError:
    """The error for a file that cannot be written."""
    where = "in memory" if path is None else repr(str(path))
    return DataFileError(
        f"Cannot write the {what} {where}: {error}. Choose a folder that you may write to.",
        slug="data-file-unwritable",
    )
