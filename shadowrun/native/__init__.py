"""The compiled part: what a profile says costs most in Python, in C, and nothing that Python could not do instead.

It is built where the package is installed, if there is a C compiler. Where there was none, where it is of another
version than this package, or where ``SHADOWRUN_NATIVE=0`` says so, `core` is None and every user of it goes its way
in Python: with the same results, more slowly.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["core", "lacks", "state", "why_not"]

_VERSION = 16
"""To be raised here and in `core.c` with every change of what it offers: a stale build must not be used."""


lacks: list[str] = []
"""What of torch the compiled part looked for and did not find: it asks Python instead, or leaves calls to it."""


def state() -> str:
    """``on``, ``partial`` and what is not used, or ``off`` and why: told with the versions, for reports of bugs."""
    if why_not:
        return f"off ({why_not})"
    return f"partial ({'; '.join(lacks)})" if lacks else "on"


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("SHADOWRUN_NATIVE") == "0":
        return None, "SHADOWRUN_NATIVE=0"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        # Its functions count on the interpreter's lock, and Python would switch that on for the whole program.
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
