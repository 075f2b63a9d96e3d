"""Run a program and record digests of all results, to compare with a recording of another machine.

The program runs once, unchanged, on its own devices, with its own arguments and exit status. Nothing is compared and no
tensor is kept, only hashes, counts and 64 sampled elements of each result, and the results of each step's last call up
to 4 MiB (none with --capture 0); with --capture SIZE, inputs of calls too.

Examples:
  shadowrun record -o a.shadowrec train.py --epochs 1
  shadowrun record --steps 0-2 -m package.train
  shadowrun record --capture 100MB -o a.shadowrec train.py     (keep inputs, for shadowrun replay on another machine)
  shadowrun record --flaws matmul-in-tf32 -o flawed.shadowrec train.py sim     (a simulated device)
  shadowrun record --kernels -o a.shadowrec train.py                          (also the kernel of each call)
  shadowrun record --grid threads=1,2 --grid isa=default,avx2 --out grid train.py   (each platform in its own process)

Exit status:
  the exit status of the program; with --grid, 1 if it failed on a platform; 2 wrong usage; 130 after Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import compare_options, options
from shadowrun.cli.progress import progress_bar
from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shadowrun.comparison.record import RecordRun

__all__ = ["add_arguments", "run"]

_DEFAULT = "run.shadowrec"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options, then the program and its arguments."""
    parser.usage = "shadowrun record [-o FILE] [options] (script.py | -m module) [arguments of the program]"
    parser.add_argument(
        "-o", "--output", default=_DEFAULT, metavar="FILE", help="recording to write (default: %(default)s)"
    )
    options.add_simulation_arguments(parser)
    compare_options.add_selection_arguments(parser, "record")
    parser.add_argument(
        "--rows", type=int, default=0, metavar="N", help="also digest the first N rows of each result one by one"
    )
    parser.add_argument(
        "--capture",
        type=options.byte_count,
        metavar="SIZE",
        help="keep the inputs of calls, such as 100MB in all, for `shadowrun replay` (default: only the results of "
        "each step's last call, up to 1 MiB a step and 4 MiB in all; 0: not these either)",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="also record which kernel ran for each call (100 to 200 µs more a call)"
    )
    grid = parser.add_argument_group("many platforms on one machine")
    grid.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="values of a setting of the CPU, such as threads=1,2; several: their product (`shadowrun platforms` "
        "lists the settings)",
    )
    grid.add_argument(
        "--each", action="append", default=[], metavar="SPEC", help="one more platform, such as 'cpu[mkldnn=off]'"
    )
    grid.add_argument("--out", metavar="DIR", help="folder for the recordings of a grid")
    grid.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="processes at a time (default: 1)")
    parser.add_argument("--platform", help=argparse.SUPPRESS)  # a process of a grid gets its platform here
    parser.add_argument("--apply", type=options.words, default=[], help=argparse.SUPPRESS)  # by `shadowrun mitigate`
    options.add_program_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the program; returns the exit status.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the program; the recording has been written.
    """
    options.require_program(args, "shadowrun record -o a.shadowrec train.py")

    if args.grid or args.each:
        return _run_grid(args)
    if args.out:
        raise UsageError(
            "--out is the folder of a grid: give --grid or --each, or name one file by -o.", slug="bad-grid"
        )

    from shadowrun.cli.program import Program, import_torch

    program = Program(args.module or args.script, is_module=bool(args.module))
    import_torch()
    named = program.names("sim")
    # A program that names `sim` itself expects the device to exist before its first line runs.
    if args.flaws or args.preset or named:
        options.enable_simulation("sim", args.flaws, args.preset, named=named)

    from shadowrun.comparison.record import record

    recording = record(
        args.output,
        steps=args.steps,
        modules=args.modules,
        ops=None if args.ops is None else compare_options.operators(args.ops),
        rows=args.rows,
        capture=args.capture,
        kernels=args.kernels,
    )
    process = os.getpid()
    with _platform(recording, args.platform), _mitigations(args.apply):
        outcome = program.execute(recording)
    # It comes here with a copy of all that the parent had: only the parent has a recording to report.
    if os.getpid() != process:  # a child that the program forked
        return outcome.status
    sys.stdout.flush()
    print(_closing_line(recording), file=sys.stderr)
    if outcome.interrupted:
        raise KeyboardInterrupt  # end the command by the signal, as Python does
    return outcome.status


def _platform(recording: RecordRun, spec: str | None) -> AbstractContextManager[None]:
    """The settings of a platform that a process can change; the others are in its environment."""
    if spec is None:
        return contextlib.nullcontext()

    from shadowrun.platforms.cpu import CpuSettings
    from shadowrun.platforms.spec import parse

    platform = parse(spec)
    recording.platform = platform.public
    return CpuSettings(platform.settings)


def _mitigations(names: list[str]) -> AbstractContextManager[None]:
    """Mitigations that a process applies itself; see `shadowrun mitigate`."""
    if not names:
        return contextlib.nullcontext()

    from shadowrun.studies.mitigate.apply_in_process import applied

    return applied(names)


def _run_grid(args: argparse.Namespace) -> int:
    """Record each platform; returns the exit status."""
    if not args.out:
        raise UsageError("Give the folder for the recordings of the grid: --out DIR.", slug="bad-grid")
    if args.jobs < 1:
        raise UsageError(f"-j {args.jobs}: use a number of processes >= 1.", slug="bad-grid")

    from shadowrun import report
    from shadowrun.report.document import render
    from shadowrun.studies.grid import RECORDED, grid_document, platforms_of, record_grid

    platforms = platforms_of(args.grid, args.each)
    folder = Path(args.out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {args.out!r} is no folder.", slug="bad-grid")
    with progress_bar("recording: platforms") as progress:
        cells = record_grid(platforms, _forwarded(args), folder, jobs=args.jobs, progress=progress)
    report.write_to_stdout(render(grid_document(cells, str(folder)), "terminal"))
    return int(any(cell.outcome != RECORDED for cell in cells))


def _forwarded(args: argparse.Namespace) -> list[str]:
    """The options of one recording, and the program, for a process of its own."""
    # With `=`: a value that begins with a dash would be read as an option.
    found = [f"--import={name}" for name in args.imports]
    lists = {"flaws": args.flaws, "ops": args.ops, "modules": args.modules, "steps": args.steps}
    found += [f"--{name}={','.join(map(str, values))}" for name, values in lists.items() if values]
    found += [f"--preset={args.preset}"] if args.preset else []
    found += [f"--{name}={n}" for name, n in (("rows", args.rows or None), ("capture", args.capture)) if n is not None]
    found += ["--kernels"] if args.kernels else []
    return [*found, "-m", *args.module] if args.module else [*found, *args.script]


def _closing_line(recording: RecordRun) -> str:
    """Calls, bytes, file and what to do next."""
    path = recording.path
    size = path.stat().st_size if path.exists() else 0
    n_skipped = sum(recording.skipped.values())
    skipped = f" ({n_skipped:,} not recorded)" if n_skipped else ""
    n_captured = recording.captured.n_calls
    captured = f", inputs of {n_captured:,} ({recording.captured.n_bytes:,} bytes)" if n_captured else ""
    outputs = recording.outputs
    if outputs.n_steps:
        steps = f"{outputs.n_steps:,} step{'s' * (outputs.n_steps > 1)}"
        captured += f", last results of {steps} ({outputs.n_bytes:,} bytes)"
    return (
        f"shadowrun: {recording.n_calls:,} calls{skipped}{captured}, {size:,} bytes in {path}; "
        f"next: shadowrun diff {path} OTHER.shadowrec, or shadowrun classes {path.with_name('*.shadowrec')}"
    )
