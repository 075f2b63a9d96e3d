"""Actions of `shadowrun campaign` on what was found: scripts, one variant again, lines of the ledger."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import MAX_TEXT, clip, one_line, print_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.causes.cause_report import CauseFile
    from shadowrun.studies.campaign.causes.root_causes import RootCause
    from shadowrun.studies.campaign.store import CampaignStore
    from shadowrun.studies.campaign.variants.recipe import Recipe
    from shadowrun.studies.zoo.program import Program

__all__ = ["ACTIONS", "RUNS_CALLS", "chosen_causes", "may_start", "opened_store"]

_LEDGER: Final = "shadowrun.toml"
_ISSUE: Final = "issue.md"


def may_start(folder: CampaignFolder, args: argparse.Namespace) -> None:
    """Look whether what a folder names, which may come from anyone, may be started: its platforms and compilers.

    Raises:
        PlatformError: A file may not name one, and the user did not.
    """
    from shadowrun.cli.program import import_torch

    import_torch()

    from shadowrun.compiled.torchcompile import OWN_BACKENDS, modules_of_backend
    from shadowrun.platforms.untrusted_specs import trusted_spec

    s = folder.settings
    names = (*args.target, *([args.ref] if args.ref else []), *args.imports)
    for spec in s.targets:
        trusted_spec(spec, names, simulated=s.simulated)
    trusted_spec(s.ref, names, option="--ref")
    for backend in s.compile:
        name = backend.partition(":")[0]
        if name in OWN_BACKENDS:
            continue
        # A module that was named has registered it, or is where torch looks for it.
        modules = modules_of_backend(name)
        missing = sorted(m for m in modules if not any(_stands_for(n, m) for n in args.imports))
        if missing or not modules:
            raise UsageError(
                f"The backend {ascii(backend)[:80]} of torch.compile is not torch's own, and only the folder names it, "
                "which may come from another person. If you know what it is, name its module: "
                f"--import {' --import '.join(missing) or 'MODULE'}.",
                slug="module-refused",
            )
    folder.check_programs()
    folder.check_torch()


def _stands_for(named: str, module: str) -> bool:
    """Whether the import of a module that the user named is one of this module: a package stands for its modules."""
    # Those of torch stand for themselves: some of its backends import another package.
    is_inside = named.partition(".")[0] != "torch" and module.startswith(f"{named}.")
    return named == module or is_inside


def opened_store(folder: CampaignFolder) -> CampaignStore:
    """The combined store, made of the shards that are there if it is missing or older than one of them."""
    from shadowrun.studies.campaign.combine_stores import combine
    from shadowrun.studies.campaign.store import CampaignStore, other_campaign

    shards = folder.shards()
    made = folder.combined.stat().st_mtime_ns if folder.combined.exists() else -1
    # A campaign may still run: its shards are then newer than any store that was combined of them.
    if made < 0 or any(path.stat().st_mtime_ns > made for path in shards):
        combine(folder.combined, shards, folder.info())
    store = CampaignStore.open(folder.combined)
    if store.info.campaign != folder.settings.campaign:
        store.close()
        raise other_campaign(folder.combined)
    return store


def chosen_causes(causes: Sequence[RootCause], wanted: Sequence[str]) -> list[tuple[int, RootCause]]:
    """Root causes with their numbers: those that are named, all if none is.

    Args:
        causes: All of a campaign.
        wanted: Numbers of the report, and patterns of operators or signatures.

    Raises:
        UsageError: One of them matches none.
    """
    numbered = dict(enumerate(causes, start=1))
    chosen: dict[int, RootCause] = {} if wanted else dict(numbered)
    for text in wanted:
        found = {n: c for n, c in numbered.items() if _is(text, n, c)}
        if not found:
            known = "; ".join(f"{n} {clip(str(c.signature), 80)}" for n, c in list(numbered.items())[:6])
            raise UsageError(
                f"There is no root cause {text[:80]!r}. Root causes: {known or 'none'}. Give numbers of `shadowrun "
                "campaign report`, or patterns of operators such as 'aten::*mm*'.",
                slug="unknown-finding",
            )
        chosen |= found
    return list(chosen.items())


def _is(text: str, number: int, cause: RootCause) -> bool:
    if text.isdecimal():
        # Python converts a number of thousands of digits in a time that grows with their square.
        return number == int(text[:9])
    return any(fnmatch.fnmatchcase(name, text) for name in (cause.signature.op, str(cause.signature)))


def _add_platforms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", action="append", default=[], metavar="T", help="name a target that its settings alone may not start"
    )
    parser.add_argument("--ref", metavar="R", help="name the reference, likewise")


# -- repro -------------------------------------------------------------------------------------------------


def _add_repro(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "causes",
        nargs="*",
        default=[],
        metavar="CAUSE",
        help="number of a root cause in the report, or a pattern of operators or signatures (default: all)",
    )
    parser.add_argument("-o", "--output", metavar="OUT", help="folder to write to (default: DIR/scripts)")
    parser.add_argument("--no-minimise", action="store_true", help="keep all mutations, and the inputs as they are")
    parser.add_argument(
        "--time-limit",
        type=options.positive_float,
        default=30.0,
        metavar="S",
        help="seconds to make the inputs of one smaller (default: %(default)g)",
    )
    parser.add_argument("--jobs", type=options.positive_int, default=1, metavar="N", help="worker processes")
    _add_platforms(parser)


def _repro(args: argparse.Namespace) -> int:
    import dataclasses

    from shadowrun import report
    from shadowrun.report.document import render
    from shadowrun.store.atomic_write import refuse_links
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.causes.cause_report import SCRIPTS, cause_document, folder_name
    from shadowrun.studies.campaign.causes.script_jobs import write_scripts
    from shadowrun.studies.campaign.summary import summarise

    folder = CampaignFolder.open(Path(args.folder))
    may_start(folder, args)
    store = opened_store(folder)
    summary = summarise(store)
    chosen = chosen_causes(summary.root_causes, args.causes)
    if not chosen:
        print("There are no root causes.")
        return 0
    out = Path(args.output) if args.output else folder.path / SCRIPTS
    refuse_links(out, *(out / folder_name(c.signature) for _, c in chosen))
    recipes = _recipes(store, [c.smallest.number for _, c in chosen])
    written = 0

    def show(number: int, cause: RootCause, made: CauseFile) -> None:
        nonlocal written
        written += bool(made.inputs)
        to = out / folder_name(cause.signature)
        _print_script(number, cause, made, to)
        with_script = dataclasses.replace(summary, scripts={made.signature: made})
        # After each script: Ctrl-C in a long run of many root causes leaves whole pages.
        report.save(render(cause_document(number, cause, with_script), "md"), to / _ISSUE)

    write_scripts(
        folder,
        [(n, c, recipes[c.smallest.number]) for n, c in chosen if c.smallest.number in recipes],
        out,
        minimise=not args.no_minimise,
        time_limit_s=args.time_limit,
        jobs=args.jobs,
        on_written=show,
    )
    if not written:
        print("shadowrun: no script could be written.", file=sys.stderr)
    return 0 if written else 2


def _recipes(store: CampaignStore, numbers: Sequence[int]) -> dict[int, Recipe]:
    """Recipes by number, of variants that the store keeps them of: those that do not pass."""
    import json

    from shadowrun.studies.campaign.variants.recipe import Recipe

    wanted = set(numbers)
    try:
        return {
            v.number: Recipe.from_json(json.loads(v.recipe))
            for v in store.variants()
            if v.number in wanted and v.recipe is not None
        }
    except (ValueError, RecursionError) as error:
        from shadowrun.studies.campaign.tables import KIND

        raise KIND.damaged(store.path, error) from error


def _print_script(number: int, cause: RootCause, made: CauseFile, folder: Path) -> None:
    from shadowrun.studies.campaign.causes.script_jobs import SHORT

    shown = {1: "exits 1 here", 0: "exits 0 here"}.get(made.exits, "was not tried")
    where = f"{folder / made.script} ({made.inputs}), {shown}" if made.inputs else "no script"
    print_line(f"{number}. {clip(str(cause.signature), MAX_TEXT)}: {where}")
    if made.text:
        print(f"     {len(made.text.splitlines())} lines: {one_line(str((folder / made.script).with_name(SHORT)))}")
    for line in (*made.said.splitlines()[:4], *(f"note: {note}" for note in made.notes)):
        print(f"     {one_line(line)}")
    sys.stdout.flush()


# -- reproduce ---------------------------------------------------------------------------------------------


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="number of a variant, start of its identity, or a recipe as JSON"
    )
    parser.add_argument("--script", action="store_true", help="also list its operator calls")
    _add_platforms(parser)
    options.add_output_arguments(parser.add_argument_group("report"))


def _reproduce(args: argparse.Namespace) -> int:
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.causes.reproduce import find_variant, reproduce, reproduce_document

    options.check_outputs(args.output)
    folder = CampaignFolder.open(Path(args.folder))
    may_start(folder, args)
    wanted = find_variant(opened_store(folder), args.recipe)
    again = reproduce(folder, wanted)
    program = _program(folder, again.variant.program)
    calls = _calls(folder, again.recipe) if args.script and again.recipe and not again.variant.invalid else ()
    document = reproduce_document(wanted, again, folder.settings.shown_targets, program, calls)
    options.print_report(document, args, always=True)
    return 1 if document.gate is not None and not document.gate.passed else 0


def _program(folder: CampaignFolder, key: str | None) -> Program | None:
    from shadowrun.studies.zoo.program import read_zoo

    return None if key is None else read_zoo(folder.programs).programs.get(key)


def _calls(folder: CampaignFolder, recipe: str) -> list[str]:
    """The calls of a variant, which a worker has made before."""
    import json

    from shadowrun.studies.campaign.variants.recipe import Recipe
    from shadowrun.studies.campaign.variants.variant import Invalid, build
    from shadowrun.studies.zoo.program import read_zoo
    from shadowrun.studies.zoo.report import call_lines

    try:
        return call_lines(build(Recipe.from_json(json.loads(recipe)), read_zoo(folder.programs).programs).graph)
    except Invalid:
        return []


# -- add-known ---------------------------------------------------------------------------------------------


def _add_known(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "causes", nargs="*", default=[], metavar="CAUSE", help="root causes, as for repro (default: all)"
    )
    parser.add_argument(
        "--ledger", metavar="FILE", help=f"ledger to write to, no link (default: the nearest {_LEDGER}, or one here)"
    )
    parser.add_argument("--reason", metavar="TEXT", help="the reason of each line (default: the root cause)")
    parser.add_argument(
        "--expires", type=options.iso_date, metavar="DATE", help="the last day of the lines, such as 2027-01-31"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the lines, and write nothing")


def _known(args: argparse.Namespace) -> int:
    import dataclasses

    from shadowrun.settings import read_settings
    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.causes.known_causes import new_lines
    from shadowrun.studies.campaign.summary import causes_of
    from shadowrun.studies.known_issues_file import add_lines, nearest_ledger

    folder = CampaignFolder.open(Path(args.folder))
    store = opened_store(folder)
    path = Path(args.ledger) if args.ledger else nearest_ledger()
    # Where no file is named, a line of pyproject.toml counts as well: the report reads both.
    lines = read_settings(args.ledger and path).known if path.exists() or not args.ledger else ()
    chosen = chosen_causes(causes_of(store), args.causes)
    made, skipped = new_lines(chosen, store.info.targets, lines, f"campaign {folder.path.name}")
    if args.reason:
        made = [dataclasses.replace(line, reason=args.reason) for line in made]
    for line in made:
        print_line(f"{line.operator} on {line.platform}: {line.status} ({line.reason})")
    for number, why in skipped:
        print_line(f"root cause {number} gets no line: {why}")
    if made and not args.dry_run:
        add_lines(path, made, args.expires)
    count = f"{len(made)} line{'s' * (len(made) != 1)}"
    print_line(
        f"{path}: {count} would be added"
        if args.dry_run
        else f"{path}: {count} added"
        if made
        else f"{path}: nothing to add"
    )
    return 0


ACTIONS: Final = {
    "repro": ("write a script for each root cause: the faulty call with small inputs", _add_repro, _repro),
    "reproduce": ("run one variant again, and say whether the outcome is the recorded one", _add_reproduce, _reproduce),
    "add-known": ("write root causes into the ledger of known issues", _add_known, _known),
}
RUNS_CALLS: Final = ("repro", "reproduce")
"""Actions that run calls of a folder, in a process of their own."""
