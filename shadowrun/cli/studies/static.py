"""List the operators that a device lacks by torch's kernel tables, without the device.

The operators are those of a recorded run, or with --all those of ATen. The tables have no dtypes, and do not show
whether the kernels that a generic operator calls exist: they are a first look, and `shadowrun run` decides.

States: kernel (registered for the device), composite and generic (decomposed into other operators), fallback (the
backend's fallback, mostly to the CPU), absent, unknown (the device's kernels are in a package that is not imported),
specific (an operator for one kind of device only).

Examples:
  shadowrun static mps                      the operators of the last run that MPS lacks
  shadowrun static cuda,mps --all           all of ATen, side by side
  shadowrun static npu --import torch_npu   kernels in a separate package
  shadowrun static mps -o mps.csv           every operator
  shadowrun static mps --fail-under 95
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from shadowrun.studies.static.coverage import StaticCoverage

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Devices, a data file, and the output."""
    parser.add_argument("devices", type=options.words, metavar="DEVICES", help="devices, such as mps or cuda,mps,xpu")
    options.add_data_argument(parser)
    parser.add_argument("--all", action="store_true", help="look at all of ATen, not at a run's operators")
    options.add_output_arguments(parser, has_all=True)
    parser.add_argument(
        "--fail-under", type=float, metavar="N", help="exit with 1 if a device has kernels for less than N percent"
    )


def run(args: argparse.Namespace) -> int:
    """Print the coverage; returns the exit status."""
    from shadowrun.operators.facts import facts
    from shadowrun.studies.static.coverage import cover_statically, kernels, static_document

    options.check_outputs(args.output)
    if not args.devices:
        raise UsageError("No device is named: give one or several, as in `shadowrun static mps`.", slug="bad-option")
    tables = {device.lower(): kernels(device) for device in args.devices}
    coverage = cover_statically(
        _all() if args.all else _used(args.data),
        {name: (table.source, table.state) for name, table in tables.items()},
        # The operator table marks them: no other device lacks anything without them.
        is_specific=lambda op: facts(op).device_specific,
    )
    subject = "all of ATen" if args.all else f"the operators of {args.data}"
    options.print_report(static_document(coverage, subject), args)
    return _gate(coverage, args.fail_under)


def _used(data: str) -> Mapping[str, int]:
    """Number of calls by operator in a run, also of operators that were not compared: a device needs all of them."""
    import shadowrun
    from shadowrun.store.records import REGION

    coverage = shadowrun.load(data).coverage()
    calls = Counter({operator.op: operator.n_calls for operator in coverage.operators})
    for skipped in coverage.skipped:
        calls[skipped.op] += skipped.n
    return {op: n for op, n in calls.items() if not op.startswith(REGION)}


def _all() -> Mapping[str, int]:
    from shadowrun.studies.static.coverage import declared

    return dict.fromkeys(declared(), 0)


def _gate(coverage: StaticCoverage, least: float | None) -> int:
    status = 0
    # An empty run has 100 %, and must not pass.
    if least is not None and not coverage.operators:
        print_line("shadowrun: FAILED: the run has no operators", error=True)
        return 1
    for device in coverage.devices:
        percent = coverage.percent(device)
        if least is not None and percent < least:
            print_line(f"shadowrun: FAILED: {device} has {percent:.1f} %, under {least:g} %", error=True)
            status = 1
    return status
