"""Make, list and show programs to test a platform with: graphs of operator calls, without weights.

A zoo is one file. Values of parameters and inputs come from their names, with the same bits on every machine. `add`
takes programs from a source, keeps each graph once, and counts what came in and out of each step, with the reason for
what was left out. `subgraphs` mines the programs that the zoo has: add it last.

Examples:
  shadowrun zoo add modules                       torch's own modules, with inputs of its tests
  shadowrun zoo add modules 'nn.*Norm*'           some of them
  shadowrun zoo add transformers --jobs 2         every architecture of the installed transformers, scaled down
  shadowrun zoo add timm 'mobile*' 'resnet*'      models of the installed timm or torchvision, without weights
  shadowrun zoo add traces calls.txt              operator calls with shapes, in BackendBench's text format
  shadowrun zoo add run run.shadowrun             distinct calls of a recorded run
  shadowrun zoo add graphnet samples 'timm/*'     graphs in GraphNet's layout, in a folder that you have
  shadowrun zoo add exported model.pt2            a program of torch.export.save
  shadowrun zoo add subgraphs                     frequent subgraphs of all that is in the zoo
  shadowrun zoo list                              counts of each step and source
  shadowrun zoo list --left-out transformers      what was left out, and why
  shadowrun zoo show 3f2a --script                one program, by the start of its id or by name, as calls

Exit status:
  0  done
  2  wrong usage, or an error inside shadowrun
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from shadowrun.cli.progress import ProgressUpdate
    from shadowrun.studies.zoo.program import Program, Zoo
    from shadowrun.studies.zoo.sources.source import Collected

__all__ = ["add_arguments", "reads_and_runs", "run"]

_FILE: Final = ".shadowzoo"
_SOURCES: Final = {
    "modules": "torch's module database; WHAT: patterns of names such as 'nn.Conv*'",
    "operators": "torch's operator database, with gradients; WHAT: patterns of names such as 'nn.functional.*'",
    "optimizers": "steps of torch's optimizers; WHAT: patterns of names such as 'optim.Adam*'",
    "transformers": "models of the installed transformers; WHAT: patterns of architectures such as bert 'qwen*'",
    "torchvision": "models of the installed torchvision, without weights; WHAT: patterns of names such as 'resnet*'",
    "timm": "models of the installed timm, likewise",
    "traces": "calls of a text trace of BackendBench; WHAT: the file, patterns of operators such as 'aten::add*'",
    "run": "calls of a recorded run, without their values; WHAT: the .shadowrun file, patterns of operators",
    "graphnet": "graphs in GraphNet's layout; WHAT: the folder, patterns of folders in it",
    "exported": "files of torch.export.save; WHAT: the .pt2 file or a folder of them, patterns of files",
    "subgraphs": "frequent subgraphs of the programs in the zoo; WHAT: patterns of names of programs",
}

# Bytes that one of a zoo unpacks to: of 651 programs of transformers 21, of torch's own modules 33.
_PACKED: Final = 32
_OF_FILES: Final = ("traces", "run", "graphnet", "exported")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An action, the file, and what each action takes."""
    parser.usage = "shadowrun zoo (list | add SOURCE [WHAT ...] | show PROGRAM) [options]"
    parser.add_argument("action", choices=("list", "add", "show"), help="what to do")
    parser.add_argument("what", nargs="*", metavar="WHAT", help="source and patterns, or a program")
    parser.add_argument("--zoo", type=Path, default=Path(_FILE), metavar="FILE", help="the file (default: %(default)s)")
    parser.add_argument(
        "--jobs",
        type=options.positive_int,
        default=1,
        metavar="N",
        help="add transformers, torchvision, timm: processes",
    )
    parser.add_argument(
        "--all-heads", action="store_true", help="add transformers: every head, not the first that works"
    )
    parser.add_argument("--left-out", metavar="SOURCE", help="list: what a source left out, with the reason")
    parser.add_argument("--script", action="store_true", help="show: with its calls")
    options.add_no_limits_argument(parser)
    parser.set_defaults(packed=_PACKED)
    options.add_output_arguments(parser)


def reads_and_runs(args: argparse.Namespace) -> tuple[bool, bool]:
    """Whether it only reads, and whether it runs calls of a file."""
    # Limits of memory and time are those of what a command does: `list` unpacks a file, `add` may run its calls.
    return args.action != "add", args.action == "add" and args.what[:1] in [[s] for s in (*_OF_FILES, "subgraphs")]


def run(args: argparse.Namespace) -> int:
    """Do what is asked; returns the exit status."""
    options.check_outputs(args.output)
    {"list": _list, "add": _add, "show": _show}[args.action](args)
    return 0


def _add(args: argparse.Namespace) -> None:
    if not args.what or args.what[0] not in _SOURCES:
        known = "; ".join(f"{name} ({text})" for name, text in _SOURCES.items())
        raise UsageError(f"Name a source: shadowrun zoo add SOURCE. Known are {known}.", slug="zoo-source")
    from shadowrun.cli.progress import progress_bar
    from shadowrun.studies.zoo.program import Zoo, read_zoo, unique, write_zoo

    source, *rest = args.what
    if source in _OF_FILES and not rest:
        raise UsageError(f"Name the file: shadowrun zoo add {source} FILE.", slug="zoo-source")
    path = Path(rest.pop(0)) if source in _OF_FILES else Path()
    patterns = rest or ["*"]
    zoo = read_zoo(args.zoo) if args.zoo.exists() else Zoo({}, ())

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    with progress_bar(f"zoo: {source}") as update:
        found = _collected(source, path, args, zoo, wanted, update)
    # A source that is added again takes the place of what it gave before, with its counts.
    others = [program for program in zoo.programs.values() if program.source != source]
    kept, twice = unique(found.programs, (p.id for p in others))
    if not found.stages:
        raise UsageError(f"Nothing of {source} fits {' '.join(patterns)}.", slug="zoo-source")
    found.counted("different graphs", len(found.programs), twice)
    stages = [stage for stage in zoo.stages if stage.source != source]
    write_zoo(args.zoo, [*others, *kept], [*stages, *found.stages])
    print_line(f"{args.zoo}: {len(kept):,} programs of {source}, {len(others) + len(kept):,} in all", error=True)
    from shadowrun.studies.zoo.report import zoo_document

    options.print_report(zoo_document(read_zoo(args.zoo), str(args.zoo), source), args, always=True)


def _collected(
    source: str,
    path: Path,
    args: argparse.Namespace,
    zoo: Zoo,
    wanted: Callable[[str], bool],
    update: ProgressUpdate,
) -> Collected:
    if source in ("modules", "operators", "optimizers"):
        from shadowrun.studies.zoo.sources import modules, operators, optimizers

        of_torch: dict[str, Callable[..., Collected]] = {
            "modules": modules.collect,
            "operators": operators.collect,
            "optimizers": optimizers.collect,
        }
        return of_torch[source](wanted, update)
    if source == "transformers":
        from shadowrun.studies.zoo.sources import architectures

        return architectures.collect(wanted, update, all_heads=args.all_heads, n_workers=args.jobs)
    if source in ("torchvision", "timm"):
        from shadowrun.studies.zoo.sources import vision

        return vision.collect(source, wanted, update, n_workers=args.jobs)
    if source in _OF_FILES:
        return _of_file(source)(path, wanted, update, isolated=True)
    from shadowrun.studies.zoo import subgraphs

    return subgraphs.mine_subgraphs([p for p in zoo.programs.values() if wanted(p.name)], update, isolated=True)


def _of_file(source: str) -> Callable[..., Collected]:
    """What reads a source that another person may have written: it is data, and no code of it runs."""
    if source == "graphnet":
        from shadowrun.studies.zoo.sources.graph_folders import collect_folders

        return collect_folders
    if source == "exported":
        from shadowrun.studies.zoo.sources.exported import collect_exported

        return collect_exported
    from shadowrun.studies.zoo.sources import call_lists

    return call_lists.collect_traces if source == "traces" else call_lists.collect_run


def _list(args: argparse.Namespace) -> None:
    from shadowrun.studies.zoo.program import read_zoo
    from shadowrun.studies.zoo.report import left_out_document, zoo_document

    zoo = read_zoo(args.zoo)
    known = sorted({stage.source for stage in zoo.stages})
    if args.left_out is not None and args.left_out not in known:
        raise UsageError(
            f"The zoo has nothing of the source {args.left_out!r}; it has {', '.join(known)}.", slug="zoo-source"
        )
    document: Any = left_out_document(zoo, args.left_out) if args.left_out else zoo_document(zoo, str(args.zoo))
    options.print_report(document, args)


def _show(args: argparse.Namespace) -> None:
    from shadowrun.studies.zoo.program import read_zoo
    from shadowrun.studies.zoo.report import program_document

    if len(args.what) != 1:
        raise UsageError("Name one program: shadowrun zoo show PROGRAM.", slug="zoo-unknown-program")
    options.print_report(program_document(_named(read_zoo(args.zoo), args.what[0]), calls=args.script), args)


def _named(zoo: Zoo, text: str) -> Program:
    by_id = [key for key in zoo.programs if key.startswith(text)]
    if len(by_id) == 1:
        return zoo.programs[by_id[0]]
    by_name = [p for p in zoo.programs.values() if p.name == text]
    if not by_name:
        found = f"{len(by_id)} ids begin so" if by_id else "`shadowrun zoo list` names the programs"
        raise UsageError(f"No program {text[:80]!r} in the zoo: {found}.", slug="zoo-unknown-program")
    return by_name[0]
