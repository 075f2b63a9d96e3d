"""Cause by hypothesis."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowrun.replay.case import Case
    from shadowrun.replay.finding import Finding
    from shadowrun.replay.oracle import Oracle
    from shadowrun.types import Verdict

__all__ = ["explain"]


def explain(case: Case, findings: list[Finding], oracle: Oracle | None) -> Verdict | None:
    """Find the explanation that reproduces the target."""
    return None
