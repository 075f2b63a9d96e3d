"""Root causes as lines of the ledger of known issues, and the ledger's lines that cover root causes.

A line has operator, platform and status, and no cause: one line covers all root causes of an operator that share them.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Final

from shadowrun.settings import fits_operator, fits_platform
from shadowrun.studies.campaign.causes.root_causes import is_compiled
from shadowrun.studies.known_issues_file import PLAIN_NAME, PLAIN_PLATFORM, NewLine
from shadowrun.studies.sweep.cases import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shadowrun.settings import KnownLine
    from shadowrun.studies.campaign.causes.root_causes import RootCause, Signature

__all__ = ["known_causes", "new_lines", "platform_of"]

_STATUS: Final = {
    **dict.fromkeys((Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE), "unsupported"),
    **dict.fromkeys((Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK), "fallback"),
    **dict.fromkeys((Kind.ERROR, Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY), "error"),
    **dict.fromkeys((Kind.MISMATCH, Kind.FORM), "mismatch"),
}


def known_causes(causes: Iterable[RootCause], targets: Sequence[str], lines: Sequence[KnownLine]) -> dict[str, str]:
    """Root causes that a ledger covers on each target that shows them: text of the signature to the reason."""
    found = {}
    for cause in causes:
        shown = (cause.signature, *cause.others)
        reasons = [_reason(s, targets[t], lines) for s in shown for t in cause.targets if 0 <= t < len(targets)]
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
        for form, t in ((form, t) for form in (s, *cause.others) for t in cause.targets):
            # A ledger's lines are of platforms, and it knows nothing of compiled code.
            if t < 0 or is_compiled(targets[t]) or _reason(form, targets[t], lines):
                continue
            if not PLAIN_PLATFORM.fullmatch(platform_of(targets[t])):
                skipped.append((number, "its platform has a name that no platform has"))
                continue
            key = form.op, platform_of(targets[t]), status
            what = ", ".join(filter(None, (form.dtype, form.cause, form.raised)))
            reason = f"{campaign}: root cause {number}{f', {what}' if what else ''}, in {cause.n_variants} variants"
            made.setdefault(key, NewLine(*key, reason))
    return list(made.values()), skipped


def _status(s: Signature) -> str:
    return _STATUS.get(Kind(s.kind), "")


def _no_line(cause: RootCause, status: str) -> str:
    """Why no line can name a root cause; empty if one can."""
    if not cause.signature.op:
        return "it names no operator"
    if not PLAIN_NAME.fullmatch(cause.signature.op):
        return "its operator has a name that no operator has"
    if not status:
        return f"a ledger has no status for {cause.signature.kind}"
    if all(t < 0 for t in cause.targets):
        return "it is of the reference"
    return ""


def platform_of(target: str) -> str:
    """A target as a ledger names it: without flaws and backend."""
    return target.partition(" (")[0].partition(", ")[0]


def _reason(s: Signature, target: str, lines: Sequence[KnownLine]) -> str:
    """The reason of the first line that covers a root cause on a target; empty if none does."""
    today = dt.datetime.now().astimezone().date()
    for line in lines:
        fits = line.kind in ("", _status(s)) and line.module == "*" and bool(s.op)
        valid = line.expires is None or line.expires >= today
        if fits and valid and fits_operator(line.operator, s.op) and fits_platform(line.platform, platform_of(target)):
            return line.reason
    return ""
