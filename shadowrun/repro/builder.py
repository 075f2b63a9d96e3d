"""Scripts for the findings of a run: an operator call on both platforms, its inputs made smaller."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from shadowrun.errors import PlatformError, UsageError
from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.intercept.untrusted.checked_calls import graphs_of_file
from shadowrun.operators.cpu_only_ops import EQUIVALENTS
from shadowrun.operators.facts import facts
from shadowrun.operators.vendor_ops import COUNTERPARTS
from shadowrun.platforms import torchplatform
from shadowrun.repro import call_code
from shadowrun.repro.call_replayer import CallReplayer, ReplayOutcome, captured_plan, load_captured
from shadowrun.repro.minimise import minimised
from shadowrun.repro.platform_setup import allowed_platforms, check_harmless, platform_setups
from shadowrun.repro.quoting import check_name
from shadowrun.repro.result_checks import Check, checks_of
from shadowrun.repro.script import EXIT_STATUS, Repro, ReproOptions, ScriptSpec, publish, versions_text
from shadowrun.types import Cause, Status

if TYPE_CHECKING:
    from pathlib import Path

    from shadowrun.analysis import Finding
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.repro.platform_setup import PlatformSetup
    from shadowrun.store.captured_inputs import StoredCall
    from shadowrun.store.datafile import DataFile
    from shadowrun.types import OpRecord, RunInfo

__all__ = ["run_story", "run_versions", "write_script"]

# A fault that shows in half of the replays passes all four once in sixteen times.
_REPLAYS = 4
_SLOW_RATIO, _MAX_RATIO = 10.0, 1e9
# Explanations of faults that depend on what memory held before the call.
_FORGETFUL = ("stale buffer", "uninitialised memory")
_KINDS = {"unsupported": "raises", "error": "raises", "fallback": "fallback", "slow": "slow", "mismatch": "mismatch"}


def write_script(data: DataFile, finding: Finding, record: OpRecord, directory: Path, options: ReproOptions) -> Repro:
    """Write a script for a finding of a run.

    Args:
        data: The run's data file.
        finding: The finding to show.
        record: The call whose inputs were kept.
        directory: Folder to write to; it is created if needed.
        options: How to make it.

    Raises:
        UsageError: No script can show this finding.
        PlatformError: A platform takes more than this process, and the user did not name it.
        DataFileError: The captured inputs cannot be read, or hold what must not be run.
    """
    info = allowed_platforms(data.info, options.allowed)
    check_harmless(info, options.allowed)
    maker = _FindingScript(info, finding, load_captured(data, record), is_own=options.allowed.modules)
    looks = contextlib.nullcontext() if options.allowed.modules else graphs_of_file()
    with as_in_handler(), looks:  # a comparison may be running: our replays are none of its calls
        return maker.write(record, directory, options.seconds)


def _refusal(text: str) -> UsageError:
    return UsageError(text, slug="no-repro")


class _FindingScript:
    """Makes the script of one finding."""

    def __init__(self, info: RunInfo, finding: Finding, call: StoredCall, *, is_own: bool) -> None:
        self._info = info
        self._finding = finding
        self._plan = captured_plan(call, checked=not is_own)
        self._args, self._kwargs = call.args, call.kwargs
        self._target, self._ref = platform_setups(info)
        self._kind = _KINDS[finding.kind]
        if finding.cause is Cause.MEMORY_EFFECTS:
            self._kind = "memory"
        if finding.cause is Cause.NO_ERROR:
            self._kind = "accepts"
        self._notes: list[str] = []
        self._checks: tuple[Check, ...] = ()
        self._refuse_what_cannot_be_shown()

    def _refuse_what_cannot_be_shown(self) -> None:
        op, finding = self._finding.op, self._finding
        if finding.kind == "mismatch" and finding.cause is Cause.RANDOMNESS:
            raise _refusal(f"{op} is random: a script would compare two distributions, which one call cannot show.")
        # A script calls one operator on both sides, and here the two sides called different ones.
        if op in EQUIVALENTS and self._target.device != "cpu":
            raise _refusal(f"{op} is an operator of the CPU; on {self._target.name} another call stood for it.")
        if op in COUNTERPARTS:
            raise _refusal(f"{op} is an operator of {self._target.name}; on the CPU other calls stood for it.")
        if self._kind == "slow" and self._apart:
            raise _refusal(f"{op} is slow in a separate process: one script cannot compare times of two processes.")

    @property
    def _apart(self) -> bool:
        """Whether each side of the script runs in a new process, without effects of earlier calls."""
        return bool(self._target.environment or self._ref.environment or self._ref.settings)

    def write(self, record: OpRecord, directory: Path, seconds: float) -> Repro:
        """Minimise, write and try the script."""
        # Noted first: minimising replaces them, and the script says what the run had.
        before = call_code.named_inputs(self._plan, self._args, self._kwargs)
        present = True
        try:
            with CallReplayer(self._info, memory=self._kind == "memory") as bench:
                self._on_the_bench(bench, record, seconds)
        # A script can be written without the target; it exits 2 where it cannot show the fault.
        except PlatformError as error:
            present = False
            self._notes.append(f"nothing was minimised or tried: {error}")
            self._checks = self._recorded_checks(record)
        spec = self._spec(record, call_code.shown_inputs(before))
        shown = call_code.shown_inputs(spec.inputs)
        return publish(spec, directory, run_versions(self._info), self._notes, shown=shown, tried=present)

    # -- on this machine ---------------------------------------------------------------------------

    def _on_the_bench(self, bench: CallReplayer, record: OpRecord, seconds: float) -> None:
        # Several replays: a fault that one of them lacks depends on more than the inputs, and must not be minimised.
        replays = [bench.judge(self._plan, self._args, self._kwargs)]
        if self._kind == "accepts":
            self._notes.append("a call that the reference refuses is not minimised")
            return
        # A smaller input would be fast.
        if self._kind == "slow":
            self._notes.append("a slow operator is not minimised: its time is the fault")
            return
        replays += [bench.judge(self._plan, self._args, self._kwargs) for _ in range(_REPLAYS - 1)]
        faulty = [judged for judged in replays if judged is not None and self._is_it(judged)]
        judged = faulty[-1] if faulty else None
        if judged is None or len(faulty) < len(replays) or self._depends_on_earlier(judged):
            if self._kind == "mismatch" and not self._apart:
                self._kind = "unstable"
            share = f"{len(faulty)} of {len(replays)} replays show it"
            self._notes.append(f"the fault depends on earlier calls ({share}): nothing was minimised")
        else:
            arguments = self._args, self._kwargs
            judge = partial(bench.judge, self._plan)
            small = minimised(self._plan.func, judged, arguments, judge, lambda j: j.kind, seconds, self._notes)
            judged, (self._args, self._kwargs) = small
        self._checks = checks_of(judged, bench.tolerance) if judged is not None else ()
        if not self._checks and self._kind in ("mismatch", "unstable"):
            self._checks = self._recorded_checks(record) or self._all_results()

    def _is_it(self, judged: ReplayOutcome) -> bool:
        verdict, finding = judged.verdict, self._finding
        status = {"mismatch": Status.MISMATCH, "unsupported": Status.UNSUPPORTED, "error": Status.ERROR}
        wanted = status.get(finding.kind, Status.FALLBACK)
        if verdict.status is not wanted:
            # An operator that is wrong, too, where it falls back.
            return False
        return verdict.cause is finding.cause or finding.kind in ("mismatch", "fallback")

    def _depends_on_earlier(self, judged: ReplayOutcome) -> bool:
        return self._finding.cause is Cause.NON_DETERMINISM or judged.verdict.explanation in _FORGETFUL

    def _recorded_checks(self, record: OpRecord) -> tuple[Check, ...]:
        """Checks from the data file alone: half of the greatest difference that was seen in each result."""
        if self._finding.kind != "mismatch":
            return ()
        is_form, strides = self._finding.cause is Cause.METADATA, self._finding.explanation == "stride"
        checks = []
        for d in record.diffs:
            if is_form and d.detail:
                checks.append(Check(check_name(self._plan, d.name), float("inf"), strides=strides))
            elif not is_form and d.n_mismatched:
                # Without the target here, no bound can be measured; half of what was seen lies between right and wrong.
                allowed = 0.5 * d.max_abs if d.n_nan + d.n_inf + d.n_zero_sign == 0 else d.max_abs
                checks.append(Check(check_name(self._plan, d.name), allowed, signed_zeros=d.n_zero_sign > 0))
        return tuple(checks)

    def _all_results(self) -> tuple[Check, ...]:
        if self._plan.n_returns == 1 and self._plan.fresh:
            return (Check("output 0"),)
        # What the operator leaves uninitialised differs by definition.
        names = [f"output {i}" for i in self._plan.fresh if i not in self._plan.uninitialised]
        return tuple(Check(name) for name in (*names, *self._plan.mutated_names))

    # -- the script ----------------------------------------------------------------------------------

    def _spec(self, record: OpRecord, before: str) -> ScriptSpec:
        plan, finding = self._plan, self._finding
        if any(_position(plan, c.name) in facts(finding.op).by_equation for c in self._checks):
            raise _refusal(
                f"{finding.op} was judged by the equation that defines its result: element by element, right results "
                "may differ."
            )
        checks = self._checks if self._kind in ("mismatch", "unstable") else self._all_results()
        values: dict[str, Any] = {"ratio": _ratio(self._info)}
        if self._kind == "memory":
            checks = tuple(c for c in checks if c.name.startswith("output "))
            values = {"written": plan.mutated_names, "returned": call_code.returned_arguments(plan)}
        if self._kind == "fallback":
            values = {"key": torchplatform.dispatch_key(self._target.device.partition(":")[0])}
        call = call_code.script_call(plan, self._args, self._kwargs, [c.name for c in checks])
        return ScriptSpec(
            kind=self._kind,
            title=_title(finding, self._target),
            story=_story(self._info, finding, record, before, call_code.shown_inputs(call["inputs"])),
            target=self._target,
            ref=self._ref,
            checks=checks,
            values=values,
            **call,
        )


_WHAT = {
    "mismatch": "is wrong",
    "unsupported": "is not supported",
    "error": "raises",
    "fallback": "runs on the CPU",
    "slow": "is slow",
}


def _title(finding: Finding, target: PlatformSetup) -> str:
    why = ", ".join(filter(None, (str(finding.cause or ""), finding.explanation)))
    return f"{finding.op} {_WHAT[finding.kind]} on {target.name}{': ' if why else ''}{why}."


def _story(info: RunInfo, finding: Finding, record: OpRecord, before: str, now: str) -> tuple[str, ...]:
    call = record.call
    where = ", ".join(filter(None, (f"call {call.seq}", call.module, str(call.phase), call.site)))
    inputs = f"Inputs: {now}." if now == before else f"Inputs: {now}; in the run {before}."
    return (f"Seen by shadowrun in {where}.", *run_story(info, finding.evidence), inputs, "", EXIT_STATUS)


def run_story(info: RunInfo, evidence: str) -> list[str]:
    """Lines of a script on the versions of a run and the evidence."""
    known = ", ".join(f"{name} {version}" for name, version in info.versions.items() if version)
    return [f"Versions: {known}."] + ([f"Evidence: {evidence}."] if evidence else [])


def run_versions(info: RunInfo) -> str:
    """The file of versions of a run."""
    target, ref = info.target_fingerprint or {"platform": info.target}, info.ref_fingerprint or {"platform": info.ref}
    return versions_text({"versions": info.versions, "target": target, "reference": ref})


def _ratio(info: RunInfo) -> float:
    """What was slow in the run: a finite number, since it becomes part of a script."""
    ratio = info.config.get("slow_ratio", _SLOW_RATIO)
    # `True` is an int, and NaN fails both comparisons.
    is_one = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 1 < ratio < _MAX_RATIO
    return float(ratio) if is_one else _SLOW_RATIO


def _position(plan: OpPlan, name: str) -> int:
    number = name.removeprefix("output ").partition("[")[0]
    return list(plan.fresh).index(int(number)) if number.isdecimal() and int(number) in plan.fresh else -1
