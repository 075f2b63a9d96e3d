"""Tell what a device lacks by torch's tables of kernels, without the device.

The operators are those of a recorded run; --all looks at all of ATen. Tables know no dtypes, and not whether the
kernels that a generic operator calls are there: what they say is a first look, and `shadowrun run` decides.

States: kernel (one of its own), composite and generic (made of other operators), fallback (left to the backend's own,
mostly the CPU), absent, unknown (the device's kernels are in a package that is not loaded), specific (an operator for
one kind of device only).

Examples:
  shadowrun static mps                      what the last run would lack on MPS
  shadowrun static cuda,mps --all           all of ATen, side by side
  shadowrun static npu --import torch_npu   kernels of a package of their own
  shadowrun static mps -f csv -o mps.csv    every operator
  shadowrun static mps --fail-under 95
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from shadowrun.analysis.static import StaticCoverage

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Devices, a data file, and what to write."""
    parser.add_argument("devices", type=options.words, metavar="DEVICES", help="devices, such as mps or cuda,mps,xpu")
    options.add_data_argument(parser)
    parser.add_argument("--all", action="store_true", help="look at all of ATen, not at a run's operators")
    options.add_import_argument(parser)
    parser.add_argument("-f", "--format", choices=("txt", "md", "json", "csv"), default="txt", help="(default: txt)")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="file, or - for standard output (default)")
    parser.add_argument(
        "--fail-under", type=float, metavar="N", help="exit with 1 where a device has kernels for less than N percent"
    )


def run(args: argparse.Namespace) -> int:
    """Print the tables' answer; returns the exit status."""
    from shadowrun.analysis.static import cover_statically
    from shadowrun.platforms.kernels import kernels
    from shadowrun.replay.equivalents import is_device_specific
    from shadowrun.report import static

    options.import_modules(args)
    if not args.devices:
        raise UsageError("No device is named: shadowrun static mps, for one.", slug="bad-option")
    tables = {device.lower(): kernels(device) for device in args.devices}
    coverage = cover_statically(
        _all() if args.all else _used(args.data),
        {name: (table.source, table.state) for name, table in tables.items()},
        is_specific=is_device_specific,
    )
    what = "all of ATen" if args.all else f"the operators of {args.data}"
    _write(static.FORMATS[args.format](coverage, what), args.output)
    return _gate(coverage, args.fail_under)


def _used(data: str) -> Mapping[str, int]:
    """Operators of a run and their calls, views and others that were not compared too: a device needs them all."""
    import shadowrun
    from shadowrun.store.records import REGION

    coverage = shadowrun.load(data).coverage()
    calls = Counter({operator.op: operator.n_calls for operator in coverage.operators})
    for skipped in coverage.skipped:
        calls[skipped.op] += skipped.n
    return {op: n for op, n in calls.items() if not op.startswith(REGION)}


def _all() -> Mapping[str, int]:
    from shadowrun.platforms.kernels import declared

    return dict.fromkeys(declared(), 0)


def _write(text: str, output: str) -> None:
    from shadowrun import report

    if output == "-":
        report.show(text)
    else:
        report.save(text, Path(output))


def _gate(coverage: StaticCoverage, least: float | None) -> int:
    status = 0
    if least is not None and not coverage.operators:
        print("shadowrun: FAILED: there is no operator to look for", file=sys.stderr)
        return 1
    for device in coverage.devices:
        percent = coverage.percent(device)
        if least is not None and percent < least:
            print(f"shadowrun: FAILED: {device} has {percent:.1f} %, under {least:g} %", file=sys.stderr)
            status = 1
    return status
