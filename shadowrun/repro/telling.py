"""What a script says of itself: the finding, where it was seen, with which versions."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowrun.analysis import Finding
    from shadowrun.repro.places import Place
    from shadowrun.types import OpRecord, RunInfo

__all__ = ["story", "title", "versions"]


def title(finding: Finding, target: Place) -> str:
    """The finding in one line."""
    what = {
        "mismatch": "is wrong",
        "unsupported": "is not supported",
        "error": "raises",
        "fallback": "runs on the CPU",
        "slow": "is slow",
    }[finding.kind]
    why = ", ".join(filter(None, (str(finding.cause or ""), finding.explanation)))
    return f"{finding.op} {what} on {target.name}: {why}." if why else f"{finding.op} {what} on {target.name}."


def story(info: RunInfo, finding: Finding, record: OpRecord, before: str, now: str) -> list[str]:
    """The lines below it.

    Args:
        info: The run.
        finding: What is shown.
        record: The call that it is shown on.
        before: The inputs in the run, in words.
        now: Those of the script.
    """
    call = record.call
    where = ", ".join(filter(None, (f"call {call.seq}", call.module, str(call.phase), call.site)))
    known = ", ".join(f"{name} {version}" for name, version in info.versions.items() if version)
    lines = [f"Seen by shadowrun in {where}.", f"Versions: {known}."]
    if finding.evidence:
        lines.append(f"Evidence: {finding.evidence}.")
    lines.append(f"Inputs: {now}." if now == before else f"Inputs: {now}; in the run {before}.")
    return [*lines, "", "Exit status: 1 while the fault is there, 0 when it is gone, 2 if it cannot be told here."]


def versions(info: RunInfo) -> str:
    """The file of versions, JSON."""
    content = {
        "versions": info.versions,
        "target": info.target_fingerprint or {"platform": info.target},
        "reference": info.ref_fingerprint or {"platform": info.ref},
    }
    with contextlib.suppress(ValueError):
        return json.dumps(content, indent=1, allow_nan=False) + "\n"
    return "{}\n"
