"""Report how many of the operators that a run called the target supports.

Views and other operators that compute nothing are not counted, since they would raise the percentage.
--fail-under uses the percentage of operators, not of calls: one missing operator stops a program, even if it is rare.

Examples:
  shadowrun coverage
  shadowrun coverage nightly.shadowrun --fail-under 95
  shadowrun coverage -f md
  shadowrun coverage --api      (by function of torch; of a run with --api)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, a gate and the output."""
    options.add_data_argument(parser)
    options.add_output_arguments(parser)
    parser.add_argument(
        "--api",
        action="store_true",
        help="by function and module of torch that the program called: full, partial or none; --fail-under then means "
        "the percentage that is full",
    )
    parser.add_argument("--fail-under", type=float, metavar="N", help="exit with 1 below N percent of the operators")


def run(args: argparse.Namespace) -> int:
    """Print the coverage; returns the exit status."""
    options.check_outputs(args.output)
    import shadowrun
    from shadowrun.analysis.gate import ended_by_exception
    from shadowrun.report.coverage_report import api_document, coverage_document
    from shadowrun.report.sanitize import clip, print_line

    recorded = shadowrun.load(args.data)
    coverage, info = recorded.coverage(), recorded.info
    what, percent = "operator", coverage.percent_operators
    if args.api:
        by_function = recorded.api_coverage()
        what, percent = "function", by_function.percent("full")
        options.print_report(api_document(by_function, info), args)
    else:
        options.print_report(coverage_document(coverage, info), args)
    if args.fail_under is None:
        return 0
    problem = ""
    # A run without operators, or of a part of the program, must not pass a gate with 100 %.
    if not coverage.n_operators:
        problem = "no operator was compared: the coverage is unknown"
    elif ended_by_exception(info.raised):
        problem = f"the program ended with {clip(info.raised)}: this is the coverage of a part of it"
    elif percent < args.fail_under:
        problem = f"{what} coverage {percent:.1f} % is under {args.fail_under:g} %"
    if problem:
        print_line(f"shadowrun: FAILED: {problem}", error=True)
    return int(bool(problem))
