"""`--map FILE`: names of one recording under which the other knows them, and rows that correspond.

::

    [modules]                        # path in the second recording = path in the first
    "layers.*.attn" = "h.*.attention"

    [[rows]]                         # results, row by row: needs `rows=` when recording
    module = "lm_head"               # glob pattern, in the first recording's names; default: all
    op = "aten::*mm*"                # glob pattern; default: all
    second_module = "logits"         # in the second recording, under its new names; default: as `module`
    second_op = "aten::linear"       # default: as `op`
    phase = "forward"                # default: forward
    skip = [0, 4]                    # rows to leave out at the start of the first and of the second
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowrun.errors import UsageError, brief
from shadowrun.limits import read_toml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["NameMap", "RowRule", "read_names"]


@dataclass(frozen=True, slots=True)
class RowRule:
    """Which rows of results correspond: those of the calls that fit, one after the other in each module, on each side.

    Attributes:
        module, op: Glob patterns in the first recording.
        second_module, second_op: In the second; empty for the same.
        phase: Of the calls.
        skip: Rows to leave out at the start of each module on each side.
    """

    module: str = "*"
    op: str = "*"
    second_module: str = ""
    second_op: str = ""
    phase: str = "forward"
    skip: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class NameMap:
    """What a map says.

    Attributes:
        modules: Glob patterns of paths in the second recording to paths in the first.
        rows: Rules for rows.
    """

    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: tuple[RowRule, ...] = ()


def read_names(path: Path) -> NameMap:
    """Read a map.

    Raises:
        UsageError: It cannot be read, or has an entry that it cannot have.
    """
    try:
        whole = read_toml(path)[1]
    # ValueError: also a number of thousands of digits. RecursionError: a list of lists without end.
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"The map {str(path)!r} cannot be read: {error}.", slug="bad-map") from error
    unknown = sorted(whole.keys() - {"modules", "rows"})
    if unknown:
        raise _wrong(path, f"has no table [{unknown[0]}]: use [modules] and [[rows]]")
    modules, rows = whole.get("modules", {}), whole.get("rows", [])
    if not isinstance(modules, dict) or not all(isinstance(name, str) for name in modules.values()):
        raise _wrong(path, '[modules] takes lines such as "layers.*.attn" = "h.*.attention"')
    for pattern, name in modules.items():
        # Fewer are allowed: a name may drop a part of the path.
        if name.count("*") > pattern.count("*"):
            raise _wrong(path, f"{brief(pattern)} = {brief(name)}: the name has more stars than the pattern")
    if not isinstance(rows, list):
        raise _wrong(path, "write [[rows]], with two brackets: there may be several")
    return NameMap(modules, tuple(_rule(path, row) for row in rows))


def _rule(path: Path, row: Any) -> RowRule:
    names = [field.name for field in dataclasses.fields(RowRule)]
    unknown = sorted(set(row) - set(names)) if isinstance(row, dict) else ["…"]
    if unknown:
        raise _wrong(path, f"[[rows]] has no entry {unknown[0]!r}: use {', '.join(names)}")
    skip = row.get("skip", [0, 0])
    fits = isinstance(skip, list) and len(skip) == 2 and all(type(n) is int and n >= 0 for n in skip)
    if not fits:
        raise _wrong(path, f"skip = {brief(skip)}: use two numbers of rows, such as [0, 4]")
    for name, value in row.items():
        if name != "skip" and not isinstance(value, str):
            raise _wrong(path, f"{name} = {brief(value)}: use a text")
    return RowRule(**{**row, "skip": tuple(skip)})


def _wrong(path: Path, why: str) -> UsageError:
    return UsageError(f"The map {str(path)!r} {why}." if why.startswith("has") else f"The map {str(path)!r}: {why}.",
                      slug="bad-map")  # fmt: skip
