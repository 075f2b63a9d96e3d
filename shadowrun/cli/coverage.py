"""Tell how many of the operators that a run called the target has.

Views and other operators that compute nothing are not counted, lest they flatter the figure.
--fail-under looks at operators, not calls: one missing operator stops a program however rarely it is called.

Examples:
  shadowrun coverage
  shadowrun coverage nightly.shadowrun --fail-under 95
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]

MAX_MODULES = 20
MAX_NAMES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file and a bound."""
    options.add_data_argument(parser)
    options.add_import_argument(parser)
    parser.add_argument("--fail-under", type=float, metavar="N", help="exit with 1 below N percent of the operators")


def run(args: argparse.Namespace) -> int:
    """Print the coverage; returns the exit status."""
    import shadowrun
    from shadowrun.analysis.gate import cut_short
    from shadowrun.analysis.words import command
    from shadowrun.report.tame import tame

    recorded = shadowrun.load(args.data)
    coverage, info = tame(recorded.coverage()), tame(recorded.info)
    supported = coverage.n_by_state["supported"]
    print(f"target {info.target}, reference {info.ref}: the program {coverage.verdict}")
    print(f"operators  {_share(supported, coverage.n_operators, coverage.percent_operators)}")
    print(f"calls      {_share(coverage.n_supported_calls, coverage.n_calls, coverage.percent_calls)}")
    for state, n in coverage.n_by_state.items():
        if n and state != "supported":
            print(f"\n{state} ({n}):")
            for operator in coverage.operators:
                if operator.state == state:
                    kernels = [k for k in operator.missing_kernels if k != operator.op]
                    missing = f"  lacks {', '.join(kernels)}" if kernels else ""
                    print(f"  {operator.n_calls:>7} x  {operator.op}{missing}")
    if coverage.missing_kernels:
        print("\nkernels to write, those that most calls wait for first:")
        for kernel in coverage.missing_kernels:
            print(f"  {kernel.n_calls:>7} x  {kernel.kernel}  {_places(kernel.modules)}".rstrip())
    lacking = [m for m in coverage.modules if m.lacking]
    if lacking:
        n = len(coverage.modules)
        print(f"\nmodules that lack something ({len(lacking)} of {n}):")
        for module in lacking[:MAX_MODULES]:
            percent = 100 * module.n_supported_calls / module.n_calls
            name = module.module or "(outside of modules)"
            print(f"  {percent:>5.1f} % of {module.n_calls} calls  {name}  {_places(module.lacking)}")
        if len(lacking) > MAX_MODULES:
            everything = command("export", Path(args.data), "-f", "json")
            print(f"  … and {len(lacking) - MAX_MODULES} more: `{everything}` has all")
    if coverage.fallback_share:
        print(f"\ntime on the target that went into fallbacks: {100 * coverage.fallback_share:.2g} %")
    n_skipped = sum(skipped.n for skipped in coverage.skipped)
    print(f"\nnot counted: {n_skipped} calls of views and other operators that compute nothing to compare")
    if args.fail_under is not None and not coverage.n_operators:
        print("shadowrun: FAILED: no operator was compared, so nothing is known of the coverage", file=sys.stderr)
        return 1
    if args.fail_under is not None and cut_short(info.raised):
        print(f"shadowrun: FAILED: the program ended with {info.raised}: this is a part of it", file=sys.stderr)
        return 1
    if args.fail_under is not None and coverage.percent_operators < args.fail_under:
        share = f"{coverage.percent_operators:.1f} %"
        print(f"shadowrun: FAILED: operator coverage {share} is under {args.fail_under:g} %", file=sys.stderr)
        return 1
    return 0


def _places(names: tuple[str, ...]) -> str:
    more = f", … {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _share(n: int, total: int, percent: float) -> str:
    return f"{n} of {total} ({percent:.1f} %)"
