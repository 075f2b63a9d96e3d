"""Which versions of torch the tests passed with, and what becomes of a torch that lacks a private name.

Each module that uses private names of torch asks for those it cannot do without when it is imported (`need`): a torch
without one is refused before the program starts. What only costs time or a feature is asked for singly (`optional`).
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
"""The minor versions that `nox -s torch` was run with; all between them were."""

_ABSENT = object()
_off: dict[str, str] = {}
_warned = False


def find(path: str) -> Any:
    """What a dotted name such as ``torch._C._len_torch_dispatch_stack`` stands for.

    Raises:
        AttributeError: This torch has no such name.
    """
    top, *names = path.split(".")
    found: Any = importlib.import_module(top)
    for i, name in enumerate(names, 2):
        if (inner := getattr(found, name, _ABSENT)) is _ABSENT:
            try:
                inner = importlib.import_module(".".join([top, *names][:i]))
            except ImportError:
                raise AttributeError(path) from None
        found = inner
    return found


def need(*paths: str) -> None:
    """Refuse a torch that lacks one of these names.

    Raises:
        PlatformError: It does.
    """
    missing = []
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


def optional(path: str, otherwise: Any, without: str) -> Any:
    """What a name stands for, or something else where this torch has no such name.

    Args:
        path: The name.
        otherwise: What to take instead.
        without: What is switched off then; words for the user.
    """
    try:
        return find(path)
    except AttributeError:
        _off[path] = without
        return otherwise


def switched_off() -> list[str]:
    """What this torch lacks, in words, of what shadowrun's parts that were imported by now could use."""
    return [f"{without} (no {path})" for path, without in _off.items()] + list(native.lacks)


def untested() -> str:
    """What is to be said of a torch that is none of those that were tested; empty for others."""
    version = str(torch.__version__)
    if _minor(version) in range(_minor(OLDEST), _minor(NEWEST) + 1):
        return ""
    off = "; ".join(switched_off())
    return (
        f"shadowrun {shadowrun.__version__} was tested with torch {OLDEST} to {NEWEST}, and this is torch {version}. "
        + (f"Switched off, since this torch lacks it: {off}." if off else "It has all that shadowrun uses.")
    )


def warn_of_untested(stacklevel: int) -> None:
    """Say so, once in a process."""
    global _warned  # noqa: PLW0603 - one in the process
    text = "" if _warned else untested()
    if text:
        _warned = True
        warnings.warn(text, ShadowrunWarning, stacklevel=stacklevel + 1)


def _minor(version: str) -> int:
    """Versions in order: 2015 for ``2.15.0+cpu``; 0 where there is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return int(found[1]) * 1000 + int(found[2]) if found else 0
