"""Compare sweeps: support of operators on each platform or over releases, or the changes between two sweeps.

The command reads the coverage files that `shadowrun sweep` writes, and runs no operator of the target.

Examples:
  shadowrun support                                          the last sweep again
  shadowrun support npu.shadowcov cuda.shadowcov             two platforms in one table
  shadowrun support *.shadowcov -o coverage.html             a page with a filter
  shadowrun support --diff old.shadowcov new.shadowcov --fail-on regressed -o junit.xml
  shadowrun support --trend 1.0.shadowcov 1.1.shadowcov 2.0.shadowcov -o trend.html
  shadowrun support npu.shadowcov --fail-under 95 --badge badge.svg
  shadowrun support --join shard-*.shadowcov --fail-on mismatch,crash -o junit.xml
  shadowrun support npu.shadowcov --write opinfo:skips.py --write backend-yaml:npu.yaml

Exit status:
  0 passed; 1 a platform is under --fail-under, or --fail-on found something; 2 wrong usage
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.analysis.wording import plural
from shadowrun.cli import options
from shadowrun.cli.studies.sweep import FILE, KINDS, count_failures, failing_kinds
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    import argparse

    from shadowrun.report.document import Document
    from shadowrun.report.issues import Issues
    from shadowrun.studies.sweep.reports.support import Sweep

__all__ = ["add_arguments", "run"]

_REGRESSED = "regressed"
# Values of `shadowrun.studies.sweep.reports.exports.LISTS`; a test compares them.
_LISTS = ("opinfo", "backend-yaml", "accuracy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Coverage files, the output, and gates."""
    parser.add_argument("files", nargs="*", default=[FILE], metavar="FILE", help=f"coverage files (default: {FILE})")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--diff", action="store_true", help="report what changed from the first of two files to the second"
    )
    how.add_argument(
        "--trend", action="store_true", help="report the releases of one platform, the oldest first: gained, lost"
    )
    how.add_argument(
        "--join", action="store_true", help="read the files as one sweep: those of the shards of a workflow"
    )
    options.add_output_arguments(parser, findings=True)
    parser.add_argument(
        "--badge",
        metavar="FILE",
        help="also write a badge of the last file: .svg, or .json for the endpoint of shields.io",
    )
    parser.add_argument(
        "--write",
        action="append",
        default=[],
        metavar="LIST:FILE",
        help=f"also write a list for other tests: {', '.join(_LISTS)} (of one file, or with --join; may be repeated)",
    )
    options.add_known_arguments(parser)
    parser.add_argument(
        "--fail-under",
        type=float,
        metavar="N",
        help="exit with 1 below N percent of a platform's operators (of the last file with --diff and --trend)",
    )
    parser.add_argument(
        "--fail-on",
        type=options.kinds_reader((*KINDS, _REGRESSED)),
        default=[],
        metavar="KINDS",
        help=f"exit with 1 on failures: {', '.join(KINDS)}; with --diff and --trend: {_REGRESSED}",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    from shadowrun.studies.sweep.reports.support import joined, read_sweeps

    _check(args)
    paths = [Path(file) for file in args.files]
    sweeps = [joined(paths)] if args.join else read_sweeps(paths)
    make = _diff if args.diff else _trend if args.trend else _table
    document, failures = make(args, sweeps)
    _write_files(args, sweeps[-1])
    options.print_report(document, args)
    # A gate of a comparison is on the newer release: the older one cannot be mended.
    later = sweeps[-1:] if args.diff or args.trend else sweeps
    if args.fail_under is not None:
        failures += [
            f"{s.label}: {s.percent_full:.1f} % of the operators are full, under {args.fail_under:g} %"
            for s in later
            if s.percent_full < args.fail_under
        ]
    for failure in failures:
        print_line(f"shadowrun: FAILED: {failure}", error=True)
    return int(bool(failures))


def _diff(args: argparse.Namespace, sweeps: list[Sweep]) -> tuple[Document, list[str]]:
    from shadowrun.studies.sweep.reports.issues import changes_issues
    from shadowrun.studies.sweep.reports.report import changes_document
    from shadowrun.studies.sweep.reports.support import Changes

    changes = Changes.between(*sweeps)
    issues = changes_issues(changes, args.fail_on, Path(args.files[-1]).name)
    n = sum(issue.level == "error" for issue in issues.rows)
    return changes_document(changes, issues), [f"{n} {_REGRESSED}"] if n else []


def _trend(args: argparse.Namespace, sweeps: list[Sweep]) -> tuple[Document, list[str]]:
    from shadowrun.studies.sweep.reports.issues import changes_issues
    from shadowrun.studies.sweep.reports.support import Changes
    from shadowrun.studies.sweep.reports.trend import Trend, trend_document

    names = [Path(file).name.removesuffix(".shadowcov") for file in args.files]
    trend = Trend.from_sweeps(list(zip(names, sweeps, strict=True)))
    issues = None
    if len(sweeps) > 1:
        # The last two alone: what a release lost long ago is no news in the job of today's.
        issues = changes_issues(Changes.between(*sweeps[-2:]), args.fail_on, Path(args.files[-1]).name)
    lost = trend.releases[-1].lost if _REGRESSED in args.fail_on else ()
    failures = [f"{names[-1]} lost {plural(len(lost), 'operator')}: {', '.join(lost[:5])}"] if lost else []
    return trend_document(trend, issues), failures


def _table(args: argparse.Namespace, sweeps: list[Sweep]) -> tuple[Document, list[str]]:
    from shadowrun.report.issues import Issues
    from shadowrun.studies.sweep.reports.issues import sweep_issues
    from shadowrun.studies.sweep.reports.report import support_document
    from shadowrun.studies.sweep.reports.support import Platforms

    every: list[Issues] = []
    failures = []
    for file, sweep in zip(args.files, sweeps, strict=False):
        ledger = options.known_issues_on(sweep.info.target.partition(" ")[0], args)
        every.append(sweep_issues(sweep.table, sweep.info, failing_kinds(args.fail_on), Path(file).name, ledger))
        if found := count_failures(sweep.table, args.fail_on, ledger):
            failures.append(f"{sweep.label}: cases that count against the target: {found} (--fail-on)")
    issues = every[0] if len(every) == 1 else Issues(
        ", ".join(s.label for s in sweeps),
        tuple(row for issues in every for row in issues.rows),
        tuple(f"{name} on {issues.suite}" for issues in every for name in issues.passed),
        every[0].file,
    )  # fmt: skip
    return support_document(Platforms.from_sweeps(sweeps), issues), failures


def _write_files(args: argparse.Namespace, sweep: Sweep) -> None:
    from shadowrun import report
    from shadowrun.studies.sweep.reports.exports import export
    from shadowrun.studies.sweep.reports.trend import badge_json, badge_svg

    if args.badge:
        make = badge_json if args.badge.endswith(".json") else badge_svg
        report.save(make(sweep), Path(args.badge))
    for text in args.write:
        name, _, path = text.partition(":")
        report.save(export(name, sweep), Path(path))
        print_line(f"{name}: {path}", error=True)


def _check(args: argparse.Namespace) -> None:
    if args.diff and len(args.files) != 2:
        raise UsageError(
            f"--diff compares two coverage files, not {len(args.files)}: name the old and the new one.",
            slug="bad-option",
        )
    options.check_outputs(args.output)
    # Ignored, it would be a gate that never fails.
    compares = args.diff or args.trend
    wrong = [kind for kind in args.fail_on if (kind == _REGRESSED) != compares]
    if wrong:
        use = f"with --diff and --trend, use {_REGRESSED}" if compares else "it needs --diff or --trend"
        raise UsageError(f"--fail-on {wrong[0]}: {use}.", slug="bad-option")
    if args.badge and Path(args.badge).suffix not in (".svg", ".json"):
        raise UsageError(f"--badge {args.badge!r}: use a file that ends in .svg or .json.", slug="bad-option")
    for text in args.write:
        name, _, path = text.partition(":")
        if name not in _LISTS or not path:
            raise UsageError(f"--write {text!r}: use LIST:FILE, with a list of {', '.join(_LISTS)}.", slug="bad-option")
    if args.write and len(args.files) > 1 and not args.join:
        raise UsageError(
            f"--write takes one sweep, and there are {len(args.files)} files: name one, or --join those of shards.",
            slug="bad-option",
        )
