"""Overhead of shadowrun and of comparable tools: the time of a step under a tool, in plain steps.

Plain steps and steps under the tool alternate (A B A B …), so a machine whose speed drifts slows both. The figure is
the median of the ratios of neighbours, in processor time and in wall time. The CPU is compared with itself on one
thread, with module, source line and records. Also measured: single operators, the rate of comparison, and start-up.

    python benchmarks/overhead.py --quick --workload 'CNN*' --tool 'isolated*' --json figures.json
    python benchmarks/overhead.py --markdown docs/performance.md --svg docs/performance.svg   # rewrite the figures
    python benchmarks/overhead.py --profile 'tiny MLP*'                                       # the parts of the time
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from bars import draw
from measuring import measure
from msprobe_runs import NAMES, measure_msprobe
from profiling import profile
from rates import measure_rates
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from startup import measure_startup
from tables import markdown, put_between_marks
from targets import met_targets
from tools import make_tools
from workloads import WORKLOADS, Workload, chosen, single_operators

PARTS = ("steps", "operators", "rates", "startup")
QUICK_ROUNDS, ROUNDS = 3, 15


def main() -> int:
    options = _parser().parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.profile:
        for workload in chosen((*WORKLOADS, *single_operators()), options.profile):
            print(profile(workload, options.rounds or QUICK_ROUNDS))
        return 0
    found = json.loads(Path(options.given).read_text(encoding="utf-8")) if options.given else _measure(options)
    print(markdown(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.markdown:
        put_between_marks(Path(options.markdown), markdown(found))
    if options.svg:
        Path(options.svg).write_text(draw(found), encoding="utf-8")
    return 1 if options.check and not all(target["met"] for target in found["targets"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, and no msprobe")
    parser.add_argument("--rounds", type=int, help=f"pairs of neighbours (default: {ROUNDS})")
    parser.add_argument("--workload", default="*", metavar="GLOB", help="only workloads with such a name")
    parser.add_argument("--tool", default="*", metavar="GLOB", help="only tools with such a name")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be given several times")
    parser.add_argument("--json", metavar="FILE", help="all figures")
    parser.add_argument("--from", dest="given", metavar="FILE", help="figures of an earlier --json, not measured again")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables to a file; in a page, between its marks")
    parser.add_argument("--svg", metavar="FILE", help="the ratios as a picture")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--profile", metavar="GLOB", help="instead: microseconds per call of each part of a comparison")
    return parser


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    parts = options.part or PARTS
    workloads = [
        *(chosen(WORKLOADS, options.workload) if "steps" in parts else ()),
        *(chosen(single_operators(), options.workload) if "operators" in parts else ()),
    ]
    tools = [tool.name for tool in make_tools() if _fits(tool.name, options.tool)]
    ours = {tool.name for tool in make_tools() if tool.ours}
    others = [] if options.quick else [name for name in NAMES.values() if _fits(name, options.tool)]
    found: dict[str, Any] = {"machine": _machine(), "rounds": rounds, "workloads": []}
    n_units = len(workloads) * (len(tools) + len(others)) + ("rates" in parts) + ("startup" in parts)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=n_units)

        def begin(what: str) -> None:
            progress.update(task, description=what)

        for workload in workloads:
            row = {"name": workload.name, "single": workload.name.startswith("add,"), "tools": {}}
            found["workloads"].append(row)
            for name, figures in _workload(workload, tools, others, rounds, begin):
                row["tools"][name] = figures | {"ours": name in ours}
                progress.advance(task)
        if "rates" in parts:
            begin("rates of comparing")
            found["rates"] = measure_rates(rounds)
            progress.advance(task)
        if "startup" in parts:
            begin("starting up")
            found["startup"] = measure_startup(min(rounds, 11))
            progress.advance(task)
    found["targets"] = met_targets(found)
    return found


def _workload(workload: Workload, tools: list[str], others: list[str], rounds: int, begin: Any) -> Any:
    """Name and figures of each tool."""
    try:
        program = workload.build()
    except ImportError as error:
        for name in (*tools, *others):
            yield name, {"error": "not installed", "details": str(error)}
        return
    has_model = program.model is not None
    for tool in make_tools():
        if tool.name in tools:
            begin(f"{workload.name}: {tool.name}")
            yield tool.name, measure(workload, program, tool, rounds)
    del program
    if others:
        begin(f"{workload.name}: msprobe")
        for name, figures in measure_msprobe(workload.name, rounds, has_model=has_model).items():
            if name in others:
                yield name, figures


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name.lower(), pattern.lower())


def _machine() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
