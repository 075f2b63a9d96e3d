"""A kind of SQLite file such as that of a sweep or of a campaign: how it is made, recognized and checked.

Such a file may come from an untrusted source: it is validated as a whole before anything in it is read.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.errors import DataFileError
from shadowrun.limits import read_head
from shadowrun.store import validation

if TYPE_CHECKING:
    from pathlib import Path

    from shadowrun.store.validation import Columns, GuardedConnection

__all__ = ["FileKind"]

_MAGIC: Final = b"SQLite format 3\0"
_TIMEOUT_S: Final = 5.0  # a reader waits this long for the commit of a running writer
_WRITE_TIMEOUT_S: Final = 60.0  # and a writer for a reader, which may copy a whole store


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file.

    Attributes:
        noun: ``coverage file``.
        slug: Of messages on a file that cannot be used.
        maker: Sentence part on a missing file: which command writes one.
        again: Sentence on a damaged file: what to do.
        application_id: In ``PRAGMA application_id``.
        version: In ``PRAGMA user_version``; raised when an older shadowrun could misread a new file.
        schema: Statements that make its tables.
        columns: Valid values of each column.
    """

    noun: str
    slug: str
    maker: str
    again: str
    application_id: int
    version: int
    schema: str
    columns: Columns

    def is_one(self, path: Path) -> bool:
        """Whether a file is of this kind, by its first bytes."""
        # The header of SQLite: its magic string at byte 0, the application id at byte 68.
        start = read_head(path, 72)
        return start.startswith(_MAGIC) and start[68:] == self.application_id.to_bytes(4, "big")

    def connect_to_write(self, path: Path) -> tuple[sqlite3.Connection, bool]:
        """A connection to a new file, or to a validated one of this kind, and whether it is new.

        Raises:
            DataFileError: It cannot be written, or is of another kind.
        """
        new = not path.exists() or (path.is_file() and path.stat().st_size == 0)  # a device or a pipe has no size
        if not new:
            if path.is_symlink():  # a folder from elsewhere may have one: what it leads to would get our rows
                raise self.unusable(path, "is a link, which is not followed: name the file that it leads to")
            # Checked before anything is written: a file of another program must stay as it is.
            self.connect_to_read(path).close()
        try:
            if new:
                # SQLite would follow a dangling symbolic link and create its target, that of a journal too.
                for ending in ("", "-journal", "-wal", "-shm"):
                    path.with_name(path.name + ending).unlink(missing_ok=True)
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=rwc", timeout=_WRITE_TIMEOUT_S, uri=True, isolation_level=None
            )
            # No write-ahead log: one file is to be copied and sent, and a reader refuses a log.
            connection.execute("pragma journal_mode = delete")
            connection.execute("pragma synchronous = off")  # consistent after a kill; only a power failure needs more
            if new:
                numbers = f"pragma application_id = {self.application_id}; pragma user_version = {self.version};"
                connection.executescript("begin;" + numbers + self.schema + "commit;")
        except (sqlite3.Error, OSError) as error:
            raise self.unusable(path, f"cannot be written: {error}. Choose a folder that you may write to") from error
        return connection, new

    def connect_to_read(self, path: Path) -> GuardedConnection:
        """A read-only connection to a file, after validating all of it, also while it is written.

        Raises:
            DataFileError: Missing, of another kind, damaged, or of a newer shadowrun.
        """
        if not path.exists():
            raise self.unusable(path, f"does not exist. {self.maker}")
        try:
            # SQLite says only "unable to open database file": this error has the reason.
            path.open("rb").close() if path.is_file() else None
        except OSError as error:
            raise self.unusable(path, f"cannot be read: {error.strerror}") from error
        if not self.is_one(path):
            raise self.unusable(path, f"is no {self.noun}, and was not changed. Choose another name")
        try:
            connection, version = validation.connect_and_recover(path, _TIMEOUT_S)
        except (sqlite3.Error, UnicodeError, OSError) as error:
            raise self.damaged(path, error) from error
        if version > self.version:
            connection.close()
            why = f"was written by schema {version}, and this shadowrun reads up to {self.version}: upgrade it"
            raise self.unusable(path, why)
        try:
            validation.check(connection, self.schema)
            validation.check_values(connection, self.columns)
        except (sqlite3.Error, ValueError) as error:
            connection.close()
            raise self.damaged(path, error) from error
        return connection

    def damaged(self, path: Path, error: Exception) -> DataFileError:
        """The error for a file that has the header of this kind and cannot be read."""
        return DataFileError(
            f"The {self.noun} {str(path)!r} is damaged, or was not written by shadowrun ({error}). {self.again}",
            slug="data-file-corrupt",
        )

    def unusable(self, path: Path, why: str) -> DataFileError:
        """The error for a file that cannot be used, with the reason."""
        return DataFileError(f"The {self.noun} {str(path)!r} {why}.", slug=self.slug)
