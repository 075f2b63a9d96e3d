"""One script for each root cause: its recipe with fewer mutations, its operator with smaller inputs, a short text.

The variant runs again in this process. Mutations without which it still shows the root cause are dropped; then the
faulty call is taken out of it with its inputs, which `shadowrun.repro` makes smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from shadowrun.errors import ShadowrunError, UsageError
from shadowrun.repro.snippet import snippet
from shadowrun.studies.campaign.findings import signature
from shadowrun.studies.campaign.reduction import ddmin
from shadowrun.studies.campaign.runner import VariantRunner, program_of
from shadowrun.studies.campaign.variant import Invalid, build
from shadowrun.studies.sweep.cases import Kind
from shadowrun.studies.sweep.run_case import CaseRunner

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shadowrun.repro.script import Repro, ReproOptions
    from shadowrun.studies.campaign.draft import HasGraph
    from shadowrun.studies.campaign.findings import RootCause, Signature
    from shadowrun.studies.campaign.recipe import Mutation, Recipe
    from shadowrun.studies.campaign.runner import RunnerSettings

__all__ = ["CauseScript", "write_script"]

_KINDS: Final = {
    **dict.fromkeys((Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE), "unsupported"),
    **dict.fromkeys((Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK), "fallback"),
    Kind.ERROR: "error",
}
"""Kinds of a case to those of a run's findings; all others are mismatches."""
_ENDS: Final = (Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY)
_CALL_LIMIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class CauseScript:
    """What was written for a root cause.

    Attributes:
        recipe: The variant that shows it, with the fewest mutations.
        repro: The script; None where none shows the operator alone.
        text: The short text; empty where the inputs are too large for one.
        note: Why there is no script.
    """

    recipe: Recipe
    repro: Repro | None = None
    text: str = ""
    note: str = ""


def write_script(
    cause: RootCause,
    recipe: Recipe,
    programs: Mapping[str, HasGraph],
    settings: RunnerSettings,
    folder: Path,
    options: ReproOptions,
) -> CauseScript:
    """Minimise a root cause, and write its script.

    Args:
        cause: The root cause.
        recipe: Of its smallest variant.
        programs: Programs by id.
        settings: Platforms of the campaign.
        folder: Where to write; it is created if needed.
        options: How scripts are made.
    """
    if cause.signature.kind in _ENDS:
        note = "the variant ends its process: run `shadowrun campaign reproduce` with this recipe in a fresh process"
        return CauseScript(recipe, note=note)
    target = max(cause.smallest.target, 0)
    alone = replace(settings, targets=(settings.targets[target],))
    recipe = _fewest_mutations(cause.signature, recipe, programs, VariantRunner(alone))
    try:
        repro = _operator_script(cause, recipe, programs, alone, folder, options)
    except ShadowrunError as error:
        return CauseScript(recipe, note=str(error))
    return CauseScript(recipe, repro, snippet(repro.spec, alone.flaws))


def _fewest_mutations(
    wanted: Signature, recipe: Recipe, programs: Mapping[str, HasGraph], runner: VariantRunner
) -> Recipe:
    def holds(mutations: tuple[Mutation, ...]) -> bool:
        try:
            variant = build(replace(recipe, mutations=mutations), programs)
        except Invalid:
            return False
        return any(signature(f) == wanted for f in runner.run(variant).findings)

    # A fault that does not repeat itself must not be minimised.
    return replace(recipe, mutations=ddmin(recipe.mutations, holds)) if holds(recipe.mutations) else recipe


def _operator_script(
    cause: RootCause,
    recipe: Recipe,
    programs: Mapping[str, HasGraph],
    settings: RunnerSettings,
    folder: Path,
    options: ReproOptions,
) -> Repro:
    """The script of the faulty call, taken out of the variant.

    Raises:
        UsageError: No call of the variant shows it alone.
    """
    wanted = cause.signature
    runner = CaseRunner(settings.targets[0], settings.ref, _CALL_LIMIT_S, lambda: None, capture=True)
    run = runner.watch(program_of(build(recipe, programs)))
    kind = _KINDS.get(Kind(wanted.kind), "mismatch")
    same = [f for f in run.findings() if (f.op, f.kind) == (wanted.op, kind) and f.captured >= 0]
    # One operator may have several findings in the variant: the one of the root cause comes first.
    same.sort(key=lambda f: (str(f.cause or "") != wanted.cause, f.explanation not in cause.explanations))
    if not same:
        raise UsageError(
            f"{wanted.op or 'No single operator'} alone does not show it: reproduce the whole variant with `shadowrun "
            "campaign reproduce`.",
            slug="no-repro",
        )
    return run.repro(same[0], folder, minimise=options.minimise, time_limit_s=options.time_limit_s)
