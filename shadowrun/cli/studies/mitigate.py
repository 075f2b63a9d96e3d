"""Find out what makes platforms give the same results, and what it costs.

The unchanged program runs on each platform in fresh processes, without and with each mitigation: deterministic
algorithms, precision flags, one thread, oneDNN off, MKL's compatible kernels, plain instructions, channels last,
float64, truncated results. Then combinations are tried. The report has the classes that are left (platforms with the
same bytes in all outputs are one class) and the time that it takes.

Most mitigations are settings of the process. Channels last, float64 and truncation are wrappers which shadowrun puts
around the program's modules in these processes only.

Examples:
  shadowrun mitigate --platforms 'cpu cpu[threads=1] cpu[isa=default]' infer.py
  shadowrun mitigate --grid threads=1,2 --grid isa=default,avx2 -o mitigate.html infer.py --batch 1
  shadowrun mitigate --each cpu --each 'cpu[isa=avx2]' --only threads=1,float64 infer.py
  shadowrun mitigate --grid isa=default,avx2 --try onednn_isa=AVX2 --truncate 4,12 -m package.infer
  shadowrun mitigate --grid threads=1,2 --output-of '*/aten::addmm' --runs 3 infer.py

Exit status:
  0  it ran; 1  the program fails on a platform as it is; 2  wrong usage, or fewer than two platforms ran it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from pathlib import Path

from shadowrun.cli import compare_options, options
from shadowrun.cli.progress import progress_bar
from shadowrun.errors import UsageError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Platforms, mitigations, the output, then the program and its arguments."""
    parser.usage = "shadowrun mitigate --platforms SPECS [options] (script.py | -m module) [arguments of the program]"
    platforms = parser.add_argument_group("platforms, two or more")
    platforms.add_argument(
        "--platforms",
        action="append",
        default=[],
        metavar="SPECS",
        help="platforms of this CPU, with spaces between them, such as 'cpu cpu[threads=1]' (may be repeated)",
    )
    platforms.add_argument(
        "--grid", action="append", default=[], metavar="KEY=V1,V2", help="as in `shadowrun record --grid`"
    )
    platforms.add_argument("--each", action="append", default=[], metavar="SPEC", help="one more platform")
    what = parser.add_argument_group("mitigations")
    what.add_argument(
        "--only",
        type=options.words,
        default=[],
        metavar="A,B",
        help="only these, and those of --truncate and --try, such as threads=1",
    )
    what.add_argument(
        "--truncate", type=_numbers, metavar="8,16", help="low mantissa bits to truncate, each a mitigation"
    )
    what.add_argument(
        "--try",
        dest="further",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one more: a setting of the CPU (`shadowrun platforms` lists them; may be repeated)",
    )
    what.add_argument(
        "--combinations", type=_number, default=12, metavar="N", help="combinations to try (default: %(default)s)"
    )
    options.add_outputs_argument(parser)
    parser.add_argument(
        "--steps", type=compare_options.step_numbers, metavar="0,2,5-7", help="training steps to record"
    )
    parser.add_argument(
        "--runs",
        type=_number,
        default=1,
        metavar="N",
        help="runs that are timed, of which the shortest counts; 0: measure no time (default: %(default)s)",
    )
    parser.add_argument("-j", "--jobs", type=options.positive_int, default=1, metavar="N", help="recordings at a time")
    parser.add_argument("--keep", metavar="DIR", help="keep the recordings in this folder")
    options.add_output_arguments(parser)
    # A process that is timed: the program alone, on one platform, with mitigations applied.
    parser.add_argument("--seconds", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--apply", type=options.words, default=[], help=argparse.SUPPRESS)
    options.add_program_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the program on all platforms, print; returns the exit status."""
    options.require_program(args, "shadowrun mitigate --platforms ... train.py")
    if args.seconds:
        return _time(args)
    options.check_outputs(args.output)

    from shadowrun.cli.program import Program, import_torch

    import_torch()

    from shadowrun.studies.grid import RECORDED, platforms_of
    from shadowrun.studies.mitigate.mitigations import chosen
    from shadowrun.studies.mitigate.report import mitigation_document
    from shadowrun.studies.mitigate.sweep import run_sweep

    specs = [spec for text in args.platforms for spec in _specs(text)]
    platforms = platforms_of(args.grid, [*specs, *args.each])
    if len(platforms) < 2:
        # argparse takes all that comes after the program for the program's own arguments.
        late = "--platforms" in (args.module or args.script)
        raise UsageError(
            f"Give two platforms or more, such as --platforms 'cpu cpu[threads=1]'; there are {len(platforms)}."
            + late * " Options of shadowrun come before the program.",
            slug="bad-option",
        )
    mitigations = chosen(args.only, args.truncate, args.further)
    Program(args.module or args.script, is_module=bool(args.module))  # raises where there is no such program
    with options.kept_folder(args.keep) as folder, progress_bar("mitigate") as bar:
        sweep = run_sweep(
            platforms,
            mitigations,
            ["-m", *args.module] if args.module else args.script,
            folder,
            options=_of_recordings(args),
            wanted=args.outputs,
            jobs=args.jobs,
            n_runs=args.runs,
            n_combinations=args.combinations,
            progress=bar,
        )
    options.print_report(mitigation_document(sweep), args, always=True)
    return int(any(cell.outcome != RECORDED for cell in sweep.base.cells))


def _time(args: argparse.Namespace) -> int:
    """Run the program once, unrecorded, and write how long it took; returns the exit status."""
    from shadowrun.cli.program import Program, import_torch

    program = Program(args.module or args.script, is_module=bool(args.module))
    import_torch()

    from shadowrun.platforms.cpu import CpuSettings
    from shadowrun.platforms.spec import parse
    from shadowrun.studies.mitigate.apply_in_process import applied

    with CpuSettings(parse(args.platforms[0]).settings), applied(args.apply):
        before, began = _processor_time(), time.perf_counter()
        outcome = program.execute(contextlib.nullcontext())
        processor, wall = _processor_time() - before, time.perf_counter() - began
    if not outcome.status:
        Path(args.seconds).write_text(json.dumps({"processor": processor, "wall": wall}), encoding="utf-8")
    return outcome.status


def _processor_time() -> float:
    """Seconds of this process, all threads, and of the child processes that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def _specs(text: str) -> list[str]:
    """Platforms with spaces or commas between them, which brackets may contain."""
    return re.findall(r"(?:[^\s,\[]|\[[^\]]*\]?)+", text)


def _of_recordings(args: argparse.Namespace) -> list[str]:
    """Options of ``shadowrun record``."""
    steps = [f"--steps={','.join(map(str, args.steps))}"] if args.steps else []
    return [*(f"--import={name}" for name in args.imports), *steps]


def _numbers(text: str) -> list[int]:
    return [options.positive_int(word) for word in options.words(text)]


def _number(text: str) -> int:
    return 0 if text == "0" else options.positive_int(text)
