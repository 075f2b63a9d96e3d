"""One process to a data file: who records claims the name, and who comes second takes another.

The claim is a lock of the operating system on an empty file beside the data file, so that it ends with its process,
however that ends. (Not on the data file itself: on a network file system that would keep its readers out.)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # Windows: names are not claimed there
    fcntl = None

__all__ = ["Claim"]

_ATTEMPTS = 100
_given_up: set[Path] = set()
"""What the process that this one was forked from has written, or still writes."""
_written: set[Path] = set()


class Claim:
    """The right to write a data file.

    Attributes:
        path: The file; another than the one wanted where that is taken.
        wanted: The one that was wanted.
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
        """Whether another process has the name that was wanted."""
        return self.path != self.wanted

    @property
    def held(self) -> bool:
        """Whether the claim has not been released."""
        return self._held

    def release(self) -> None:
        """Give the name free, keeping the file."""
        self._held = False
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self._pid == os.getpid():  # else the lock is that of the process that this one was forked from
            self._file.unlink(missing_ok=True)
        os.close(descriptor)

    def renew(self) -> None:
        """Claim the file again after a release; where another process has taken it meanwhile, nothing is done."""
        if not self._held:
            self._held = True
            self._lock()

    @property
    def _file(self) -> Path:
        return self.path.with_name(self.path.name + "-lock")

    def _lock(self) -> bool:
        """Whether nobody else has the lock; True also where the file system has none."""
        if fcntl is None:
            return True
        for _ in range(_ATTEMPTS):
            try:
                descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            except OSError:  # the data file's own error will say what is wrong with the folder
                return True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), self._file.stat()):
                    self._descriptor = descriptor
                    return True
            except BlockingIOError:
                os.close(descriptor)
                return False
            except FileNotFoundError:  # its owner removed it between our two calls: once more
                pass
            except OSError:
                os.close(descriptor)
                return True
            os.close(descriptor)
        return False


def _begin_child() -> None:
    _given_up.update(_written)
    _written.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
