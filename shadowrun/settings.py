"""Settings files of a project: tolerances, and the ledger of known issues.

Both are in ``pyproject.toml`` under ``[tool.shadowrun]``, or in ``shadowrun.toml`` without that prefix. The nearest
file of each name is read, from the working directory upward; a ``pyproject.toml`` counts only if it has the table.
`docs/howto/tolerance.md` and `docs/howto/known.md` describe the format.
"""

from __future__ import annotations

import datetime as dt
import difflib
import os
import re
import sys
import warnings
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.errors import ShadowrunWarning, UsageError, brief
from shadowrun.limits import read_head, read_toml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

__all__ = [
    "DATA_FILE",
    "FAIL_ON",
    "KINDS",
    "LEDGER",
    "NEW",
    "WORSE",
    "KnownLine",
    "Settings",
    "ToleranceRule",
    "fits_operator",
    "fits_platform",
    "known_lines",
    "read_settings",
    "tolerance_rules",
    "upward",
]

DATA_FILE = ".shadowrun"
"""The data file of a run, where none is named."""

KINDS = ("unsupported", "error", "mismatch", "fallback", "slow")
"""Kinds of findings, the most actionable first."""

# Not fallback and slow: they cost time, and the results are right.
FAIL_ON = ("unsupported", "error", "mismatch")
"""Kinds that fail a run by default."""

NEW, WORSE = "new", "worse"
"""In the place of kinds: findings that a baseline does not have, or has in a lesser degree."""

# A pattern of a million brackets took `fnmatch` hours.
_MAX_PATTERN = 1000
# Bytes of a file of another user that are searched for our name.
_MAX_HEAD = 1 << 20
LEDGER = "shadowrun.toml"
_PYPROJECT, _OWN = "pyproject.toml", LEDGER
# Settings in a platform's name: ``[threads=1]`` is no set of characters.
_SETTINGS = re.compile(r"\[[^\[\]*?]+=[^\[\]*?]*\]\Z")
# torch's names of the dtypes for which a tolerance has a meaning, and the short names in reports.
_SHORT = {
    "float16": "f16", "half": "f16", "bfloat16": "bf16", "float32": "f32", "float": "f32", "float64": "f64",
    "double": "f64", "complex32": "c32", "complex64": "c64", "complex128": "c128", "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2", "float8_e4m3fnuz": "f8e4m3fnuz", "float8_e5m2fnuz": "f8e5m2fnuz",
    "float8_e8m0fnu": "f8e8m0fnu",
}  # fmt: skip
# tomllib gives no line numbers, and a ledger's messages need them.
_KNOWN_HEADER = re.compile(r"^[ \t]*\[\[\s*(?:tool\s*\.\s*shadowrun\s*\.\s*)?known\s*\]\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ToleranceRule:
    """Tolerances for the results of some operators, as in `torch.testing.assert_close`.

    Attributes:
        operator: Glob pattern: ``aten::mm*``; namespace and overload may be left out.
        rtol, atol: ``|actual - expected| <= atol + rtol * |expected|`` passes.
        dtype: Dtype of the result: a name as in reports (``bf16``), or a glob pattern.
        platform: Target: a spec, a device type, or a glob pattern.
        origin: Name of the file that has the rule; ``compare()`` for an argument.
    """

    operator: str
    rtol: float
    atol: float
    dtype: str = "*"
    platform: str = "*"
    origin: str = ""

    def __str__(self) -> str:
        """``aten::mm* f32 on npu*: rtol 0.001, atol 0 (pyproject.toml)``."""
        return (
            f"{self.operator} {self.dtype} on {self.platform}: rtol {self.rtol:g}, atol {self.atol:g} ({self.origin})"
        )


@dataclass(frozen=True, slots=True)
class KnownLine:
    """A known issue: one ``[[known]]`` of a ledger.

    Attributes:
        operator: Glob pattern, as in a `ToleranceRule`.
        platform: Target, as in a `ToleranceRule`.
        reason: Why it needs no further work.
        kind: Kind of finding that is excused; empty for all.
        module: Glob pattern of module paths.
        expires: The last day on which it is valid; None for no limit.
        origin: File and line.
    """

    operator: str
    platform: str
    reason: str
    kind: str = ""
    module: str = "*"
    expires: dt.date | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """Contents of settings files: rules in order (the last that matches decides), lines of the ledger, the files.

    `run` has options of `shadowrun run`, by their names.
    """

    tolerance: tuple[ToleranceRule, ...] = ()
    known: tuple[KnownLine, ...] = ()
    files: tuple[Path, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)


def fits_operator(pattern: str, op: str) -> bool:
    """Whether a glob pattern matches the name of an operator, with or without its namespace and overload."""
    short, base = op.partition("::")[2], op.rsplit(".", 1)[0]
    return any(fnmatchcase(name, pattern) for name in (op, short, base, base.partition("::")[2]))


def fits_platform(pattern: str, platform: str) -> bool:
    """Whether a pattern names a platform: by its spec, its device type, or a glob pattern (``npu*``)."""
    # A spec such as cpu[threads=1] would be a set of characters if it were only read as a glob.
    is_named = pattern in (platform, re.split(r"[:\[]", platform)[0])
    return is_named or (not _SETTINGS.search(pattern) and fnmatchcase(platform, pattern))


def read_settings(where: str | PathLike[str] | bool | None = None, start: Path | None = None) -> Settings:
    """Read the settings that apply.

    Args:
        where: A file to read; False for none; None to look upward from `start`.
        start: Folder to start from; the working directory by default.

    Raises:
        UsageError: The file is missing, is not TOML, or has an invalid key or value.
    """
    if where is False:
        return Settings()
    if where is None:
        paths = _nearest(start or Path.cwd())
    # A bool is accepted since False is; True is no path.
    elif where is True:
        raise UsageError("settings=True and known=True have no meaning: use a file, None or False.", slug="bad-option")
    else:
        paths = [Path(where)]
    rules: list[ToleranceRule] = []
    lines: list[KnownLine] = []
    run: dict[str, Any] = {}
    # An unknown key is an error: a misspelt table would be a tolerance that is silently not used.
    for path in paths:
        text, table = _table(path)
        for key in table:
            _check_key(key, ("tolerance", "known", "run"), str(path))
        if not isinstance(options := table.get("run", {}), dict):
            raise _invalid(str(path), "run", options, 'use a table of options, such as target = "npu"')
        run |= options
        rules += tolerance_rules(table.get("tolerance", {}), str(path))
        lines += known_lines(table.get("known", []), text, path)
    return Settings(tuple(rules), tuple(lines), tuple(paths), run)


def tolerance_rules(table: Any, origin: str) -> list[ToleranceRule]:
    """Rules from ``{operator: {rtol, atol, dtype, platform} or a list of such}``.

    Raises:
        UsageError: A key or value is invalid.
    """
    if not isinstance(table, dict):
        raise _invalid(origin, "tolerance", table, 'use a table such as "aten::mm*" = {rtol = 1e-3, atol = 1e-5}')
    rules = []
    for operator, value in table.items():
        # A list has the rules of one operator for several dtypes or platforms: TOML allows no key twice.
        for entry in value if isinstance(value, list | tuple) else (value,):
            where = f"{origin}, tolerance of {brief(operator)}"
            if not isinstance(entry, dict):
                raise _invalid(where, "value", entry, "use {rtol = 1e-3, atol = 1e-5}, or a list of such")
            for key in entry:
                _check_key(key, ("rtol", "atol", "dtype", "platform"), where)
            rules.append(
                ToleranceRule(
                    _pattern(str(operator), "operator", where),
                    _number(entry, "rtol", where),
                    _number(entry, "atol", where),
                    _dtype(_pattern(_text(entry, "dtype", where, "*"), "dtype", where), where),
                    _pattern(_text(entry, "platform", where, "*"), "platform", where),
                    Path(origin).name,  # printed in reports, which must not contain paths of this machine
                )
            )
    return rules


def known_lines(tables: Any, text: str, path: Path) -> list[KnownLine]:
    """Lines of a ledger: the tables ``[[known]]`` of a TOML file.

    Args:
        tables: Its tables.
        text: All of it.
        path: Its path.

    Raises:
        UsageError: A key or value is invalid.
    """
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _invalid(str(path), "known", tables, "begin each line of the ledger with [[known]]")
    headers = [text.count("\n", 0, found.start()) + 1 for found in _KNOWN_HEADER.finditer(text)]
    lines = []
    for number, table in enumerate(tables):
        # Tables in one array (`known = [{...}]`) have no header: these are named by number.
        place = f":{headers[number]}" if len(headers) == len(tables) else f", known {number + 1}"
        at = f"{path}{place}"
        for key in table:
            _check_key(key, ("operator", "platform", "reason", "status", "module", "expires"), at)
        kind = _text(table, "status", at, "")
        if kind and kind not in KINDS:
            raise _invalid(at, "status", kind, f"use one of {', '.join(KINDS)}, or leave it out")
        lines.append(
            KnownLine(
                operator=_pattern(_text(table, "operator", at), "operator", at),
                platform=_pattern(_text(table, "platform", at), "platform", at),
                reason=_text(table, "reason", at),
                kind=kind,
                module=_pattern(_text(table, "module", at, "*"), "module", at),
                expires=_date(table.get("expires"), at),
                origin=f"{path.name}{place}",  # without the folder: reports are passed on
            )
        )
    return lines


def _nearest(start: Path) -> list[Path]:
    """``pyproject.toml`` with the table, then ``shadowrun.toml``: its rules come last, and so decide."""
    # A pyproject.toml without the table is passed over: a subproject may be in a project that has one.
    with_table = (path for path in upward(_PYPROJECT, start) if _table(path)[1])
    return [path for path in (next(with_table, None), next(upward(_OWN, start), None)) if path is not None]


def upward(name: str, start: Path) -> Iterator[Path]:
    """Files of a name in a folder and above it, but none that another user has put there.

    Args:
        name: Of the file.
        start: The folder.
    """
    for path in (folder / name for folder in (start, *start.parents)):
        try:
            if not path.is_file():
                continue
            if _belongs_here(path, start):
                yield path
            # Any project may have a `pyproject.toml`: a word on it only where it may be about us.
            elif b"shadowrun" in name.encode() + read_head(path, _MAX_HEAD):
                warnings.warn(
                    f"{brief(str(path))} is not read: another user has put it there, and settings can start programs. "
                    "If you trust it, name it (--settings FILE, settings=FILE, --ledger FILE).",
                    ShadowrunWarning,
                    stacklevel=2,
                )
        except OSError:  # a folder above may be unreadable: it cannot have settings for us
            continue


def _belongs_here(path: Path, start: Path) -> bool:
    """Whether a file, and the link to it, are the user's own, the system's, or of the owner of a folder."""
    # In a container, a project often belongs to another user than the process, and all of it to one.
    owners = {0, start.stat().st_uid, os.geteuid() if hasattr(os, "geteuid") else 0}
    return {path.lstat().st_uid, path.stat().st_uid} <= owners


def _table(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Text of a file, and its table of shadowrun."""
    try:
        text, table = read_toml(path)
    except OSError as error:
        raise UsageError(
            f"The settings {str(path)!r} cannot be read ({error.strerror}): give an existing file, or none.",
            slug="settings-missing",
        ) from error
    except (ValueError, RecursionError) as error:  # of TOML, or of UTF-8; or nested too deeply
        raise UsageError(
            f"{str(path)!r} is not TOML: {error}. Correct it, or read no settings (settings=False, --no-settings).",
            slug="bad-settings",
        ) from error
    if path.name == _PYPROJECT:
        tool = table.get("tool", {})
        table = tool.get("shadowrun", {}) if isinstance(tool, dict) else {}
        if not isinstance(table, dict):
            raise _invalid(str(path), "tool.shadowrun", table, "use a table")
    return text, table


def _invalid(where: str, key: str, value: Any, use: str) -> UsageError:
    return UsageError(f"{where}: {key} = {brief(value)}: {use}.", slug="bad-settings")


def _check_key(key: str, known: tuple[str, ...], where: str) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{where}: unknown key {brief(key)}.{hint} Keys: {', '.join(known)}.", slug="bad-settings")


def _text(table: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = table.get(key, default)
    if value is None:
        raise UsageError(f"{where}: {key!r} is missing: every entry needs it.", slug="bad-settings")
    if not isinstance(value, str) or (key in table and not value.strip()):
        # An empty reason or pattern is a slip: the first explains nothing, the second matches nothing.
        raise _invalid(where, key, value, "use a text that is not empty")
    return value


def _pattern(value: str, key: str, where: str) -> str:
    # Python takes hours to translate a megabyte of "[".
    # A pattern of a million brackets took `fnmatch` hours.
    if len(value) > _MAX_PATTERN:
        raise _invalid(where, key, value, f"use a pattern of at most {_MAX_PATTERN} characters")
    return value


def _number(table: Mapping[str, Any], key: str, where: str) -> float:
    if key not in table:
        raise UsageError(
            f"{where}: {key!r} is missing: give rtol and atol together, as in torch.testing.assert_close.",
            slug="bad-settings",
        )
    value = table[key]
    # True is an int: `rtol = true` must not become 1.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not converted: TOML has whole numbers that no float can hold.
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise _invalid(where, key, value, "use a finite number >= 0")
    return float(value)


def _dtype(name: str, where: str) -> str:
    plain = name.removeprefix("torch.")
    if plain in _SHORT or plain in _SHORT.values() or any(char in plain for char in "*?["):
        return _SHORT.get(plain, plain)
    near = difflib.get_close_matches(plain, [*_SHORT.values(), *_SHORT], 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise _invalid(where, "dtype", name, f"{hint}use a floating-point or complex dtype such as f32, bf16, c64")


def _date(value: Any, where: str) -> dt.date | None:
    # Before `date`, of which it is a subclass: a datetime cannot be compared with a day.
    if isinstance(value, dt.datetime):
        return value.date()
    if value is None or isinstance(value, dt.date):
        return value
    try:
        return dt.date.fromisoformat(value)
    except (TypeError, ValueError):
        raise _invalid(where, "expires", value, "use a date such as 2027-01-31") from None
