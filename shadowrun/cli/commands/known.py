"""Show the ledger of known issues against a run, or write the findings of a run into it.

Findings that the ledger lists, with a reason, fail no run. --init begins a ledger with all findings of a run: from then
on, only what is new fails. --update adds the findings that no line covers; with --prune it also takes out lines that
expired or whose operator no longer diverges. Comments and all other tables of the file stay.

Examples:
  shadowrun known                                            lines of the ledger, and findings that have none
  shadowrun known --init --reason ticket-12
  shadowrun known nightly.shadowrun --update --prune --expires 2027-03-31
  shadowrun known --update --kinds fallback --dry-run
  shadowrun known --check                                    a hook of pre-commit; needs no run
  shadowrun known -f json                                    the same as the first, for a program

Exit status:
  0  done, or all findings have a line; 1  without --init and --update: a finding has no line, or with --check a line
  has expired; 2  wrong usage
"""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import clip, print_line, sanitize
from shadowrun.settings import KINDS, LEDGER, read_settings

if TYPE_CHECKING:
    import argparse

    from shadowrun.analysis import Finding, LedgerUse
    from shadowrun.report.document import Block, Document
    from shadowrun.run import Run
    from shadowrun.studies.known_issues_file import NewLine

__all__ = ["add_arguments", "run"]

_MODULE: Final = re.compile(r"[A-Za-z0-9_.<>]{1,300}")
FORMAT: Final = 1
_OUTDATED: Final = ("expired", "stale")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, the ledger, and what to write."""
    options.add_data_argument(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--init", action="store_true", help="make a ledger with a line for each finding of the run")
    what.add_argument("--update", action="store_true", help="add a line for each finding that has none")
    what.add_argument("--check", action="store_true", help="only read the ledger: exit with 1 if a line has expired")
    parser.add_argument("--prune", action="store_true", help="with --update: also delete expired and stale lines")
    parser.add_argument(
        "--ledger", metavar="FILE", help=f"ledger to write to, no link (default: the nearest {LEDGER}, or one here)"
    )
    parser.add_argument("--reason", metavar="TEXT", help="the reason of each line (default: the cause, and the date)")
    parser.add_argument(
        "--expires", type=options.iso_date, metavar="DATE", help="the last day of the lines: 2027-01-31"
    )
    parser.add_argument(
        "--kinds",
        type=options.kinds_reader(KINDS),
        default=list(KINDS),
        metavar="KINDS",
        help=f"findings that get a line: {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the lines, and write nothing")
    options.add_output_arguments(parser.add_argument_group("report"))


def run(args: argparse.Namespace) -> int:
    """Show or write the ledger; returns the exit status."""
    if args.prune and not args.update:
        raise UsageError("--prune deletes lines of a ledger that is updated: give --update too.", slug="bad-option")
    if (args.output or args.format) and (args.init or args.update or args.check):
        raise UsageError(
            "--init, --update and --check print no report: remove -o and -f, or run `shadowrun known` once more.",
            slug="bad-option",
        )
    options.check_outputs(args.output)
    if args.check:
        return _check(args.ledger)
    import shadowrun
    from shadowrun.studies.known_issues_file import nearest_ledger

    path = Path(args.ledger) if args.ledger else nearest_ledger()
    known = args.ledger if args.ledger and path.exists() else None if not args.ledger else False
    recorded = shadowrun.load(args.data, known=known)
    findings = [finding for finding in recorded.findings() if finding.kind in args.kinds]
    if args.init or args.update:
        return _write(path, recorded, findings, args)
    options.print_report(_document(recorded.info.target, recorded.known(), findings), args)
    return int(bool(findings))


def _check(ledger: str | None) -> int:
    lines = read_settings(ledger).known
    today = dt.datetime.now().astimezone().date()
    expired = [line for line in lines if line.expires is not None and line.expires < today]
    for line in expired:
        print_line(
            f"{line.origin}: {line.operator} on {line.platform} expired on {line.expires} ({line.reason})", error=True
        )
    print_line(f"{len(lines)} lines, {len(expired)} expired")
    return int(bool(expired))


def _document(target: str, known: LedgerUse, findings: list[Finding]) -> Document:
    """The lines of the ledger with their state in the run, and the findings that have none."""
    from shadowrun.report.document import Column, Document, Fact, Facts, Note, Records, Section, Table

    kind, module, reason = Column("kind"), Column("module"), Column("reason")
    operator, calls = Column("operator", "name"), Column("calls", "number")
    blocks: list[Block] = [
        Facts((Fact("lines", f"{len(known.lines):,}"), Fact("findings without a line", f"{len(findings):,}")))
    ]
    if known.lines:
        state = Column(
            "state", help="Whether the line excuses calls of this run: matched, expired, stale or not exercised."
        )
        where = Column("line", detail=1, help="The file and line of the ledger.")
        columns = operator, kind, module, Column("platform"), state, calls, reason, where
        rows = tuple(
            (
                *(use.line.operator, use.line.kind, use.line.module, use.line.platform, use.state),
                *(f"{use.n_diverging:,}", use.line.reason, use.line.origin),
            )
            for use in sanitize(known.lines)
        )
        blocks.append(Section("Lines of the ledger", (Table(columns, rows),), count=len(rows)))
    if findings:
        open_rows = tuple((f.op, f.kind, f"{f.n_calls:,}") for f in sanitize(findings))
        advice = Note("`shadowrun known --update --reason WHY` adds a line for each.")
        blocks.append(
            Section(
                "Findings without a line", (advice, Table((operator, kind, calls), open_rows)), count=len(open_rows)
            )
        )
    data = {"format": FORMAT, "target": target, "lines": known.lines, "findings_without_line": findings}
    lines = (
        (u.line.operator, u.line.kind, u.line.module, u.line.platform, u.state, u.n_diverging, u.line.reason)
        for u in known.lines
    )
    without = ((f.op, f.kind, ", ".join(f.modules), target, "no line", f.n_calls, "") for f in findings)
    names = ("operator", "kind", "module", "platform", "state", "n_calls", "reason")
    return Document(f"known issues: {target}", tuple(blocks), data, Records(names, (*lines, *without)))


def _write(path: Path, recorded: Run, findings: list[Finding], args: argparse.Namespace) -> int:
    from shadowrun.studies.known_issues_file import add_lines, drop_lines

    uses = recorded.known().lines
    if args.init and uses:
        raise UsageError(
            f"{str(path)!r}: a ledger with {len(uses)} lines applies here already: add to it by --update, or name "
            "another by --ledger.",
            slug="bad-option",
        )
    made, skipped = _new_lines(findings, recorded.info.target, args.reason)
    # Only of this file: another, such as pyproject.toml, may have lines too.
    outdated = [use for use in uses if use.state in _OUTDATED and use.line.origin.startswith(f"{path.name}:")]
    for line in made:
        where = f" in {line.module}" if line.module else ""
        print_line(f"+ {line.operator} on {line.platform}{where}: {line.status} ({line.reason})")
    for finding, why in skipped:
        print_line(f"no line for {finding.op}, {finding.kind}: {why}")
    for use in outdated if args.prune else ():
        print_line(f"- {use.line.operator} on {use.line.platform}: {use.state} ({use.line.reason})")
    n_dropped = len(outdated) if args.prune else 0
    if not args.dry_run:
        # Before lines are added: their numbers must be those that were read.
        n_dropped = drop_lines(path, [use.line.origin for use in outdated]) if n_dropped else 0
        if made:
            add_lines(path, made, args.expires)
    would = "would be " if args.dry_run else ""
    print_line(f"{path}: {len(made)} lines {would}added, {n_dropped} {would}deleted")
    return 0


def _new_lines(
    findings: list[Finding], target: str, reason: str | None
) -> tuple[list[NewLine], list[tuple[Finding, str]]]:
    from shadowrun.studies.known_issues_file import PLAIN_NAME, PLAIN_PLATFORM, NewLine

    made: dict[tuple[str, str, str], NewLine] = {}
    skipped = []
    for finding in findings:
        if not PLAIN_NAME.fullmatch(finding.op):
            # A compiled region is named by its number in the run.
            skipped.append((finding, "it is no operator"))
        elif not PLAIN_PLATFORM.fullmatch(target):
            skipped.append((finding, "its platform has a name that no platform has"))
        else:
            module = _module_pattern(finding)
            made.setdefault(
                (finding.op, finding.kind, module),
                NewLine(finding.op, target, finding.kind, reason or _reason(finding), module),
            )
    # A line for all modules makes those for single ones superfluous.
    everywhere = Counter((line.operator, line.status) for line in made.values() if not line.module)
    lines = [line for line in made.values() if not line.module or not everywhere[line.operator, line.status]]
    return lines, skipped


def _module_pattern(finding: Finding) -> str:
    """``Net.layers.*.attn`` for all modules of a finding; empty if no pattern covers them and little else."""
    # A slow operator is excused by the modules of all its calls, which a finding does not have.
    if finding.kind == "slow" or finding.n_modules > len(finding.modules):
        return ""
    if not finding.modules or not all(map(_MODULE.fullmatch, finding.modules)):
        return ""
    # Numbers of layers: the next model has more of them.
    patterns = {".".join("*" if part.isdecimal() else part for part in m.split(".")) for m in finding.modules}
    return patterns.pop() if len(patterns) == 1 else ""


def _reason(finding: Finding) -> str:
    why = clip(", ".join(filter(None, (str(finding.cause or ""), finding.explanation))), 200)
    return f"{why or finding.kind}; accepted on {dt.datetime.now().astimezone().date()}"
