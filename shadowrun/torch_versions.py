"""The tested versions of torch, and the check for the private names of torch that shadowrun uses.

A module that uses private names of torch checks them at its import: `need` refuses a torch without the name, before the
program starts. `optional` has a fallback, for a name without which only time or a feature is lost.
"""

from __future__ import annotations

import importlib
import re
import warnings
from typing import Any

import torch

import shadowrun
from shadowrun import native
from shadowrun.errors import PlatformError, ShadowrunWarning

__all__ = ["NEWEST", "OLDEST", "need", "optional", "switched_off", "untested", "warn_of_untested"]

OLDEST, NEWEST = "2.11", "2.15"
"""Oldest and newest minor version that `nox -s torch` was run with; it was run with all between them."""

_ABSENT = object()
_off: dict[str, str] = {}  # filled at the import of modules, read when the warning is due
_warned = False


def find(path: str) -> Any:
    """The object of a dotted name such as ``torch._C._len_torch_dispatch_stack``.

    Raises:
        AttributeError: This torch has no such name.
    """
    top, *names = path.split(".")
    found: Any = importlib.import_module(top)
    for i, name in enumerate(names, 2):
        # A sentinel: torch has attributes that are None.
        if (inner := getattr(found, name, _ABSENT)) is _ABSENT:
            try:  # a submodule is an attribute of its package only once it is imported
                inner = importlib.import_module(".".join([top, *names][:i]))
            except ImportError:
                raise AttributeError(path) from None
        found = inner
    return found


def need(*paths: str) -> None:
    """Refuse a torch that lacks one of these names.

    Raises:
        PlatformError: A name is missing.
    """
    missing = []  # all of them: one message, not one for each attempt
    for path in paths:
        try:
            find(path)
        except AttributeError:
            missing.append(path)
    if missing:
        raise PlatformError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which shadowrun cannot do without. shadowrun "
            f"{shadowrun.__version__} was tested with torch {OLDEST} to {NEWEST}: install one of these.",
            slug="torch-lacks",
        )


def optional(path: str, fallback: Any, without: str) -> Any:
    """The object of a dotted name, or a fallback if this torch lacks the name.

    Args:
        path: The name.
        fallback: Returned if the name is missing.
        without: What is switched off then, in words for the user.
    """
    try:
        return find(path)
    except AttributeError:
        _off[path] = without
        return fallback


def switched_off() -> list[str]:
    """Features that are switched off since this torch lacks a name; of the modules that were imported so far."""
    return [f"{without} (no {path})" for path, without in _off.items()] + list(native.lacks)


def untested() -> str:
    """The warning for an untested version of torch; empty for a tested one."""
    version = str(torch.__version__)
    if _minor(version) in range(_minor(OLDEST), _minor(NEWEST) + 1):
        return ""
    off = "; ".join(switched_off())
    return (
        f"shadowrun {shadowrun.__version__} was tested with torch {OLDEST} to {NEWEST}, and this is torch {version}. "
        + (f"Switched off, since this torch lacks it: {off}." if off else "It has all that shadowrun uses.")
    )


def warn_of_untested(stacklevel: int) -> None:
    """Warn about an untested version of torch, once in a process."""
    global _warned  # noqa: PLW0603 - one in the process
    text = "" if _warned else untested()
    if text:
        _warned = True
        warnings.warn(text, ShadowrunWarning, stacklevel=stacklevel + 1)  # one more for this function


def _minor(version: str) -> int:
    """Version as a sortable number: 2015 for ``2.15.0+cpu``; 0 if it cannot be parsed."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return int(found[1]) * 1000 + int(found[2]) if found else 0
