"""`FileLock`: only one process writes a data file; a second process gets another file name.

The lock is `flock` on an empty file next to the data file, so that the operating system releases it when the process
ends, even by ``kill -9``. It is not on the data file itself: on a network file system, that would lock out readers.
"""

from __future__ import annotations

import errno
import importlib
import os
from typing import TYPE_CHECKING, Any

from shadowrun.errors import DataFileError

if TYPE_CHECKING:
    from pathlib import Path

try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # Windows: names are not claimed there
    fcntl = None

__all__ = ["FileLock"]

# What `open` says of a link and of a folder.
_NO_FILE = (errno.ELOOP, errno.EISDIR)
# Each owner may unlink the file once between `open` and `stat`: as many as that in a row are no race any more.
_ATTEMPTS = 100
# Files of the parent process: a forked child must not write them, even after the parent released them.
_given_up: set[Path] = set()
_written: set[Path] = set()


class FileLock:
    """The exclusive right to write a data file.

    Raises:
        DataFileError: The lock is a link, a folder or a file that may not be opened: two processes would write the
            data file.

    Attributes:
        path: The file to write: `wanted`, or a name with the process id if another process has `wanted`.
        wanted: The file that was asked for.
    """

    def __init__(self, wanted: Path) -> None:
        self.wanted = wanted
        self.path = wanted
        self._descriptor = -1
        self._held = True
        self._pid = os.getpid()
        if wanted.absolute() in _given_up or not self._lock():
            self.path = wanted.with_name(f"{wanted.stem}.pid{self._pid}{wanted.suffix}")
            self._lock()
        _written.add(self.path.absolute())

    @property
    def contested(self) -> bool:
        """Whether another process has `wanted`."""
        return self.path != self.wanted

    @property
    def held(self) -> bool:
        """Whether the lock has not been released."""
        return self._held

    def release(self) -> None:
        """Release the lock; the data file stays."""
        self._held = False
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self._pid == os.getpid():  # a forked child shares the descriptor, but the lock belongs to its parent
            self._file.unlink(missing_ok=True)
        os.close(descriptor)

    def renew(self) -> None:
        """Take the lock again after a release, unless another process has taken it since."""
        if not self._held:
            self._held = True
            self._lock()

    @property
    def _file(self) -> Path:
        return self.path.with_name(self.path.name + "-lock")

    def _lock(self) -> bool:
        """Try to take the lock; also True if the file system has no locks."""
        if fcntl is None:
            return True
        for _ in range(_ATTEMPTS):
            try:
                # Not through a link that another user put there: it would create a file elsewhere.
                descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            except OSError as error:
                if error.errno in _NO_FILE or self._is_closed(error):
                    raise self._unusable(error) from error
                return True  # to open the data file in this folder fails too, with a clear error
            try:
                # Not `lockf`: its locks belong to the process, and closing any descriptor of the file would release
                # them.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The owner unlinks the file when it releases the lock: a lock on an unlinked file excludes no process.
                if os.path.samestat(os.fstat(descriptor), self._file.stat()):
                    self._descriptor = descriptor
                    return True
            except BlockingIOError:
                os.close(descriptor)
                return False
            except FileNotFoundError:  # the owner unlinked it between `open` and `stat`: try again
                pass
            except OSError:  # no `flock` on this file system
                os.close(descriptor)
                return True
            os.close(descriptor)
        return False

    def _is_closed(self, error: OSError) -> bool:
        """Whether the lock alone may not be opened, so that two processes would write the file."""
        return error.errno == errno.EACCES and self._file.exists() and os.access(self._file.parent, os.W_OK)

    def _unusable(self, error: OSError) -> DataFileError:
        others = {errno.EISDIR: "a folder", errno.EACCES: "a file that you may not open"}
        what = others.get(error.errno or 0, "a link, which is not followed")
        return DataFileError(
            f"Cannot write the data file {str(self.path)!r}: its lock {self._file.name!r} is {what}. Remove it.",
            slug="data-file-unwritable",
        )


def _begin_child() -> None:
    _given_up.update(_written)
    _written.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
