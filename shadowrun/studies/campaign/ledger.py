"""Root causes as lines of the ledger of known issues, and the ledger's lines that cover root causes.

A line has operator, platform and status, and no cause: one line covers all root causes of an operator that share them.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.report.sanitize import MAX_NAME, clip
from shadowrun.settings import fits_operator, fits_platform, read_settings
from shadowrun.studies.campaign.findings import is_compiled
from shadowrun.studies.sweep.cases import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shadowrun.settings import KnownLine
    from shadowrun.studies.campaign.findings import RootCause, Signature

__all__ = ["NewLine", "add_lines", "known_causes", "new_lines"]

_STATUS: Final = {
    **dict.fromkeys((Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE), "unsupported"),
    **dict.fromkeys((Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK), "fallback"),
    **dict.fromkeys((Kind.ERROR, Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY), "error"),
    **dict.fromkeys((Kind.MISMATCH, Kind.FORM), "mismatch"),
}
_PYPROJECT: Final = "pyproject.toml"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:]{1,200}")
_SPEC: Final = re.compile(r"[A-Za-z0-9_.:]{1,60}(?:\[[A-Za-z0-9_.:]+=[A-Za-z0-9_.:=,+()/ -]{1,140}\])?")
"""The store may come from anyone: a name with ``*`` or ``[a-z]`` would be a pattern that covers others as well."""


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line for the ledger.

    Attributes:
        operator, platform, status, reason: As in `KnownLine`.
    """

    operator: str
    platform: str
    status: str
    reason: str


def known_causes(causes: Iterable[RootCause], targets: Sequence[str], lines: Sequence[KnownLine]) -> dict[str, str]:
    """Root causes that a ledger covers on each target that shows them: text of the signature to the reason."""
    found = {}
    for cause in causes:
        reasons = [_reason(cause.signature, targets[t], lines) for t in cause.targets if 0 <= t < len(targets)]
        if reasons and all(reasons):
            found[str(cause.signature)] = reasons[0]
    return found


def new_lines(
    causes: Iterable[tuple[int, RootCause]], targets: Sequence[str], lines: Sequence[KnownLine], campaign: str
) -> tuple[list[NewLine], list[tuple[int, str]]]:
    """Lines for root causes that a ledger does not cover yet.

    Args:
        causes: With their numbers.
        targets: Of the campaign, as a store has them.
        lines: Of the ledger.
        campaign: Its name, for the reason.

    Returns:
        The lines, and the root causes that no line can name, each with the reason.
    """
    made: dict[tuple[str, str, str], NewLine] = {}
    skipped = []
    for number, cause in causes:
        s = cause.signature
        status = _status(s)
        if why := _no_line(cause, status):
            skipped.append((number, why))
            continue
        for t in cause.targets:
            # A ledger's lines are of platforms, and it knows nothing of compiled code.
            if t < 0 or is_compiled(targets[t]) or _reason(s, targets[t], lines):
                continue
            if not _SPEC.fullmatch(_platform(targets[t])):
                skipped.append((number, "its platform has a name that no platform has"))
                continue
            key = s.op, _platform(targets[t]), status
            what = ", ".join(filter(None, (s.dtype, s.cause, s.raised)))
            reason = f"{campaign}: root cause {number}{f', {what}' if what else ''}, in {cause.n_variants} variants"
            made.setdefault(key, NewLine(*key, reason))
    return list(made.values()), skipped


def add_lines(path: Path, lines: Sequence[NewLine], expires: dt.date | None = None) -> None:
    """Append lines to a ledger, which is checked before it is replaced.

    Args:
        path: The ledger; made if it is missing.
        lines: What to add.
        expires: Their last day.

    Raises:
        UsageError: It cannot be read or written, or is no ledger.
    """
    # The user has put it there: the link stays, and what it leads to is replaced.
    if path.is_symlink():
        path = path.resolve()
    header = "tool.shadowrun.known" if path.name == _PYPROJECT else "known"
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        # Before anything is added: an error in the lines that are there must not be blamed on the new ones.
        if old:
            read_settings(path)
        gap = "" if not old else "\n" if old.endswith("\n") else "\n\n"
        text = old + gap + "\n".join(_toml(line, header, expires) for line in lines)
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
        raise UsageError(
            f"The ledger {str(path)!r} cannot be written ({error}): name another with --ledger.", slug="bad-settings"
        ) from error


def _status(s: Signature) -> str:
    return _STATUS.get(Kind(s.kind), "")


def _no_line(cause: RootCause, status: str) -> str:
    """Why no line can name a root cause; empty if one can."""
    if not cause.signature.op:
        return "it names no operator"
    if not _PLAIN.fullmatch(cause.signature.op):
        return "its operator has a name that no operator has"
    if not status:
        return f"a ledger has no status for {cause.signature.kind}"
    if all(t < 0 for t in cause.targets):
        return "it is of the reference"
    return ""


def _platform(target: str) -> str:
    """A target as a ledger names it: without flaws and backend."""
    return target.partition(" (")[0].partition(", ")[0]


def _reason(s: Signature, target: str, lines: Sequence[KnownLine]) -> str:
    """The reason of the first line that covers a root cause on a target; empty if none does."""
    today = dt.datetime.now().astimezone().date()
    for line in lines:
        fits = line.kind in ("", _status(s)) and line.module == "*" and bool(s.op)
        valid = line.expires is None or line.expires >= today
        if fits and valid and fits_operator(line.operator, s.op) and fits_platform(line.platform, _platform(target)):
            return line.reason
    return ""


def _toml(line: NewLine, header: str, expires: dt.date | None) -> str:
    rows = [f"[[{header}]]"]
    for key, value in (
        ("operator", line.operator),
        ("platform", line.platform),
        ("status", line.status),
        ("reason", line.reason),
    ):
        # On one line without control characters, a text of JSON is one of TOML.
        rows.append(f"{key} = {json.dumps(clip(value, 3 * MAX_NAME), ensure_ascii=False)}")
    if expires is not None:
        rows.append(f"expires = {expires.isoformat()}")
    return "\n".join(rows) + "\n"
