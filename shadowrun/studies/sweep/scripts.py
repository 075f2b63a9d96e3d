"""Reproduction scripts for the findings of a sweep.

The case is rebuilt, and the smallest script that shows the fault is written. If one operator of the case is wrong, the
case runs again under a comparison, and the script is that of the operator call. If a platform disagrees with itself, or
a call ends its process, the script needs only that platform. For any other fault the script runs the whole case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shadowrun import sim
from shadowrun.current_folder import in_empty_folder
from shadowrun.errors import UsageError
from shadowrun.limits import bounded_memory
from shadowrun.platforms import parse
from shadowrun.platforms.device import resolve
from shadowrun.platforms.untrusted_specs import simulated_flaws
from shadowrun.repro import call_code
from shadowrun.repro.builder import run_story, run_versions
from shadowrun.repro.call_replayer import ReplayOutcome, operator
from shadowrun.repro.minimise import minimised
from shadowrun.repro.platform_setup import allowed_platforms, check_harmless, platform_setups
from shadowrun.repro.quoting import Code, code
from shadowrun.repro.result_checks import Check, checks_of
from shadowrun.repro.script import EXIT_STATUS, TIME_LIMIT_S, Repro, ReproOptions, ScriptSpec, publish
from shadowrun.studies.sweep.case_code import expression_of
from shadowrun.studies.sweep.cases import INVARIANCE, Kind, Part
from shadowrun.studies.sweep.invariance import Invariance
from shadowrun.studies.sweep.last_call import CasePlatform, last_call
from shadowrun.studies.sweep.rebuild_case import rebuild_case
from shadowrun.studies.sweep.run_case import CaseRunner
from shadowrun.studies.sweep.sweep_findings import ON_REFERENCE
from shadowrun.torch_private import schema_of
from shadowrun.types import RunInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.repro.platform_setup import PlatformSetup
    from shadowrun.studies.sweep.coverage_file import SweepInfo
    from shadowrun.studies.sweep.invariance import LayoutVariant, VariantMismatch
    from shadowrun.studies.sweep.rebuild_case import Origin, RebuiltCase
    from shadowrun.studies.sweep.sweep_findings import SweepFinding
    from shadowrun.types import Permissions

__all__ = ["itself_fields", "smallest_mismatch", "write_script"]

_PROCESS_ENDS = (Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY)
_CALL_LIMIT_S = 60.0
# Kinds of a sweep to those of a run's findings.
_KINDS = {
    **dict.fromkeys((Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE), "unsupported"),
    **dict.fromkeys((Kind.ERROR, *_PROCESS_ENDS), "error"),
    **dict.fromkeys((Kind.MISMATCH, Kind.FORM, Kind.REFERENCE), "mismatch"),
    **dict.fromkeys((Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK), "fallback"),
}
_REFERENCE_VARIANT = {Part.TAIL: "element by element", Part.SLICE: "alone", Part.LAYOUT: "contiguous"}
_TITLES = {
    Kind.MISSING_ERROR: "is accepted",
    Kind.WRONG_ERROR: "is refused by another exception",
    Kind.MISMATCH: "is wrong",
    Kind.FORM: "has the wrong form",
}
# The texts of `Pool._enforce_limits`: a coverage file has no column for limits.
_NUMBER = r"(\d{1,20}(?:\.\d{1,20})?(?:e\+?\d{1,3})?)"
_SECONDS = re.compile(rf"no end within {_NUMBER} s", re.ASCII)
_DEFAULT_SECONDS, _DEFAULT_GIB = 60.0, 4.0
_MAX_SECONDS, _MAX_GIB = 3600.0, 1024.0
"""Bounds on the limits that an explanation names: an untrusted file may name any."""
_GIB = re.compile(rf"more than {_NUMBER} GiB", re.ASCII)


def write_script(
    sweep_finding: SweepFinding, info: SweepInfo, origin: Origin, directory: Path, options: ReproOptions
) -> Repro:
    """Write a script for a finding of a sweep.

    Args:
        sweep_finding: The finding.
        info: Platforms of the sweep.
        origin: Source of the inputs.
        directory: Folder to write to; it is created if needed.
        options: How to make it; inputs are made smaller only if one operator shows the fault.

    Raises:
        UsageError: No script can show the fault, or its inputs cannot be rebuilt.
        PlatformError: A platform of the sweep is absent, or it needs more than this process and the user did not
            name it.
    """
    run = allowed_platforms(_run_of(info), options.allowed)
    # A coverage file may name inputs of any size.
    with bounded_memory(), _simulated(run):
        writer = _Writer(sweep_finding, run, origin, directory, options.seconds)
        return writer.write(options.allowed)


def _run_of(info: SweepInfo) -> RunInfo:
    """The platforms of a sweep as a `RunInfo`."""
    target = info.target_fingerprint.get("platform", info.target.partition(" (")[0])
    return RunInfo(target, info.ref, info.target_fingerprint, info.ref_fingerprint, info.versions, started=info.started)


@contextlib.contextmanager
def _simulated(info: RunInfo) -> Iterator[None]:
    """Enable the simulated target with the flaws of the sweep."""
    flaws = simulated_flaws(info.target_fingerprint)
    if flaws is None:
        yield
        return
    if not sim.is_enabled():
        sim.enable(parse(info.target).device_type)
    with sim.flaws(*flaws):
        yield


class _Writer:
    """Writes one script."""

    def __init__(
        self, sweep_finding: SweepFinding, run: RunInfo, origin: Origin, directory: Path, seconds: float
    ) -> None:
        self._run = run
        self._sweep_finding, self._finding, self._case = sweep_finding, sweep_finding.finding, sweep_finding.first
        self._origin, self._directory, self._seconds = origin, directory, seconds
        self._flaws = simulated_flaws(run.target_fingerprint)
        self._target, self._ref = platform_setups(run)
        self._notes: list[str] = []

    def write(self, allowed: Permissions) -> Repro:
        """Write the smallest script that shows the fault."""
        on_reference = self._finding.explanation.startswith(ON_REFERENCE)
        ends = self._finding.kind in _PROCESS_ENDS and not self._finding.op
        rebuilt = rebuild_case(self._sweep_finding, self._origin)
        # In this process such a case would end the process.
        if on_reference or (ends and not self._is_exception()):
            return self._process_end_script(rebuilt, on_reference=on_reference)
        check_harmless(self._run, allowed)  # from here on the case runs in this process
        if self._case.part in INVARIANCE:
            return self._invariance_script(rebuilt)
        # Invalid inputs are refused by the function, often before any operator is called.
        if "::" in self._finding.op and self._case.part is not Part.INVALID:
            made = self._operator_script(rebuilt)
            if made is not None:
                return made
            self._notes.append(f"{self._finding.op} alone does not show it: this is the whole case")
        return self._case_script(rebuilt)

    def _is_exception(self) -> bool:
        """Whether the target raised an out-of-memory exception; if not, the process was killed."""
        return self._finding.kind is Kind.OUT_OF_MEMORY and not _GIB.search(self._finding.explanation)

    # -- one operator of the case --------------------------------------------------------------------

    def _operator_script(self, rebuilt: RebuiltCase) -> Repro | None:
        runner = CaseRunner(self._run.target, self._run.ref, _CALL_LIMIT_S, lambda: None, capture=True)
        with in_empty_folder():
            run = runner.watch(rebuilt.program)
        kind = _KINDS[self._finding.kind]
        same = [f for f in run.findings() if (f.op, f.kind) == (self._finding.op, kind) and f.captured >= 0]
        # One operator may have several findings in the case: the one of the sweep comes first.
        same.sort(key=lambda f: ((f.cause or "") != self._finding.cause, f.explanation != self._finding.explanation))
        if not same:
            return None
        return run.repro(same[0], self._directory, minimise=self._seconds > 0, time_limit_s=self._seconds)

    # -- a platform against itself -------------------------------------------------------------------

    def _invariance_script(self, rebuilt: RebuiltCase) -> Repro:
        if self._finding.kind is not Kind.MISMATCH:
            raise UsageError(
                f"{self._finding.op} runs on {self._target.name} in one way and fails in the other: "
                f"{self._finding.kind}, {self._finding.message}. No script shows that.",
                slug="no-repro",
            )
        platform = resolve(self._run.target)
        platform.start()
        try:
            plan, mismatch = self._smallest_mismatch(Invariance(platform), rebuilt)
        finally:
            platform.stop()
        return self._publish(**itself_fields(self._target, _REFERENCE_VARIANT[self._case.part], plan, mismatch))

    @in_empty_folder()
    def _smallest_mismatch(self, invariance: Invariance, rebuilt: RebuiltCase) -> tuple[OpPlan, VariantMismatch]:
        """The call whose two variants differ, with minimised inputs."""
        # As before each case of the sweep: functions of the database may draw.
        torch.manual_seed(0)
        made = invariance.calls(rebuilt.program(torch.device("cpu")))
        first_of = partial(invariance.first_mismatch, self._case.part)
        found = smallest_mismatch(first_of, made, self._finding.op, self._seconds, self._notes)
        if found is not None:
            return found
        raise UsageError(
            f"{self._case} does not show it any more: {self._finding.op or self._case.operator} agrees with itself on "
            f"{self._target.name} here.",
            slug="no-repro",
        )

    # -- a call that ends its process ----------------------------------------------------------------

    def _process_end_script(self, rebuilt: RebuiltCase, *, on_reference: bool) -> Repro:
        place = self._ref if on_reference else self._target
        limits = _limits(self._finding.explanation)
        run, device = self._run, self._target.device
        platform = CasePlatform(run.ref) if on_reference else CasePlatform(run.target, device, self._flaws)
        if resolve(platform.spec).remote is not None:
            raise UsageError(f"{platform.spec} runs in a worker process, which takes no whole cases.", slug="no-repro")
        call = last_call(self._sweep_finding, self._origin, platform, limits[0])
        values: dict[str, Any] = {"seconds": limits[0], "n_bytes": limits[1]}
        if call is None:
            self._notes.append("no operator that torch's dispatcher sees ends it: this is the whole case")
            expression = expression_of(rebuilt, whole=False)
            shown = {"operator": self._case.operator, **expression.for_spec()}
        else:
            plan = operator(call.op, checked=False)  # the case called it in a child process: it is no name from a file
            shown = call_code.script_call(plan, call.args, call.kwargs, ["output 0"])
        return self._publish(kind="ends", target=place, ref=place, values=values, limit_s=limits[0], **shown)

    # -- the whole case ------------------------------------------------------------------------------

    def _case_script(self, rebuilt: RebuiltCase) -> Repro:
        kind = self._finding.kind
        invalid = self._case.part is Part.INVALID
        compared = kind in (Kind.MISMATCH, Kind.FORM, Kind.REFERENCE)
        if not compared and not invalid and _KINDS.get(kind) == "fallback":
            raise UsageError(f"{self._finding.op} does not fall back any more, or not alone.", slug="no-repro")
        expression = expression_of(rebuilt, whole=compared)
        # A wrong dtype or shape is checked for any bound; the values of such results need not be right.
        allowed = float("inf") if kind is Kind.FORM else 0.0
        return self._publish(
            kind="accepts" if invalid else "mismatch" if compared else "raises",
            operator=self._case.operator,
            target=self._target,
            ref=self._ref,
            checks=tuple(Check(name, allowed) for name in expression.results) if compared else (),
            **expression.for_spec(),
        )

    # -- the script itself ----------------------------------------------------------------------------

    def _publish(self, *, inputs: dict[str, Any], target: PlatformSetup, limit_s: float = 0.0, **facts: Any) -> Repro:
        finding, run, shown = self._finding, self._run, call_code.shown_inputs(inputs)
        why = ", ".join(filter(None, (finding.cause, finding.explanation.removeprefix(ON_REFERENCE))))
        ends = facts["kind"] == "ends"
        what = "ends its process" if ends else _TITLES.get(finding.kind, f"fails ({finding.kind})")
        swept = "" if shown == self._sweep_finding.inputs else f"; in the sweep {self._sweep_finding.inputs}"
        spec = ScriptSpec(
            title=f"{facts['operator']} {what} on {target.name}: {why}.",
            story=(
                f"Seen by shadowrun sweep in {self._case}, seed {self._origin.seed}.",
                *run_story(run, finding.message),
                f"Inputs: {shown}{swept}.",
                "",
                EXIT_STATUS,
            ),
            inputs=inputs,
            target=target,
            **facts,
        )
        # The limit of the call, and the time to start Python and import torch.
        limit_s += TIME_LIMIT_S
        return publish(spec, self._directory, run_versions(run), self._notes, shown=shown, limit_s=limit_s)


def smallest_mismatch(
    first_of: Callable[[OpPlan, tuple[Any, ...], dict[str, Any]], VariantMismatch | None],
    made: Iterable[tuple[OpPlan, tuple[Any, ...], dict[str, Any]]],
    op: str,
    seconds: float,
    notes: list[str],
) -> tuple[OpPlan, VariantMismatch] | None:
    """The first of some calls in which a platform differs from itself, with minimised inputs; None if there is none.

    Args:
        first_of: The first pair of forms of a call that differs, as `Invariance.first_mismatch` finds it.
        made: The calls.
        op: Only those of this operator.
        seconds: Time limit of the minimisation.
        notes: Gets a sentence if that was too short.
    """
    for plan, args, kwargs in made:
        first = first_of(plan, args, kwargs) if plan.name == op else None
        if first is not None:
            judge = partial(first_of, plan)
            given = plan.func, first, (first.variant.args, first.variant.kwargs)
            smallest, _ = minimised(*given, judge, _signature, seconds, notes)
            return plan, smallest
    return None


def itself_fields(target: PlatformSetup, reference: str, plan: OpPlan, mismatch: VariantMismatch) -> dict[str, Any]:
    """What a script of a platform against itself shows, for a `ScriptSpec`.

    Args:
        target: The platform.
        reference: The form that is trusted, in words: ``alone``.
        plan: The operator.
        mismatch: Its two forms.
    """
    variant = mismatch.variant
    checks = checks_of(ReplayOutcome(mismatch.verdict, mismatch.diffs, mismatch.wrong, case=mismatch.case))
    # Without a check of its own the judge condemned the whole result: the script compares every result.
    checks = checks or tuple(Check(name) for name in mismatch.case.names)
    names = [a.name for a in schema_of(plan.func).arguments]
    return {
        "kind": "itself",
        "target": target,
        "ref": dataclasses.replace(target, name=f"{target.name} {reference}"),
        "checks": checks,
        "values": {
            "variant": variant.change or ("slice" if variant.places else "tail"),
            "batched": [names[place] for place in variant.places],
            "item": variant.item,
            "written": names[0],
            "in_place": _call_of(variant.written_by, variant) if variant.written_by is not None else None,
        },
        **call_code.script_call(plan, variant.args, variant.kwargs, [c.name for c in checks]),
    }


def _call_of(plan: OpPlan, variant: LayoutVariant) -> Code:
    return code("out = {}", call_code.call_text(plan, variant.args, variant.kwargs))


def _signature(mismatch: VariantMismatch) -> tuple[object, bool]:
    """What minimisation must preserve: the cause, and whether only NaN, infinities or signs of zero differ."""
    return mismatch.verdict.cause, all(wrong.has_only_classes for wrong in mismatch.wrong)


def _limits(explanation: str) -> tuple[float, int]:
    """The limits of time and memory of the sweep."""
    seconds, gib = _SECONDS.search(explanation), _GIB.search(explanation)
    s = min(float(seconds[1]) if seconds else _DEFAULT_SECONDS, _MAX_SECONDS)
    return s, int(min(float(gib[1]) if gib else _DEFAULT_GIB, _MAX_GIB) * 2**30)
