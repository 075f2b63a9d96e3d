"""Run 100,000 variants of real programs on two platforms, judged operator by operator, and keep what differs.

A variant is a program of a zoo after some mutations, made from its number: the same seed gives the same variants and
findings on any number of processes. Each runs in a worker process: a crash, a hang or exhausted memory is its outcome.
The folder has all that the campaign is: the same command, or `resume`, goes on after any interruption.

Examples:
  shadowrun campaign run c --target npu                         100,000 variants of torch's own modules
  shadowrun campaign run c --target npu --minutes 60 --zoo .shadowzoo --programs 'bert*,llama*'
  shadowrun campaign run c --target sim --flaws matmul-in-bf16 --n 1000    (no hardware needed)
  shadowrun campaign status c                                   how far it is, also while it runs
  shadowrun campaign report c -o report.html                    root causes, oracles side by side, definitions
  shadowrun campaign repro c 1 'aten::*mm*'                     scripts of two root causes of the report
  shadowrun campaign reproduce c 4711                           one variant again
  shadowrun campaign add-known c                                accept what was found, in shadowrun.toml
  shadowrun campaign resume c --jobs 8
  shadowrun campaign resume c --executor dask://host:8786       chunks on a cluster
  shadowrun campaign run c --target npu --shard 3/8             the third of eight machines, without a broker
  shadowrun campaign combine c other/shards/*.shadowcampaign    one store of all shards

Exit status:
  0 all was run, or time was over; 1 an executor failed on some chunks, or a report has verdicts of
  --fail-on; 2 wrong usage; 130 after Ctrl-C
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.cli.progress import progress_bar
from shadowrun.cli.studies import campaign_findings
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.cli.progress import ProgressUpdate
    from shadowrun.settings import KnownLine
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder, CampaignSettings
    from shadowrun.studies.campaign.engine import Outcome, Progress
    from shadowrun.studies.shards import Shard

__all__ = ["add_arguments", "run"]

_N = 100_000
# Actions that only read what is in the folder, in a process of their own with bounds on memory and time.
_READ = ("status", "report", "combine", "add-known")
_EXAMPLES = {
    "repro": """\
Examples:
  shadowrun campaign repro c                    all root causes, in c/scripts
  shadowrun campaign repro c 1 3                two of them, as `shadowrun campaign report c` numbers them
  shadowrun campaign repro c 'aten::*mm*'       by operator
  shadowrun campaign repro c 'crash *' -o out   by verdict
""",
    "reproduce": """\
Examples:
  shadowrun campaign reproduce c 4711           by its number
  shadowrun campaign reproduce c 0f3a9c         by the start of its identity
  shadowrun campaign reproduce c '["9d0c1b2a3f4e",[["insert",3,0,"tanh"]],2]' --script

Exit status: 0 as recorded, or nothing is recorded; 1 another result than the recorded one.
""",
    "add-known": """\
Examples:
  shadowrun campaign add-known c --dry-run      what would be written
  shadowrun campaign add-known c 2 --reason 'vendor ticket 123' --expires 2027-01-31
  shadowrun campaign add-known c --ledger ci/known.toml

What a line of the ledger covers already is not written again. `shadowrun campaign report` marks known root causes, and
--fail-on leaves them out.
""",
    "report": """\
Examples:
  shadowrun campaign report c -o report.html
  shadowrun campaign report c --fail-on mismatch,error,crash --before old-campaign
  shadowrun campaign report c --cause 3 -o issue.md     the page of one root cause, for an issue tracker
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A command for each action."""
    actions = parser.add_subparsers(metavar="ACTION", title="actions", required=True)
    for name, (text, add, act) in (_ACTIONS | campaign_findings.ACTIONS).items():
        action = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=_EXAMPLES.get(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        action.add_argument("folder", metavar="DIR", help="folder of the campaign")
        add(action)
        options.add_import_argument(action)
        # Of this action, not of the command: the others read only, or have workers of their own.
        action.set_defaults(act=act, runs_calls=name in campaign_findings.RUNS_CALLS, reads=name in _READ)
        if name in _READ or name == "resume":
            options.add_no_limits_argument(action)
        if name == "resume":  # it has worker processes, so that its own process has no bounds
            action.set_defaults(read_first=_read_first)


def run(args: argparse.Namespace) -> int:
    """Run the action; returns the exit status."""
    act: Callable[[argparse.Namespace], int] = args.act
    return act(args)


# -- run and resume ------------------------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", action="append", default=[], metavar="T", help="platform to test (may be repeated)")
    parser.add_argument("--ref", default="cpu", metavar="R", help="platform to trust (default: %(default)s)")
    options.add_simulation_arguments(parser)
    what = parser.add_argument_group("variants")
    what.add_argument(
        "--n", type=options.positive_int, metavar="N", help=f"variants (default: {_N:,}, or no limit with --minutes)"
    )
    what.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the recipes (default: %(default)s)")
    what.add_argument(
        "--zoo", metavar="FILE", help="programs to mutate (default: torch's own modules and their subgraphs)"
    )
    what.add_argument(
        "--programs",
        type=options.words,
        action="extend",
        default=[],
        metavar="GLOBS",
        help="mutate only these, by name, source or id, such as 'bert*'",
    )
    what.add_argument(
        "--mutators", type=options.words, action="extend", default=[], metavar="A,B", help="mutators (default: all)"
    )
    what.add_argument(
        "--compile", type=options.words, default=[], metavar="A,B", help="also compile each variant, such as inductor"
    )
    _add_how(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--timeout",
        type=options.positive_float,
        default=60.0,
        metavar="S",
        help="seconds for a variant (default: %(default)g)",
    )
    limits.add_argument(
        "--memory",
        type=options.positive_float,
        default=4.0,
        metavar="GIB",
        help="GiB that a variant may take (default: %(default)g)",
    )


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", action="append", default=[], metavar="T", help="name a target that its settings alone may not start"
    )
    parser.add_argument("--ref", metavar="R", help="name the reference, likewise")
    _add_how(parser)


def _add_how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("execution")
    how.add_argument("--minutes", type=options.positive_float, metavar="M", help="stop after M minutes; resume goes on")
    how.add_argument(
        "--jobs",
        type=options.positive_int,
        metavar="N",
        help="worker processes, or chunks in flight (default: one a processor)",
    )
    how.add_argument(
        "--shard",
        metavar="I/N",
        help="run only the I-th of N parts (default: by the variables of Slurm arrays, Kubernetes indexed jobs, GitLab "
        "and CircleCI); /N takes the number from them",
    )
    how.add_argument(
        "--executor",
        metavar="E",
        help="run chunks elsewhere: dask://HOST:PORT, dask:// for processes of this machine, or MODULE:FUNCTION that "
        "makes anything with submit(function, *args)",
    )
    how.add_argument(
        "--reset-command", type=shlex.split, default=[], metavar="C", help="command that brings a lost device back"
    )
    options.add_output_arguments(parser.add_argument_group("report"))


def _run(args: argparse.Namespace) -> int:
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.shards import shard_of

    _check(args)
    shard_of(args.shard, os.environ)  # before the programs are made, which takes a minute
    settings = _settings_of(args)
    path = Path(args.folder)
    with tempfile.TemporaryDirectory(prefix="shadowrun-") as scratch:
        programs = _programs(args, Path(scratch))
        folder = CampaignFolder.create(path, settings, programs)
    return _start(folder, args)


def _read_first(args: argparse.Namespace) -> None:
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder, status

    status(CampaignFolder.open(Path(args.folder)))


def _resume(args: argparse.Namespace) -> int:
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder

    options.check_outputs(args.output)
    folder = CampaignFolder.open(Path(args.folder))
    campaign_findings.may_start(folder, args)
    return _start(folder, args)


def _check(args: argparse.Namespace) -> None:
    if not args.target and not (args.flaws or args.preset):
        options.is_simulated(argparse.Namespace(flaws=[], preset=None, target=None))  # raises
    args.target = args.target or ["sim"]
    if len(set(args.target)) < len(args.target):
        raise UsageError("--target names a platform twice: name each once.", slug="bad-option")
    options.check_outputs(args.output)


def _settings_of(args: argparse.Namespace) -> CampaignSettings:
    """The options as settings, after a look at whether the platforms and names in them exist."""
    from shadowrun.cli.program import import_torch

    import_torch()

    import torch

    from shadowrun import sim
    from shadowrun.platforms import parse, resolve
    from shadowrun.studies.campaign.campaign_folder import CampaignSettings
    from shadowrun.studies.campaign.mutators import ALL, MUTATORS

    simulated = [t for t in args.target if parse(t).device_type != "cpu"]
    is_simulated = bool(args.flaws or args.preset) or "sim" in {parse(t).device_type for t in args.target}
    if is_simulated:
        if len(simulated) > 1:
            raise UsageError(
                "--flaws and --preset simulate one target: name one that is no CPU.", slug="bad-simulation"
            )
        options.enable_simulation(simulated[0] if simulated else "cpu", args.flaws, args.preset)
    for spec in (*args.target, args.ref):
        resolve(spec).stop()  # each worker starts its own
    unknown = [name for name in args.mutators if name not in MUTATORS]
    if unknown:
        raise UsageError(
            f"Unknown mutator {', '.join(unknown)}; known are {', '.join(MUTATORS)}.", slug="unknown-mutator"
        )
    if args.compile:
        _check_backends(args.compile)
    return CampaignSettings(
        targets=tuple(args.target),
        ref=args.ref,
        n=args.n or (0 if args.minutes else _N),
        seed=args.seed,
        mutators=tuple(dict.fromkeys(args.mutators)) or tuple(ALL),
        compile=tuple(dict.fromkeys(args.compile)),
        simulated=is_simulated,
        flaws=sim.active() if is_simulated else (),
        torch=str(torch.__version__),
        timeout_s=args.timeout,
        memory_bytes=int(args.memory * 2**30),
    )


def _check_backends(names: list[str]) -> None:
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    for name in names:
        if name.partition(":")[0] not in known:
            raise UsageError(
                f"--compile {name}: torch.compile has no such backend; it has {', '.join(known)}.", slug="bad-option"
            )


def _programs(args: argparse.Namespace, scratch: Path) -> Path:
    """A file with the programs: that of the folder, if it has one, so that they are made once."""
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.variants.programs import write_programs

    path = Path(args.folder)
    made = CampaignFolder.programs_in(path)
    if args.zoo is None and not args.programs and made is not None:
        return made
    new = scratch / "programs"
    with progress_bar("making programs") as update:
        write_programs(new, None if args.zoo is None else Path(args.zoo), args.programs, update)
    return new


def _start(folder: CampaignFolder, args: argparse.Namespace) -> int:
    from shadowrun.studies.campaign.engine import Engine
    from shadowrun.studies.campaign.executors import executor_named
    from shadowrun.studies.shards import shard_of

    shard, origin = shard_of(args.shard, os.environ)
    if shard.of > 1:
        print_line(f"shadowrun: shard {shard.index + 1}/{shard.of}{f' ({origin})' if origin else ''}", error=True)
    jobs = args.jobs or _n_processors()
    with progress_bar("starting", folder.settings.n or None) as update:
        engine = Engine(
            folder,
            jobs=jobs,
            # More threads than processors slow each other down, and variants then time out.
            threads=1 if args.executor else max(1, _n_processors() // jobs),
            shard=shard,
            minutes=args.minutes,
            reset_command=args.reset_command or options.reset_command(args.target),
            on_progress=_Shown(update),
        )
        if args.executor:
            with executor_named(args.executor, jobs) as executor:
                outcome = engine.run(executor)
        else:
            outcome = engine.run()
    return _ended(folder, shard, outcome, args)


def _ended(folder: CampaignFolder, shard: Shard, outcome: Outcome, args: argparse.Namespace) -> int:
    from shadowrun.studies.campaign.combine_stores import combine
    from shadowrun.studies.campaign.engine import Outcome

    # With several shards, others may still run: `combine` is for the last of them.
    if shard.of == 1:
        combine(folder.combined, folder.shards(), folder.info())
    _print_status(folder, args, always=True)
    again = f"`shadowrun campaign resume {shlex.quote(str(folder.path))}` goes on"
    if outcome is Outcome.STOPPED:
        print_line(f"shadowrun: stopped; {again}.", error=True)
        return 130
    if outcome is Outcome.INCOMPLETE:
        print_line(f"shadowrun: the executor failed on some chunks three times; {again}.", error=True)
        return 1
    if shard.of > 1:
        print_line(
            f"shadowrun: this shard is done. When all are: shadowrun campaign combine {shlex.quote(str(folder.path))}",
            error=True,
        )
    return 0


class _Shown:
    """Shows rate and findings next to the bar."""

    def __init__(self, update: ProgressUpdate) -> None:
        self._update = update

    def __call__(self, now: Progress) -> None:
        rate = 3600 * now.n_now / now.wall_s if now.wall_s else 0.0
        self._update(now.n_done, now.n, f"{now.n_findings:,} findings, {rate:,.0f} variants an hour")


def _n_processors() -> int:
    # In a container, a process may be bound to some of the machine's processors.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- status and combine --------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> int:
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder

    options.check_outputs(args.output)
    _print_status(CampaignFolder.open(Path(args.folder)), args)
    return 0


def _print_status(folder: CampaignFolder, args: argparse.Namespace, *, always: bool = False) -> None:
    from shadowrun.studies.campaign.campaign_folder import status, status_document

    options.print_report(status_document(folder, status(folder)), args, always=always)


def _add_combine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shards", nargs="*", default=[], metavar="FILE", help="shards of other copies of the folder, besides its own"
    )


def _combine(args: argparse.Namespace) -> int:
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.combine_stores import combine
    from shadowrun.studies.campaign.store import CampaignStore

    folder = CampaignFolder.open(Path(args.folder))
    shards = [*folder.shards(), *map(Path, args.shards)]
    combine(folder.combined, shards, folder.info())
    store = CampaignStore.open(folder.combined)
    counts = store.counts()
    store.close()
    print_line(
        f"{folder.combined}: {len(shards)} shards, {counts['variants']:,} variants, {counts['findings']:,} findings"
    )
    return 0


# -- report --------------------------------------------------------------------------------------------


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cause", type=options.positive_int, metavar="N", help="only the page of this root cause, for an issue tracker"
    )
    parser.add_argument("--before", metavar="DIR", help="folder of an earlier campaign: mark what it did not find")
    parser.add_argument(
        "--fail-on",
        type=options.words,
        default=[],
        metavar="KINDS",
        help="verdicts that make the exit status 1, such as mismatch,error,crash (default: none)",
    )
    options.add_known_arguments(parser)
    options.add_output_arguments(parser, findings=True)


def _report(args: argparse.Namespace) -> int:
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.causes.cause_report import SCRIPTS, cause_document, read_causes
    from shadowrun.studies.campaign.report import campaign_document
    from shadowrun.studies.campaign.summary import summarise
    from shadowrun.studies.campaign.variants.programs import program_stages
    from shadowrun.studies.sweep.cases import FAILURES, Kind

    options.check_outputs(args.output)
    for kind in args.fail_on:
        if not any(known.startswith(kind) for known in Kind):
            raise UsageError(
                f"--fail-on {kind}: no verdict begins so. Verdicts: {', '.join(FAILURES)}.", slug="bad-option"
            )
    folder = CampaignFolder.open(Path(args.folder))
    store = campaign_findings.opened_store(folder)
    before = None if args.before is None else campaign_findings.opened_store(CampaignFolder.open(Path(args.before)))
    summary = summarise(
        store,
        stages=program_stages(folder.programs),
        simulated=folder.settings.simulated,
        flaws=folder.settings.flaws,
        before=before,
        ledger=_ledger(store.info.targets, args),
        scripts=read_causes(folder.path / SCRIPTS),
    )
    if args.cause is not None:
        ((number, cause),) = campaign_findings.chosen_causes(summary.root_causes, [str(args.cause)])
        options.print_report(cause_document(number, cause, summary), args)
        return 0
    document = campaign_document(summary, folder=args.folder, fail_on=frozenset(args.fail_on))
    options.print_report(document, args)
    if document.gate is None or document.gate.passed:
        return 0
    print_line(f"shadowrun: {document.gate.line} (--fail-on)", error=True)  # with -o, the report is elsewhere
    return 1


def _ledger(targets: Sequence[str], args: argparse.Namespace) -> tuple[KnownLine, ...]:
    """Known issues of the project, and of the packages of the targets' devices."""
    from shadowrun.studies.campaign.causes.known_causes import platform_of

    every = [options.known_issues_on(platform_of(target), args).lines for target in targets]
    return tuple(dict.fromkeys(line for lines in every for line in lines))


_ACTIONS = {
    "run": ("make or continue a campaign", _add_run, _run),
    "resume": ("run what is missing", _add_resume, _resume),
    "status": ("say how far it is, also while it runs", options.add_output_arguments, _status),
    "report": ("report what was found, by root cause, platform and oracle", _add_report, _report),
    "combine": ("make one store of all shards", _add_combine, _combine),
}
