"""Runs one variant of a campaign again, in a worker process as the campaign did, and compares the outcomes.

The variant is a number of the campaign, the start of its identity, or a recipe as JSON.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import UsageError, brief
from shadowrun.report.document import (
    Column,
    Document,
    Entries,
    Entry,
    Fact,
    Facts,
    GateLine,
    Note,
    Records,
    Section,
    Span,
    Table,
)
from shadowrun.report.document import Limits as TableLimits
from shadowrun.report.sanitize import MAX_NAME, clip
from shadowrun.studies.campaign.causes.root_causes import signature
from shadowrun.studies.campaign.chunk_work import Chunk, ChunkWork
from shadowrun.studies.campaign.oracles import FIRED, ORACLES, from_mask
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.tables import KIND
from shadowrun.studies.campaign.variants.recipe import Recipe
from shadowrun.studies.isolation.pool import Limits, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.tables import FindingRow, ResultRow, VariantRow
    from shadowrun.studies.isolation.worker_side import Channel
    from shadowrun.studies.zoo.program import Program

__all__ = [
    "ENTRY",
    "Rerun",
    "WantedVariant",
    "difference",
    "find_variant",
    "hex_of",
    "oracle_words",
    "reproduce",
    "reproduce_document",
    "start",
]

ENTRY: Final = "shadowrun.studies.campaign.causes.reproduce:start"
# Of 16^6 = 16.8 million beginnings, 100,000 variants leave two in one so seldom that a shorter text is a mistake.
_LEAST_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class WantedVariant:
    """The variant that is asked for, and what the campaign says of it.

    Attributes:
        number: Its number; -1 for a recipe that the campaign did not make.
        recipe: JSON; None where the number makes it.
        variant: Its row; None if there is none.
        results: Its results, by target.
    """

    number: int
    recipe: str | None = None
    variant: VariantRow | None = None
    results: tuple[ResultRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Rerun:
    """What became of the variant now.

    Attributes:
        recipe: JSON; empty where it could not be made.
        variant: Its row.
        results: Its results, by target; none where it is invalid.
    """

    recipe: str
    variant: VariantRow
    results: tuple[ResultRow, ...]


def find_variant(store: CampaignStore, text: str) -> WantedVariant:
    """Find a variant in a store.

    Args:
        store: The store.
        text: Number, start of the identity, or recipe.

    Raises:
        UsageError: It is none of these, or the store has no such variant.
    """
    if text.lstrip().startswith("["):
        return _by_recipe(store, text)
    rows: list[VariantRow] = []
    if text.isascii() and text.isdecimal():
        # Any number makes a recipe, also one that the campaign did not come to.
        # 18 digits: integers of SQLite have 63 bits.
        number = int(text[:18])
        rows = [v for v in store.variants() if v.number == number]
        if not rows:
            return WantedVariant(number)
    elif len(text) >= _LEAST_DIGITS and set(text) <= set("0123456789abcdef"):
        rows = [v for v in store.variants() if v.identity is not None and hex_of(v.identity).startswith(text)]
        # Duplicates have the same identity: the variant that was run is meant.
        rows = [v for v in rows if v.duplicate_of < 0] or rows[:1]
    if len(rows) != 1:
        what = f"{len(rows)} identities begin so" if rows else "the campaign has no such variant"
        raise UsageError(
            f"No variant {brief(text)}: {what}. Give a number or an identity of the report, or a recipe such as "
            '\'["9d0c1b2a3f4e",[["insert",3,0,"tanh"]],2]\'.',
            slug="unknown-variant",
        )
    recipe = rows[0].recipe
    try:
        return _with_results(store, rows[0], None if recipe is None else _checked(recipe))
    except (ValueError, RecursionError) as error:
        raise KIND.damaged(store.path, error) from error


def _checked(recipe: str) -> str:
    # In the form of the store, where recipes are compared as texts: a user may type other blanks.
    return json.dumps(Recipe.from_json(json.loads(recipe)).to_json(), separators=(",", ":"))


def _by_recipe(store: CampaignStore, text: str) -> WantedVariant:
    try:
        recipe = _checked(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{brief(text)} is no recipe: {error}.", slug="unknown-variant") from error
    found = next((v for v in store.variants() if v.recipe == recipe), None)
    return WantedVariant(-1, recipe) if found is None else _with_results(store, found, recipe)


def _with_results(store: CampaignStore, variant: VariantRow, recipe: str | None) -> WantedVariant:
    # Results of a duplicate are those of the variant that it is equal to.
    number = variant.duplicate_of if variant.duplicate_of >= 0 else variant.number
    results = tuple(r for r in store.results() if r.number == number)
    return WantedVariant(variant.number, recipe, variant, results)


def hex_of(identity: int) -> str:
    """The first 64 bits of an identity as the report prints them."""
    return f"{identity & (1 << 64) - 1:016x}"


def reproduce(folder: CampaignFolder, wanted: WantedVariant) -> Rerun:
    """Run a variant on all targets of its campaign.

    Args:
        folder: The campaign; its platforms are started.
        wanted: The variant.

    Raises:
        PlatformError: A platform is absent.
    """
    s = folder.settings
    # A recipe that the campaign did not make has no number: any serves in a store of one variant.
    number = max(wanted.number, 0)
    with tempfile.TemporaryDirectory(prefix="shadowrun-") as scratch:
        settings = s.for_workers(folder.programs.absolute(), 1) | {
            # Its own folder: in that of the campaign, the variant is marked as seen, and would be skipped as a
            # duplicate.
            "claims": str(Path(scratch) / "claims"),
            "n_claims": 1,
            "recipe": wanted.recipe,
        }
        store = CampaignStore.begin(Path(scratch) / "variant", folder.info())
        work = _Kept(store, iter([Chunk(number, number + 1)]), len(s.shown_targets))
        with contextlib.closing(store):
            pool: Pool[Chunk] = Pool(ENTRY, settings, 1, Limits(s.timeout_s, s.memory_bytes), work)
            with contextlib.closing(pool):
                pool.run()
            work.save()
            (variant,) = store.variants()
            return Rerun(work.recipe, variant, tuple(store.results()))


class _Kept(ChunkWork):
    """Keeps the recipe, which a store has only of what does not pass.

    Attributes:
        recipe: JSON; empty until it is known.
    """

    recipe = ""

    def receive(self, task: Chunk, line: list[Any]) -> None:
        """A variant, or its result on a target."""
        if line[0] == "v":
            self.recipe = line[7] or ""
        super().receive(task, line)


def start(settings: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """Prepare the worker; gives the function that runs the variant.

    Args:
        settings: Of `reproduce`.
        channel: To the pool.

    Raises:
        ShadowrunError: A platform is absent.
    """
    from shadowrun.studies.campaign import worker

    if settings["recipe"] is None:
        return worker.start(settings, channel)
    from shadowrun.studies.campaign.run_variants import VariantRunner
    from shadowrun.studies.campaign.variants.program_draft import Library
    from shadowrun.studies.campaign.variants.programs import lazily

    recipe = Recipe.from_json(json.loads(settings["recipe"]))
    maker = _Fixed(recipe, Library({p.id: p for p in lazily(Path(settings["programs"]))}))
    return worker.VariantWorker(settings, channel, maker, VariantRunner(worker.runner_settings(settings))).run


class _Fixed:
    """Makes the variant of one recipe, whatever the number."""

    def __init__(self, recipe: Recipe, library: Any) -> None:
        self._recipe, self._library = recipe, library

    def variant(self, _: int, /) -> Any:
        """The variant."""
        from shadowrun.studies.campaign.variants.variant import build

        return build(self._recipe, self._library)


def difference(then: ResultRow, now: ResultRow) -> str:
    """What differs between two results of one variant on one target; empty if nothing does."""
    if then.status != now.status:
        return f"it was {then.status}, and is {now.status}"
    before, after = _signatures(then.findings), _signatures(now.findings)
    if before != after:
        gone, more = sorted(before - after), sorted(after - before)
        return "; ".join([*(f"gone: {text}" for text in gone), *(f"new: {text}" for text in more)])
    if then.oracles != now.oracles:
        changed = sorted(_names(then.oracles) ^ _names(now.oracles))
        return f"other verdicts of {', '.join(changed) or 'the oracles'}"
    return ""


def _names(mask: int) -> frozenset[str]:
    return frozenset() if mask < 0 else from_mask(mask)


def _signatures(findings: Sequence[FindingRow]) -> set[str]:
    from shadowrun.studies.campaign.run_variants import VariantFinding

    return {str(signature(VariantFinding(*f))) for f in findings}


def oracle_words(mask: int) -> dict[str, str]:
    """The verdict of each oracle on a result."""
    if mask < 0:
        return {}
    names = from_mask(mask)
    return {name: "differs" if name in names else "same" for name in (*ORACLES, FIRED)}


# What `campaign reproduce` prints: the variant, its outcome on each target, and whether it is the recorded one.

_ALL: Final = TableLimits(100, 1000, 1000)


def reproduce_document(
    wanted: WantedVariant, again: Rerun, targets: Sequence[str], program: Program | None, calls: Sequence[str] = ()
) -> Document:
    """A variant that was run again.

    Args:
        wanted: What the campaign says of it.
        again: What became of it now.
        targets: Names of the targets.
        program: The program that it was made of; None if it is not known.
        calls: Its operator calls, one a line.
    """
    before = {r.target: r for r in wanted.results}
    after = {r.target: r for r in again.results}
    differences = _differences(wanted, again, before, after)
    blocks: list[Any] = [Facts(tuple(_facts(wanted, again, program)))]
    for t, name in enumerate(targets):
        if (now := after.get(t)) is not None:
            blocks.append(_target(name, now, before.get(t), differences))
    if again.variant.invalid:
        blocks.append(Note(f"invalid: {again.variant.invalid}", "warn"))
    if calls:
        rows = tuple((str(k), text) for k, text in enumerate(calls))
        columns = (Column("call", "number"), Column("operator and arguments", "name"))
        blocks.append(Section("Calls", (Table(columns, rows, noun="calls", limits=_ALL),), count=len(rows)))
    records = Records(
        ("target", "status", "findings", "oracles", "same"),
        tuple((targets[t], r.status, len(r.findings), r.oracles, t not in differences) for t, r in after.items()),
    )
    return Document(
        f"variant {wanted.number if wanted.number >= 0 else 'of a recipe'}",
        tuple(blocks),
        _data(wanted, again, targets, differences),
        records,
        _gate(wanted, differences),
    )


def _facts(wanted: WantedVariant, again: Rerun, program: Program | None) -> list[Fact]:
    facts = []
    if program is not None:
        facts.append(
            Fact("program", f"{program.name} ({program.source}, {program.id}), {len(program.graph.nodes)} calls")
        )
    if again.recipe:
        _, mutations, seed = json.loads(again.recipe)
        steps = ", ".join(f"{name} {json.dumps(params)}" if params else name for name, *params in mutations)
        facts.append(Fact("mutations", steps or "none"))
        facts.append(Fact("seed", str(seed)))
        facts.append(Fact("recipe", shlex.quote(again.recipe), "action", command=True))
    if again.variant.identity is not None:
        facts.append(Fact("identity", hex_of(again.variant.identity)))
    if wanted.variant is not None and wanted.variant.duplicate_of >= 0:
        facts.append(Fact("equal to", f"number {wanted.variant.duplicate_of}, whose outcome counts for both"))
    return facts


def _target(name: str, now: ResultRow, then: ResultRow | None, differences: dict[int, str]) -> Section:
    tone = {"ok": "good", "finding": "bad"}.get(now.status, "warn")
    facts = [Fact("status", f"{now.status}{f': {now.reason}' if now.reason else ''}", "strong")]
    facts.append(Fact("operators", f"{len(now.ops)} in {now.n_calls} calls that were judged"))
    if then is None:
        facts.append(Fact("recorded", "nothing: the campaign has no result of it on this target"))
    elif now.target in differences:
        facts.append(Fact("recorded", f"another result: {differences[now.target]}", "strong"))
    else:
        facts.append(Fact("recorded", "the same result"))
    blocks: list[Any] = [Facts(tuple(facts))]
    if verdicts := oracle_words(now.oracles):
        rows = tuple((o, (Span(v, "bad" if v == "differs" else "good"),)) for o, v in verdicts.items())
        blocks.append(Table((Column("oracle", "name"), Column("results")), rows, noun="oracles", limits=_ALL))
    if now.findings:
        blocks.append(Entries(tuple(map(_entry, now.findings)), noun="findings"))
    return Section(clip(name, MAX_NAME), tuple(blocks), tone="" if tone == "good" else tone)


def _entry(f: FindingRow) -> Entry:
    facts = [Fact("why", ", ".join(filter(None, (f.cause, f.explanation))) or "not known", "strong")]
    if f.message:
        facts.append(Fact("evidence", f.message))
    return Entry(f.op or "the program as a whole", tuple(facts), f"{f.kind} {f.dtype} {f.phase}".replace("  ", " "))


def _differences(
    wanted: WantedVariant, again: Rerun, before: dict[int, ResultRow], after: dict[int, ResultRow]
) -> dict[int, str]:
    """What is not as it was recorded, by target; -1 for the variant itself."""
    found = {t: text for t, then in before.items() if t in after and (text := difference(then, after[t]))}
    if wanted.variant is not None and (wanted.variant.invalid or "") != (again.variant.invalid or ""):
        was, now = wanted.variant.invalid or "valid", again.variant.invalid or "valid"
        found[-1] = f"it was {was}, and is {now}"
    return found


def _gate(wanted: WantedVariant, differences: dict[int, str]) -> GateLine | None:
    if wanted.variant is None:
        return None
    if differences:
        return GateLine("DIFFERS from the recorded result", passed=False)
    return GateLine("the same as the recorded result", passed=True)


def _finding_data(f: FindingRow) -> dict[str, str]:
    return {
        "op": f.op,
        "dtype": f.dtype,
        "kind": f.kind,
        "cause": f.cause,
        "explanation": f.explanation,
        "message": f.message,
        "phase": f.phase,
    }


def _data(wanted: WantedVariant, again: Rerun, targets: Sequence[str], differences: dict[int, str]) -> dict[str, Any]:
    return {
        "format": 1,
        "number": wanted.number,
        "recipe": json.loads(again.recipe) if again.recipe else None,
        "identity": None if again.variant.identity is None else hex_of(again.variant.identity),
        "invalid": again.variant.invalid,
        "is_recorded": wanted.variant is not None,
        "results": [
            {
                "target": targets[r.target],
                "status": r.status,
                "reason": r.reason,
                "oracles": oracle_words(r.oracles),
                "ops": dict(r.ops),
                "findings": list(map(_finding_data, r.findings)),
                "difference": differences.get(r.target),
            }
            for r in again.results
        ],
    }
