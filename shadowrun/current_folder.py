"""The current folder of a process that runs calls of a file for a command: a new, empty one.

Compilers that torch starts read files of the current folder, which may be anyone's: gcc links a `libgcc_s.so.1` of it.
In the process of a program nothing changes. Relative names of the user's are from the folder that was left.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["from_folder_of_user", "has_empty_folder", "import_path", "in_empty_folder", "leave_folder"]

_empty = ""
_left = ""


def has_empty_folder(folder: str) -> None:
    """Say that this process belongs to a command, which has made this folder for it and removes it."""
    global _empty  # noqa: PLW0603 - a process has one current folder
    _empty = folder


def leave_folder(folder: str) -> None:
    """Make this empty folder the current one of this process until it ends."""
    global _left  # noqa: PLW0603 - a process has one current folder
    _left = _left or os.getcwd()  # noqa: PTH109 - as `os.chdir` takes it
    os.chdir(folder)


@contextlib.contextmanager
def in_empty_folder() -> Iterator[None]:
    """Inside, the current folder is the one of `has_empty_folder`, if this process has one."""
    global _left  # noqa: PLW0603 - a process has one current folder
    if _left or not _empty:
        yield
        return
    leave_folder(_empty)
    try:
        yield
    finally:
        os.chdir(_left)
        _left = ""


def from_folder_of_user(path: Path) -> Path:
    """The absolute path of a name that the user gave."""
    return Path(_left, path).absolute()


def import_path() -> list[str]:
    """`sys.path` for a process with another current folder, whose empty entry would be that one.

    An entry may be no folder but a name by which a hook of an installed package finds it: such a name stays.
    """
    return [str(from_folder_of_user(Path(p))) if _is_place(p) else p for p in sys.path]


def _is_place(entry: str) -> bool:
    # setuptools' name of an editable package: in the current folder, anyone can have a folder of this name.
    # Not `Path.exists`, which raises where a folder may not be read.
    return not entry.endswith(".__path_hook__") and os.path.exists(from_folder_of_user(Path(entry)))  # noqa: PTH110
