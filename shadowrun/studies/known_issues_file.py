"""Writes the ledger of known issues: adds lines, takes out those that are out of date, keeps all else as it is."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.report.sanitize import MAX_NAME, clip
from shadowrun.settings import LEDGER, read_settings, upward
from shadowrun.store.atomic_write import check_replaceable

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Collection, Sequence

__all__ = ["PLAIN_NAME", "PLAIN_PLATFORM", "NewLine", "add_lines", "drop_lines", "nearest_ledger"]

_PYPROJECT: Final = "pyproject.toml"
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:]{1,200}")
"""Names that are no pattern: a file may come from anyone, and ``*`` in a name would excuse others as well."""
PLAIN_PLATFORM: Final = re.compile(r"[A-Za-z0-9_.:]{1,60}(?:\[[A-Za-z0-9_.:]+=[A-Za-z0-9_.:=,+()/ -]{1,140}\])?")
"""Platforms that are no pattern: without ``=``, what is in brackets is a set of characters."""
_TABLE: Final = re.compile(r"^[ \t]*\[")


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line for the ledger.

    Attributes:
        operator, platform, status, reason, module: As in `KnownLine`.
    """

    operator: str
    platform: str
    status: str
    reason: str
    module: str = ""


def nearest_ledger() -> Path:
    """The nearest ``shadowrun.toml`` from the working directory upward, or one to make here."""
    return next(upward(LEDGER, Path.cwd()), Path(LEDGER))


def add_lines(path: Path, lines: Sequence[NewLine], expires: dt.date | None = None) -> None:
    """Append lines to a ledger, which is checked before it is replaced.

    Args:
        path: The ledger; made if it is missing.
        lines: What to add.
        expires: Their last day.

    Raises:
        UsageError: It cannot be read or written, or is no ledger.
    """
    header = "tool.shadowrun.known" if path.name == _PYPROJECT else "known"
    old = _read(path)
    gap = "" if not old else "\n" if old.endswith("\n") else "\n\n"
    _write(path, old + gap + "\n".join(_toml(line, header, expires) for line in lines))


def drop_lines(path: Path, origins: Collection[str]) -> int:
    """Take lines out of a ledger, with the comments inside of them.

    Args:
        path: The ledger.
        origins: Of the lines, as in `KnownLine`: ``shadowrun.toml:12``.

    Returns:
        How many were taken out: none of those in an array of one line, which have no number.

    Raises:
        UsageError: As `add_lines`.
    """
    rows = _read(path).splitlines(keepends=True)
    starts = {int(origin.rpartition(":")[2]) - 1 for origin in origins if origin.rpartition(":")[2].isdecimal()}
    kept, n, inside = list[str](), 0, False
    remarks: list[str] = []
    for number, row in enumerate(rows):
        is_table = _TABLE.match(row) is not None
        if is_table or number in starts:
            # Comments right before a table are of that table.
            kept += remarks
            remarks, inside = [], number in starts
            n += inside
        if not inside:
            kept.append(row)
        elif row.lstrip().startswith("#"):
            remarks.append(row)
        else:
            remarks = []
    kept += remarks
    if n:
        _write(path, "".join(kept).rstrip("\n") + "\n" if any(map(str.strip, kept)) else "")
    return n


def _read(path: Path) -> str:
    if path.is_symlink():  # a folder from elsewhere may have one: the ledger of another project would get our lines
        raise UsageError(
            f"The ledger {clip(repr(str(path)), MAX_NAME)} is a link, which is not followed: name the file that it "
            "leads to with --ledger, or remove it.",
            slug="bad-settings",
        )
    try:
        check_replaceable(path)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeError) as error:
        raise _unwritable(path, error) from error
    if text:
        read_settings(path)
    return text


def _write(path: Path, text: str) -> None:
    try:
        # Under its own name: whether the table has a prefix depends on it.
        with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.write_text(text, encoding="utf-8")
            read_settings(new)  # what is written can be read
            if path.exists():
                # A new file has the rights of this process's mask.
                new.chmod(path.stat().st_mode)
            new.replace(path)
    except (OSError, UnicodeError) as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"The ledger {str(path)!r} cannot be written ({error}): name another with --ledger.", slug="bad-settings"
    )


def _toml(line: NewLine, header: str, expires: dt.date | None) -> str:
    rows = [f"[[{header}]]"]
    for key, value in (
        ("operator", line.operator),
        ("platform", line.platform),
        ("status", line.status),
        *((("module", line.module),) if line.module else ()),
        ("reason", line.reason),
    ):
        # On one line without control characters, a text of JSON is one of TOML.
        rows.append(f"{key} = {json.dumps(clip(value, 3 * MAX_NAME), ensure_ascii=False)}")
    if expires is not None:
        rows.append(f"expires = {expires.isoformat()}")
    return "\n".join(rows) + "\n"
