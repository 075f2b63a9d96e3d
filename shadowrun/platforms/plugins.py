"""Modules that bring a device, which the user names: ``--import torch_vpu``. A data file cannot name one."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["import_inherited", "import_plugins"]

_INHERITED = "SHADOWRUN_IMPORT"
"""Names, separated by commas, for worker processes of a command."""


def import_plugins(modules: Iterable[str], *, inherit: bool = False) -> None:
    """Import modules, also from the working directory, as ``python -m`` does.

    Args:
        modules: Their names.
        inherit: Processes that are started from here import them too, by `import_inherited`.

    Raises:
        UsageError: One cannot be imported.
    """
    names = list(modules)
    here = os.getcwd()  # noqa: PTH109 - an entry of sys.path
    added = here not in sys.path
    if added:
        # Last, so that a file of the working directory shadows no installed module.
        sys.path.append(here)
    try:
        for name in names:
            _import(name)
    finally:
        if added:  # the program that is run later does not see it
            sys.path.remove(here)
    if inherit and names:
        # By the environment, since processes of the command start without its arguments.
        os.environ[_INHERITED] = ",".join(names)


def import_inherited() -> None:
    """In a worker process: import the modules that were named on the command line.

    Raises:
        UsageError: One cannot be imported.
    """
    import_plugins(filter(None, os.environ.get(_INHERITED, "").split(",")))


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    # Its message is complete; a traceback into importlib says no more.
    except ImportError as error:
        raise UsageError(f"--import {name}: {error}.", slug="bad-option") from None
    except Exception as error:
        raise UsageError(f"--import {name}: {type(error).__name__}: {error}.", slug="bad-option") from error
