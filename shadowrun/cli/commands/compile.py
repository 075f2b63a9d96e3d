"""Run a program and check everything that it compiles with torch.compile.

Each graph that the program compiles runs compiled and in eager mode on the same inputs: the whole graph with its
gradients, and its forward and backward pass separately. The program continues with the eager results, so that one wrong
graph does not make later graphs fail. If a graph deviates, the wrong operators are located and reported with the
source lines of the program; `--repro` writes a script for each.

Examples:
  shadowrun compile train.py --epochs 1
  shadowrun compile --repro for-the-vendor train.py
  shadowrun compile --calls 3 --time-limit 60 -o compiled.html -m package.train

Exit status:
  the exit status of the program; 1 if a graph deviates or fails, or the program raised; 2 wrong usage; 3 if a graph
  could not be verified, unless --allow-unverified is given; 130 after Ctrl-C
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.cli import options
from shadowrun.cli.commands.repro import print_script
from shadowrun.cli.progress import progress_bar
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import replacing_unencodable
from shadowrun.store.atomic_write import refuse_links

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from shadowrun.compiled.outcome import CompileReport, RegionReport
    from shadowrun.report.document import Document
    from shadowrun.report.issues import Issue, Issues

__all__ = ["add_arguments", "run"]

# Neither 0, by which a gate would pass on what was never compared, nor 1, which is a fault.
# Exit status if a graph could not be verified.
_UNVERIFIED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options, then the program and its arguments."""
    parser.usage = "shadowrun compile [options] (script.py | -m module) [arguments of the program]"
    parser.add_argument(
        "--calls",
        type=options.positive_int,
        default=10,
        metavar="N",
        help="calls to check of each graph (default: %(default)s)",
    )
    parser.add_argument(
        "--time-limit",
        type=options.positive_float,
        default=600.0,
        metavar="S",
        help="seconds for the search for wrong operators (default: 600)",
    )
    parser.add_argument(
        "--repro", metavar="DIR", help="write a script for each wrong operator, each to a folder in DIR"
    )
    parser.add_argument(
        "--allow-unverified", action="store_true", help="exit with 0 even if a graph could not be verified"
    )
    options.add_output_arguments(parser, findings=True)
    options.add_program_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the program; returns the exit status."""
    options.check_outputs(args.output)
    options.require_program(args, "shadowrun compile train.py")

    from shadowrun.cli.program import Program, import_torch

    program = Program(args.module or args.script, is_module=bool(args.module))
    import_torch()

    import contextlib
    import time

    from shadowrun.compiled import torchcompile
    from shadowrun.compiled.check import checked_torch_compile, compile_reports

    # Torch counts graph breaks per process: the difference belongs to the program.
    before = torchcompile.graph_breaks()
    with checked_torch_compile(args.calls) as calls:
        outcome = program.execute(contextlib.nullcontext())
    # The report must follow the program's output, also where both go to one file.
    sys.stdout.flush()
    breaks = {r: n - before.get(r, 0) for r, n in torchcompile.graph_breaks().items() if n > before.get(r, 0)}
    until = time.perf_counter() + args.time_limit
    with progress_bar("compile") as update:
        reports = compile_reports(
            calls,
            breaks,
            until,
            lambda what, done, of: update(done, of, what),
            allow_unverified=args.allow_unverified,
        )
    with replacing_unencodable():
        options.print_report(_document(reports), args, always=True)
        if args.repro:
            _write_repros(reports, Path(args.repro))
    # Ctrl-C ended the program early: graphs that deviate are reported, but the user ended it.
    if outcome.interrupted:
        return outcome.status
    if any(report.failed for report in reports):
        return 1
    unverified = any(not report.ok for report in reports)
    return _UNVERIFIED if unverified and outcome.status == 0 else outcome.status


def _document(reports: list[CompileReport]) -> Document:
    """One section for each function that was compiled."""
    from shadowrun.report.bars import region_strip
    from shadowrun.report.document import Block, Document, Note, Records, Section

    strips = [(report.name, [(r.name, str(r.outcome), r.n_nodes) for r in report.regions]) for report in reports]
    blocks: list[Block] = [*region_strip(strips, "Compiled regions")]
    for report in reports:
        title, *lines = report.summary().splitlines()
        tone = "good" if report.ok else "bad" if report.failed else "warn"
        blocks.append(Section(title, tuple(Note(_outlined(line)) for line in lines), tone=tone))
    if not reports:
        blocks.append(Note("The program called nothing that torch.compile compiled."))
    head = ("function", "backend", "region", "outcome", "n_nodes", "n_calls", "compile_s", "evidence", "wrong")
    rows = [
        (
            report.name, report.backend, r.name, str(r.outcome), r.n_nodes, r.n_calls, round(r.compile_s, 3),
            r.error or r.verdict.evidence, ", ".join(c.op for c in r.localised.culprits) if r.localised else "",
        )
        for report in reports
        for r in report.regions
    ]  # fmt: skip
    data = {"format": 1, "reports": list(map(_report_data, reports))}
    title = "torch.compile against eager"
    return Document(title, tuple(blocks), data, Records(head, tuple(rows)), issues=_issues(reports))


def _outlined(line: str) -> str:
    """A line of a summary without its indentation, and with a dash where it belongs to the line above."""
    return f"– {line.strip()}" if line.startswith("    ") else line.strip()  # noqa: RUF001 - a dash


def _issues(reports: list[CompileReport]) -> Issues:
    """One issue for each operator that is wrong, or for each region where none was found."""
    from shadowrun.compiled.outcome import RegionOutcome
    from shadowrun.report.issues import Issues

    backends = ", ".join(dict.fromkeys(report.backend for report in reports))
    regions = [(report, region) for report in reports for region in report.regions]
    rows = [issue for pair in regions for issue in _issues_of(*pair)]
    # A program may be wrong only as a whole.
    rows += [
        _issue(r.name, r.backend, str(r.outcome), r.error or r.verdict.evidence, failed=r.failed)
        for r in reports
        if not r.ok and not any(issue.name.startswith(f"{r.name} ") for issue in rows)
    ]
    passed = tuple(f"{report.name} {r.name}" for report, r in regions if r.outcome is RegionOutcome.OK)
    return Issues(f"compiled ({backends})" if backends else "compiled", tuple(rows), passed)


def _issues_of(report: CompileReport, region: RegionReport) -> Iterator[Issue]:
    from shadowrun.compiled.outcome import RegionOutcome

    if region.outcome is RegionOutcome.OK:
        return
    failed = region.outcome is not RegionOutcome.UNVERIFIED
    name, kind = f"{report.name} {region.name}", str(region.outcome)
    culprits = region.localised.culprits if region.localised else ()
    for c in culprits:
        yield _issue(f"{name} {c.op}", report.backend, kind, f"{c.how}: {c.evidence}", failed=failed, site=c.site)
    if not culprits:
        why = region.error or region.verdict.evidence or region.verdict.explanation
        yield _issue(name, report.backend, kind, why, failed=failed)


def _issue(name: str, backend: str, kind: str, why: str, *, failed: bool, site: str = "") -> Issue:
    from shadowrun.report.issues import Issue
    from shadowrun.report.sanitize import clip

    message = clip(f"{name}, compiled with {backend}: {kind}{f', {why}' if why else ''}")
    level = "error" if failed else "warning"
    return Issue(kind, "", name, message, level, (kind, name), sites=(site,) if site else ())


def _report_data(report: CompileReport) -> dict[str, Any]:
    regions = [
        {name: getattr(r, name) for name in ("name", "outcome", "verdict", "compile_s", "n_nodes", "n_calls", "error")}
        | {"culprits": list(r.localised.culprits) if r.localised else []}
        for r in report.regions
    ]
    names = (
        *("name", "backend", "outcome", "verdict", "graph_breaks", "n_graphs", "n_recompiled", "error", "compile_s"),
        *("speed_ratio", "memory_ratio", "ladder", "notes", "seconds", "ok"),
    )
    return {name: getattr(report, name) for name in names} | {"regions": regions}


def _write_repros(reports: list[CompileReport], folder: Path) -> None:
    for k, report in enumerate(reports):
        try:
            own = folder / f"{k + 1:02}-{report.name}" if len(reports) > 1 else folder
            refuse_links(folder, own)
            scripts = report.repro(own)
        except UsageError as error:  # other functions can still have scripts
            print(f"{report.name}: no script. {error}")
            continue
        for script in scripts:
            print_script(script)
