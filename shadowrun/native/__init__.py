"""The C extension: the hot paths of a comparison, each of which exists in Python too.

It is built when the package is installed, if there is a C compiler. Without one, with a build of another version than
this package, or with ``SHADOWRUN_NATIVE=0``, `core` is None and its users fall back to Python: the same results, more
slowly.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["core", "lacks", "state", "why_not"]

# Raise it here and in `module.c` with every change of the interface, so that a stale build is not used.
_VERSION = 34


lacks: list[str] = []
"""Optional parts of torch that the C extension did not find: it calls Python instead."""


def state() -> str:
    """``on``, ``partial`` and what is missing, or ``off`` and why; listed with the versions, for bug reports."""
    if why_not:
        return f"off ({why_not})"
    return f"partial ({'; '.join(lacks)})" if lacks else "on"


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("SHADOWRUN_NATIVE") == "0":
        return None, "SHADOWRUN_NATIVE=0"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        # Its functions rely on the GIL, and Python would switch that on for the whole program.
        return None, "this Python runs without its global lock"
    try:
        built = importlib.import_module("shadowrun.native._core")
    except ModuleNotFoundError:
        return None, "not built"
    except Exception as error:
        reason = str(error).rpartition("/")[2]  # without the folder: files with this text travel
        return None, f"does not load: {reason}"
    if built.VERSION != _VERSION:
        return None, f"built for another version of shadowrun ({built.VERSION}, not {_VERSION}): install it again"
    return built, ""


core, why_not = _load()
