"""The compiled part: what a profile says costs most in Python, in C, and nothing that Python could not do instead.

It is built where the package is installed, if there is a C compiler. Where there was none, where it is of another
version than this package, or where ``SHADOWRUN_NATIVE=0`` says so, `core` is None and every user of it goes its way
in Python: with the same results, more slowly.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["core", "why_not"]

_VERSION = 1
"""To be raised here and in `core.c` with every change of what it offers: a stale build must not be used."""


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("SHADOWRUN_NATIVE", "1") == "0":
        return None, "SHADOWRUN_NATIVE=0"
    try:
        from shadowrun.native import _core
    except ImportError as error:
        return None, f"not built: {error}"
    if _core.VERSION != _VERSION:
        return None, f"built for another version of this package ({_core.VERSION}, not {_VERSION}): install it again"
    return _core, ""


core, why_not = _load()
