"""One script for each root cause: its recipe with fewer mutations, its operator with smaller inputs, a short text.

The variant runs again in this process. Mutations without which it still shows the root cause are dropped; then the
faulty call is taken out of it with its inputs, which `shadowrun.repro` makes smaller. Of a call that ends its process,
`catch_call` leaves the inputs in a file, and `write_end_script` reads them in the next process.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from shadowrun.errors import ShadowrunError, UsageError
from shadowrun.platforms import parse
from shadowrun.platforms.device import resolve
from shadowrun.platforms.fingerprint import fingerprint, versions
from shadowrun.repro import call_code
from shadowrun.repro.builder import run_story, run_versions
from shadowrun.repro.call_replayer import operator
from shadowrun.repro.platform_setup import platform_setup_of
from shadowrun.repro.script import EXIT_STATUS, TIME_LIMIT_S, ScriptSpec, publish
from shadowrun.repro.snippet import snippet
from shadowrun.studies.campaign.causes.root_causes import signature
from shadowrun.studies.campaign.metamorphic import EXPLANATIONS, REFERENCE_FORM, Metamorphic
from shadowrun.studies.campaign.run_variants import VariantRunner
from shadowrun.studies.campaign.variants.variant import Invalid, build
from shadowrun.studies.campaign.variants.variant_program import program_of
from shadowrun.studies.sweep.cases import Kind
from shadowrun.studies.sweep.last_call import LastCallRecorder, load_last_call
from shadowrun.studies.sweep.run_case import CaseRunner
from shadowrun.studies.sweep.scripts import itself_fields, smallest_mismatch
from shadowrun.types import RunInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from shadowrun.repro.script import Repro, ReproOptions
    from shadowrun.studies.campaign.causes.root_causes import Signature
    from shadowrun.studies.campaign.run_variants import RunnerSettings
    from shadowrun.studies.campaign.variants.program_draft import HasGraph, Library
    from shadowrun.studies.campaign.variants.recipe import Mutation, Recipe
    from shadowrun.studies.campaign.variants.variant import Variant

__all__ = ["ENDS", "CauseScript", "Wanted", "catch_call", "ddmin", "write_end_script", "write_script"]

ENDS: Final = (Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY)
"""Verdicts of a process that ended."""
# Kinds of a case to those of a run's findings; all others are mismatches.
_KINDS: Final = {
    **dict.fromkeys((Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE), "unsupported"),
    **dict.fromkeys((Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK), "fallback"),
    Kind.ERROR: "error",
}
_CALL_LIMIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The root cause that a script is to show.

    Attributes:
        signature: What its findings share.
        explanations: Of its findings, the most frequent first.
        target: Number of a target that shows it, in `RunnerSettings.names`.
        recipe: Of its smallest variant.
    """

    signature: Signature
    explanations: tuple[str, ...]
    target: int
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class CauseScript:
    """What was written for a root cause.

    Attributes:
        recipe: The variant that shows it, with the fewest mutations.
        repro: The script; None where none shows it alone.
        text: The short text; empty where the fault needs more than one call.
        note: Why there is no script, or why its inputs are large.
    """

    recipe: Recipe
    repro: Repro | None = None
    text: str = ""
    note: str = ""


def write_script(
    wanted: Wanted,
    programs: Mapping[str, HasGraph] | Library,
    settings: RunnerSettings,
    folder: Path,
    options: ReproOptions,
) -> CauseScript:
    """Minimise a root cause, and write its script.

    Args:
        wanted: The root cause.
        programs: Programs by id.
        settings: Platforms of the campaign.
        folder: Where to write; it is created if needed.
        options: How scripts are made.
    """
    alone = _alone(settings, wanted.target)
    runner = VariantRunner(alone)
    smallest = _fewest_mutations(wanted, programs, runner, len(alone.backends)) if options.minimise else wanted.recipe
    wanted = replace(wanted, recipe=smallest)
    try:
        variant = build(smallest, programs)
        if variant.execution.metamorphic and any(text in EXPLANATIONS.values() for text in wanted.explanations):
            repro = _itself_script(wanted, variant, alone, folder, options)
        elif backend := (*alone.backends, variant.execution.compile)[0]:
            repro = _compiled_script(wanted, variant, alone, backend, folder, options)
        else:
            repro = _operator_script(wanted, variant, alone, folder, options)
    except (ShadowrunError, Invalid) as error:
        return CauseScript(smallest, note=str(error))
    is_simulated = repro.spec.target is not None and _is_simulated(repro.spec.target.device)
    return CauseScript(smallest, repro, snippet(repro.spec, alone.flaws if is_simulated else None))


def catch_call(
    wanted: Wanted, programs: Mapping[str, HasGraph] | Library, settings: RunnerSettings, folder: Path
) -> None:
    """Run a variant that ends its process, and leave each call in a file before it is made."""
    alone = _alone(settings, wanted.target)
    VariantRunner(alone)  # enables a simulated device
    platform = resolve(alone.targets[0])
    if platform.remote is not None:
        raise UsageError(f"{platform} runs in a worker process, which takes no whole variants.", slug="no-repro")
    folder.mkdir(parents=True, exist_ok=True)
    prepared = program_of(build(wanted.recipe, programs))(platform.device)
    with platform.context(), LastCallRecorder(folder, platform):
        prepared()
    platform.synchronize()  # what was launched last may crash after the program has returned


def write_end_script(
    wanted: Wanted, settings: RunnerSettings, caught: Path, folder: Path, limits: tuple[float, int]
) -> CauseScript:
    """Write the script of the call that `catch_call` left.

    Args:
        wanted: The root cause.
        settings: Platforms of the campaign.
        caught: Folder with the call.
        folder: Where to write.
        limits: Seconds and bytes that the call may take.
    """
    alone = _alone(settings, wanted.target)
    call = load_last_call(caught)
    if call is None:
        return CauseScript(wanted.recipe, note="its process does not end any more, or between two calls")
    VariantRunner(alone)
    info = _info(alone)
    target = platform_setup_of(info.target, info.target_fingerprint)
    plan = operator(call.op, checked=False)  # this campaign called it: it is no name from a file
    parts = call_code.script_call(plan, call.args, call.kwargs, ["output 0"])
    shown = call_code.shown_inputs(parts["inputs"])
    why = ", ".join(filter(None, (wanted.signature.kind, *wanted.explanations[:1])))
    spec = ScriptSpec(
        kind="ends",
        title=f"{plan.name} ends its process on {target.name}: {why}.",
        story=("Seen by shadowrun campaign.", *run_story(info, ""), f"Inputs: {shown}.", "", EXIT_STATUS),
        target=target,
        ref=target,
        values={"seconds": limits[0], "n_bytes": limits[1]},
        **parts,
    )
    repro = publish(spec, folder, run_versions(info), [], shown=shown, limit_s=limits[0] + TIME_LIMIT_S)
    # The script runs the target alone; the short text prints both results.
    both = replace(spec, ref=platform_setup_of(info.ref, info.ref_fingerprint))
    return CauseScript(wanted.recipe, repro, snippet(both, alone.flaws))


def _alone(settings: RunnerSettings, target: int) -> RunnerSettings:
    """The settings with one target: a platform, or one with one backend."""
    backends: tuple[str, ...] = ()
    if target >= len(settings.targets):
        # As `RunnerSettings.names` has them: for each backend, all platforms.
        backends = (settings.backends[target // len(settings.targets) - 1],)
    spec = settings.targets[max(target, 0) % len(settings.targets)]
    return replace(settings, targets=(spec,), backends=backends, flaws=settings.flaws if _is_simulated(spec) else None)


def _is_simulated(spec: str) -> bool:
    return parse(spec).device_type not in ("cpu", "cuda")


def _info(alone: RunnerSettings) -> RunInfo:
    target, ref = resolve(alone.targets[0]), resolve(alone.ref)
    return RunInfo(alone.targets[0], alone.ref, fingerprint(target), fingerprint(ref), versions())


def _fewest_mutations(
    wanted: Wanted, programs: Mapping[str, HasGraph] | Library, runner: VariantRunner, target: int
) -> Recipe:
    recipe = wanted.recipe

    def holds(mutations: tuple[Mutation, ...]) -> bool:
        try:
            variant = build(replace(recipe, mutations=mutations), programs)
        except Invalid:
            return False
        return any(signature(f) == wanted.signature for f in runner.run(variant, target).findings)

    # A fault that does not repeat itself must not be minimised.
    return replace(recipe, mutations=ddmin(recipe.mutations, holds)) if holds(recipe.mutations) else recipe


def _operator_script(
    wanted: Wanted, variant: Variant, settings: RunnerSettings, folder: Path, options: ReproOptions
) -> Repro:
    """The script of the faulty call, taken out of the variant.

    Raises:
        UsageError: No call of the variant shows it alone.
    """
    s = wanted.signature
    runner = CaseRunner(settings.targets[0], settings.ref, _CALL_LIMIT_S, lambda: None, capture=True)
    run = runner.watch(program_of(variant))
    kind = _KINDS.get(Kind(s.kind), "mismatch")
    same = [f for f in run.findings() if (f.op, f.kind) == (s.op, kind) and f.captured >= 0]
    # One operator may have several findings in the variant: the one of the root cause comes first.
    same.sort(key=lambda f: (str(f.cause or "") != s.cause, f.explanation not in wanted.explanations))
    if not same:
        raise UsageError(
            f"{s.op or 'No single operator'} alone does not show it: run the whole variant again with `shadowrun "
            "campaign reproduce`.",
            slug="no-repro",
        )
    return run.repro(same[0], folder, minimise=options.minimise, time_limit_s=options.time_limit_s)


def _itself_script(
    wanted: Wanted, variant: Variant, settings: RunnerSettings, folder: Path, options: ReproOptions
) -> Repro:
    """The script of a call in which a platform differs from itself.

    Raises:
        UsageError: No call of the variant shows it.
    """
    relation = variant.execution.metamorphic
    # The reference's own fault needs no device.
    on_reference = wanted.target < 0
    info = _info(settings)
    spec, facts = (info.ref, info.ref_fingerprint) if on_reference else (info.target, info.target_fingerprint)
    platform = resolve(spec)
    platform.start()
    notes: list[str] = []
    try:
        pairs = Metamorphic(platform)
        made = pairs.calls(program_of(variant)(torch.device("cpu")))
        first_of = partial(pairs.first_mismatch, relation)
        found = smallest_mismatch(first_of, made, wanted.signature.op, options.seconds, notes)
    finally:
        platform.stop()
    if found is None:
        raise UsageError(f"{wanted.signature.op} alone does not show it on {spec}.", slug="no-repro")
    fields = itself_fields(platform_setup_of(spec, facts), REFERENCE_FORM[relation], *found)
    shown = call_code.shown_inputs(fields["inputs"])
    # The others are free text of the folder.
    why = next(text for text in wanted.explanations if text in EXPLANATIONS.values())
    script = ScriptSpec(
        title=f"{wanted.signature.op} on {spec}: {why}.",
        story=("Seen by shadowrun campaign.", *run_story(info, ""), f"Inputs: {shown}.", "", EXIT_STATUS),
        **fields,
    )
    return publish(script, folder, run_versions(info), notes, shown=shown)


def _compiled_script(
    wanted: Wanted, variant: Variant, settings: RunnerSettings, backend: str, folder: Path, options: ReproOptions
) -> Repro:
    """The script of the faulty call, or of the smallest part of the variant that is compiled wrongly.

    Raises:
        UsageError: No part of it is wrong by itself.
    """
    from shadowrun.studies.campaign.variants.compiled_variant import compiled  # imports the compiler

    if not any(text.startswith(backend) for text in wanted.explanations):
        return _operator_script(wanted, variant, settings, folder, options)  # of the same variant in eager mode
    platform = resolve(settings.targets[0])
    with platform.context():
        report = compiled(variant, backend, platform.device, regions=True)
        written = report.repro(folder, time_limit_s=options.time_limit_s) if not report.ok else []
    if not written:
        raise UsageError(
            f"No graph of the variant by itself is compiled wrongly by {backend}: run it again with `shadowrun "
            "campaign reproduce`.",
            slug="no-repro",
        )
    return written[0]


T = TypeVar("T")


def ddmin(items: Sequence[T], holds: Callable[[tuple[T, ...]], bool], max_tries: int = 200) -> tuple[T, ...]:
    """A subset from which no single item can be left out (Zeller and Hildebrandt, 2002), the order kept.

    Args:
        items: All items; `holds` is true for them.
        holds: Whether a subset still has the property.
        max_tries: Calls of `holds` after which the smallest subset so far is the answer.
    """
    left = tuple(items)
    if not left or holds(()):
        return ()
    n_parts, tries = 2, 1
    while len(left) > 1 and tries < max_tries:
        parts = _parts(left, n_parts)
        smaller = None
        for k in range(len(parts)):
            rest = tuple(item for j, part in enumerate(parts) if j != k for item in part)
            tries += 1
            if holds(rest):
                smaller = rest
                break
        if smaller is not None:
            left, n_parts = smaller, max(n_parts - 1, 2)
        elif n_parts >= len(left):
            break
        else:
            n_parts = min(2 * n_parts, len(left))
    return left


def _parts(items: tuple[T, ...], n: int) -> list[tuple[T, ...]]:
    """The items in `n` parts of nearly equal length."""
    edges = [len(items) * k // n for k in range(n + 1)]
    return [items[a:b] for a, b in itertools.pairwise(edges)]
