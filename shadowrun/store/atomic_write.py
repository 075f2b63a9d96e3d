"""Files that are whole or as before, and are written where their name says: never through a link.

A folder from an untrusted source may have a link, a pipe or a folder in the place of a file that we write, also under
the name that it has until it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import IO, TYPE_CHECKING

from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["atomic_write", "check_replaceable", "refuse_links", "write_text"]


def check_replaceable(path: Path) -> None:
    """Refuse to replace what is no file: root would take `/dev/null` from the whole machine, or a pipe from its reader.

    Raises:
        OSError: It is a device, a pipe or a link to one, or in a folder of the system's.
    """
    folder = os.path.realpath(path.parent)
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    # `/dev/stdout` is a link to what may be a file.
    if is_special or folder == "/dev" or folder.startswith(("/dev/fd", "/proc/")):
        raise OSError(errno.EINVAL, "it is no regular file, and is not replaced", str(path))


def refuse_links(*folders: Path) -> None:
    """Refuse to write into folders that are links: a folder from elsewhere may come with one, which leads anywhere.

    Raises:
        UsageError: One is.
    """
    for folder in folders:
        if folder.is_symlink():
            raise UsageError(
                f"{str(folder)!r} is a link, which is not followed: remove it, or choose another folder.",
                slug="bad-option",
            )


@contextlib.contextmanager
def atomic_write(path: Path, mode: int = 0o666, *, shared: bool = False) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` at the end of the block; a link there is replaced.

    Args:
        path: The file.
        mode: Permissions, of which the umask is taken away.
        shared: Other processes may write the same file now; what a killed one leaves is then not replaced later.

    Raises:
        OSError: It cannot be written.
    """
    if not path.name:  # `.` and `/`, which have no file beside them
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    check_replaceable(path)
    # In the same folder: `replace` is atomic only within a file system.
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part" if shared else f"{path.name}.part")
    part.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)  # it fails if a link appears in between
    descriptor = os.open(part, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Write a text as `atomic_write` does; lone surrogates, which are no UTF-8, are replaced.

    Raises:
        OSError: It cannot be written.
    """
    with atomic_write(path, shared=shared) as file:
        file.write(text.replace("\n", os.linesep).encode("utf-8", "replace"))
