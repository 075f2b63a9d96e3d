"""Strings from the user's program, made safe to print: short, on one line, without control characters."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

from shadowrun.report.words import clip

__all__ = ["tame"]

MAX_NAME = 120
_NAMES = frozenset({"op", "ops", "kernel", "missing_kernels", "missing_kernel"})

T = TypeVar("T")


def tame(value: T) -> T:
    """A copy of a value, of dataclasses and tuples all the way down, with its strings clipped."""
    copy: T = _tame(value, None)
    return copy


def _tame(value: Any, field: str | None) -> Any:
    if isinstance(value, enum.Enum):
        return value
    if isinstance(value, str):
        return clip(value, MAX_NAME) if field in _NAMES else clip(value)
    if isinstance(value, tuple):
        return tuple(_tame(item, field) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: _tame(getattr(value, f.name), f.name) for f in dataclasses.fields(value)}
        )
    return value
