"""Modules that bring a device: what the user names by ``--import torch_vpu``, and what torch starts itself.

A data file cannot name one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from shadowrun.errors import PlatformError, UsageError, brief

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

__all__ = ["autoloaded", "entry_points", "failed_autoload", "import_inherited", "import_plugins", "inherited"]

# Names, separated by spaces: of the user, and for worker processes of a command.
_INHERITED = "SHADOWRUN_IMPORT"


_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_AUTOLOAD_FAILED = "Failed to load the backend extension"


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Entry points of the installed packages, read again where `sys.path` or a folder in it has changed."""
    return _read_entry_points(group, tuple((path, _version(path)) for path in sys.path))


@functools.lru_cache(maxsize=16)
def _read_entry_points(group: str, _path: object) -> tuple[EntryPoint, ...]:
    # Opens a file of each package: 11 ms with 145 of them, and each comparison asks five times.
    return tuple(importlib.metadata.entry_points(group=group))


def _version(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path or ".")  # noqa: PTH116 - for each comparison
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def autoloaded() -> tuple[list[str], bool]:
    """Packages that ask torch to start them when it is imported, and whether torch does."""
    names = sorted({entry.name for entry in entry_points("torch.backends")})
    return names, os.environ.get(_AUTOLOAD, "1") == "1"


def failed_autoload(error: BaseException) -> PlatformError | None:
    """What an exception of ``import torch`` means, if it comes from a package that torch starts; None if not."""
    if not isinstance(error, RuntimeError) or not str(error).startswith(_AUTOLOAD_FAILED):
        return None
    name = str(error).removeprefix(_AUTOLOAD_FAILED).partition(".")[0].strip(": ")
    why = error.__cause__ or error
    return PlatformError(
        f"The package {name!r}, which torch starts when it is imported, failed: {type(why).__name__}: "
        f"{brief(str(why))}. Mend or remove it, or set {_AUTOLOAD}=0: then torch starts no package.",
        slug="bad-plugin",
    )


def import_plugins(modules: Iterable[str], *, inherit: bool = False) -> None:
    """Import modules, also from the working directory, as ``python -m`` does.

    Args:
        modules: Their names; a function may follow, ``module:function``, which says that a file may name it.
        inherit: Processes that are started from here import them too, by `import_inherited`.

    Raises:
        UsageError: One cannot be imported.
    """
    words = list(modules)
    here = os.getcwd()  # noqa: PTH109 - an entry of sys.path
    for name in (word.partition(":")[0] for word in words):
        # Not for an installed one: what it imports if it is there, and torch's extensions, could be a file of this
        # folder, which may be anyone's.
        added = here not in sys.path and not _is_installed(name)
        if added:
            # Last, so that a file of the working directory shadows no installed module.
            sys.path.append(here)
        try:
            _import(name)
        finally:
            if added:  # the program that is run later does not see it
                sys.path.remove(here)
    if inherit and words:
        # By the environment, since processes of the command start without its arguments.
        os.environ[_INHERITED] = " ".join(words)


def _is_installed(name: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):  # no name of a module, of which the import says more
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    return False


def inherited() -> list[str]:
    """Modules that the environment names."""
    return os.environ.get(_INHERITED, "").replace(",", " ").split()


def import_inherited() -> None:
    """In a worker process: import the modules that were named on the command line.

    Raises:
        UsageError: One cannot be imported.
    """
    import_plugins(inherited())


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    # Its message is complete; a traceback into importlib says no more.
    except ImportError as error:
        raise UsageError(f"--import {name}: {error}.", slug="bad-option") from None
    except Exception as error:
        raise UsageError(f"--import {name}: {type(error).__name__}: {error}.", slug="bad-option") from error
