"""The gate: which kinds of findings make a run fail, and the lines that say which operators did."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from shadowrun.report.tame import tame

if TYPE_CHECKING:
    from shadowrun.run import Run

__all__ = ["DEFAULT", "KINDS", "add_gate_argument", "passes"]

KINDS = ("unsupported", "error", "mismatch", "fallback", "slow")
"""As in `shadowrun.analysis`, which cannot be asked without importing torch; a test compares them."""
DEFAULT = "mismatch,unsupported,error"
_SHOWN = 5


def add_gate_argument(parser: argparse.ArgumentParser) -> None:
    """Which findings fail the run."""
    parser.add_argument(
        "--fail-on",
        type=_kinds,
        default=DEFAULT,
        metavar="KINDS",
        help=f"findings that make the exit status 1: {', '.join(KINDS)}, or none (default: %(default)s)",
    )


def passes(run: Run, fail_on: list[str]) -> bool:
    """Whether a run passes; if not, standard error says why, with one line for each kind of finding."""
    if not fail_on:
        return True
    judged = tame(run.gate(fail_on), whole=True)
    if judged.passed:
        return True
    if judged.only_cut_short:  # its traceback stands there
        return False
    print(f"shadowrun: {judged.line}", file=sys.stderr)
    findings = tame(run.findings())
    for kind in fail_on:
        ops = list(dict.fromkeys(finding.op for finding in findings if finding.kind == kind))
        if ops:
            more = f" and {len(ops) - _SHOWN} more" if len(ops) > _SHOWN else ""
            print(f"shadowrun:   {kind}: {', '.join(ops[:_SHOWN])}{more}", file=sys.stderr)
    return False


def _kinds(text: str) -> list[str]:
    kinds = [] if text == "none" else [word.strip() for word in text.split(",")]
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is no kind of finding; use {', '.join(KINDS)}, or none")
    return kinds
