"""From a finding to a folder with a script, its inputs and the versions."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import DataFileError, PlatformError, UsageError
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.intercept.untrusted import Refused, check_arguments
from shadowrun.platforms import torchplatform
from shadowrun.replay.counterparts import COUNTERPARTS
from shadowrun.replay.decompositions import concerns
from shadowrun.replay.equivalents import EQUIVALENTS
from shadowrun.repro import calls, script, telling
from shadowrun.repro.bench import Bench, Judged, operator
from shadowrun.repro.checks import Check, checks_of
from shadowrun.repro.effects import returned_arguments
from shadowrun.repro.minimise import Minimiser
from shadowrun.repro.places import check_harmless, checked, places_of
from shadowrun.repro.quoting import check_name
from shadowrun.store import tensors
from shadowrun.types import Allowed, Cause, Status

if TYPE_CHECKING:
    from pathlib import Path

    from shadowrun.analysis import Finding
    from shadowrun.store.datafile import DataFile
    from shadowrun.types import OpRecord, RunInfo

__all__ = ["Repro", "load_captured", "make", "try_script", "write_new"]

_CHECK_LIMIT_S = 120.0
_REPLAYS = 4
_SLOW_RATIO, _MOST_RATIO = 10.0, 1e9
_FORGETFUL = ("stale buffer", "uninitialised memory")
_KINDS = {"unsupported": "raises", "error": "raises", "fallback": "fallback", "slow": "slow", "mismatch": "mismatch"}


@dataclass(frozen=True, slots=True)
class Repro:
    """A script that was written.

    Attributes:
        script: The file.
        inputs: The inputs that it uses, in words.
        shows_fault: Whether it exits 1 on this machine; None where the target is not here.
        said: What it printed.
        notes: Sentences on what a reader should know: why nothing was minimised, what depends on earlier calls.
    """

    script: Path
    inputs: str
    shows_fault: bool | None
    said: str
    notes: tuple[str, ...]


def make(
    data: DataFile,
    finding: Finding,
    record: OpRecord,
    directory: Path,
    *,
    minimise: bool = True,
    time_limit_s: float = 30.0,
    allowed: Allowed = Allowed(),  # noqa: B008 - frozen
) -> Repro:
    """Write a script for a finding.

    Args:
        data: The run's data file.
        finding: What is to be shown.
        record: The call whose inputs were kept.
        directory: Where to; it is made if it is not there.
        minimise: Make the inputs smaller and simpler while the fault stays, if the target is on this machine.
        time_limit_s: How long that may take.
        allowed: What the data file may have started.

    Raises:
        UsageError: No script can show this finding.
        PlatformError: A platform takes more than this process, and nobody named it.
        DataFileError: The captured inputs cannot be read, or hold what must not be run.
    """
    info = checked(data.info, allowed)
    check_harmless(info, allowed)
    maker = _Maker(info, finding, load_captured(data, record), is_own=allowed.modules)
    with as_in_handler():  # a comparison may be running: our replays are none of its calls
        return maker.write(record, directory, time_limit_s if minimise else 0.0)


def run_script(path: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script as its reader will.

    Raises:
        TimeoutExpired: It takes too long.
    """
    return subprocess.run(  # noqa: S603 - the script that was just written
        [sys.executable, "-P", str(path.absolute())],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
        # What lies beside the script, in a folder that may have been there before, is no module of its.
        env={k: v for k, v in os.environ.items() if k != "SIM_FLAWS"} | {"PYTHONSAFEPATH": "1"},
    )


def write_new(path: Path, text: str) -> None:
    """Write a text file in the place of what was there; a link is replaced, not followed."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with part.open("x", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def try_script(path: Path, notes: list[str], limit_s: float = _CHECK_LIMIT_S) -> tuple[bool | None, str]:
    """Run a script as its reader will.

    Args:
        path: The script.
        notes: What a reader should know is added.
        limit_s: How long it may take.

    Returns:
        Whether it shows the fault here, None where it cannot tell; and what it printed.
    """
    try:
        done = run_script(path, limit_s)
    except subprocess.TimeoutExpired:
        notes.append(f"the script did not end within {limit_s:g} s")
        return None, ""
    said = done.stdout.strip()
    if done.returncode not in (0, 1) or (done.returncode == 1 and "Traceback" in done.stderr):
        lines = (said or done.stderr.strip()).splitlines()
        notes.append(f"the script cannot tell here: {lines[-1] if lines else done.returncode}")
        return None, said
    if done.returncode == 0:
        notes.append("the script does not show the fault here: it depends on what happened before the call")
    return done.returncode == 1, said


def load_captured(data: DataFile, record: OpRecord) -> tensors.Captured:
    """What was kept of a call.

    Raises:
        DataFileError: It cannot be read, or is that of another operator.
    """
    name = tensors.captured_calls(data)[record.call.seq][2]
    call = tensors.load(data.tensors, name)
    if call.op != record.call.op:
        raise DataFileError(
            f"The captured inputs {name!r} are those of {ascii(call.op)[1:-1]}.", slug="captured-inputs"
        )
    return call


def _refusal(text: str) -> UsageError:
    return UsageError(text, slug="no-repro")


class _Maker:
    """Makes the script of one finding."""

    def __init__(self, info: RunInfo, finding: Finding, call: tensors.Captured, *, is_own: bool) -> None:
        self._info = info
        self._finding = finding
        self._plan = _plan(call, checked=not is_own)
        self._args, self._kwargs = call.args, call.kwargs
        self._target, self._ref = places_of(info)
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
        if op in EQUIVALENTS and self._target.device != "cpu":
            raise _refusal(f"{op} is an operator of the CPU; on {self._target.name} another call stood for it.")
        if op in COUNTERPARTS:
            raise _refusal(f"{op} is an operator of {self._target.name}; on the CPU other calls stood for it.")
        if self._kind == "slow" and self._apart:
            raise _refusal(f"{op} is slow in a process of its own: one script cannot compare the times of two.")

    @property
    def _apart(self) -> bool:
        """Whether each side of the script has a process of its own, in which no earlier call leaves anything behind."""
        return bool(self._target.environment or self._ref.environment or self._ref.settings)

    def write(self, record: OpRecord, directory: Path, seconds: float) -> Repro:
        """Minimise, write and try the script."""
        before = calls.named_inputs(self._plan, self._args, self._kwargs)
        present = True
        try:
            with Bench(self._info, memory=self._kind == "memory") as bench:
                self._on_the_bench(bench, record, seconds)
        except PlatformError as error:
            present = False
            self._notes.append(f"nothing was minimised or tried: {error}")
            self._checks = self._recorded_checks(record)
        inputs = calls.named_inputs(self._plan, self._args, self._kwargs)
        text = script.write(self._script(record, before, inputs))
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "repro.py"
        stored = {c.name: c.allowed for c in self._checks if isinstance(c.allowed, torch.Tensor)}
        tensors.write_private(inputs | ({"allowed": stored} if stored else {}), directory / "inputs.pt")
        write_new(path, text)
        write_new(directory / "versions.json", telling.versions(self._info))
        shows, said = try_script(path, self._notes) if present else (None, "")
        return Repro(path, calls.shown_inputs(inputs), shows, said, tuple(self._notes))

    # -- on this machine ---------------------------------------------------------------------------

    def _on_the_bench(self, bench: Bench, record: OpRecord, seconds: float) -> None:
        replays = [bench.judge(self._plan, self._args, self._kwargs)]
        if self._kind == "accepts":
            self._notes.append("a call that the reference refuses is not minimised")
            return
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
            judged = self._minimised(bench, judged, seconds)
        self._checks = checks_of(judged, bench.tolerance) if judged is not None else ()
        if not self._checks and self._kind in ("mismatch", "unstable"):
            self._checks = self._recorded_checks(record) or self._all_results()

    def _is_it(self, judged: Judged) -> bool:
        verdict, finding = judged.verdict, self._finding
        status = {"mismatch": Status.MISMATCH, "unsupported": Status.UNSUPPORTED, "error": Status.ERROR}
        wanted = status.get(finding.kind, Status.FALLBACK)
        if verdict.status is not wanted:
            # An operator that is wrong, too, where it falls back.
            return False
        return verdict.cause is finding.cause or finding.kind in ("mismatch", "fallback")

    def _depends_on_earlier(self, judged: Judged) -> bool:
        return self._finding.cause is Cause.NON_DETERMINISM or judged.verdict.explanation in _FORGETFUL

    def _minimised(self, bench: Bench, judged: Judged, seconds: float) -> Judged:
        wanted, last = judged.kind, judged

        def holds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            nonlocal last
            found = bench.judge(self._plan, args, kwargs)
            if found is None or found.kind != wanted:
                return False
            last = found
            return True

        minimiser = Minimiser(holds, seconds)
        self._args, self._kwargs = minimiser.minimise(self._args, self._kwargs)
        if seconds and not minimiser.finished:
            self._notes.append(f"minimising ended after {seconds:g} s and {minimiser.n_runs} runs")
        return last

    def _recorded_checks(self, record: OpRecord) -> tuple[Check, ...]:
        """What the data file alone tells: half of the greatest difference that was seen, in each result."""
        if self._finding.kind != "mismatch":
            return ()
        is_form, strides = self._finding.cause is Cause.METADATA, self._finding.explanation == "stride"
        found = []
        for d in record.diffs:
            if is_form and d.detail:
                found.append(Check(check_name(self._plan, d.name), float("inf"), strides=strides))
            elif not is_form and d.n_mismatched:
                allowed = 0.5 * d.max_abs if d.n_nan + d.n_inf + d.n_zero_sign == 0 else d.max_abs
                found.append(Check(check_name(self._plan, d.name), allowed, signed_zeros=d.n_zero_sign > 0))
        return tuple(found)

    def _all_results(self) -> tuple[Check, ...]:
        if self._plan.n_returns == 1 and self._plan.fresh:
            return (Check("output 0"),)
        names = [f"output {i}" for i in self._plan.fresh if i not in self._plan.uninitialised]
        return tuple(Check(name) for name in (*names, *self._plan.mutated_names))

    # -- the script ----------------------------------------------------------------------------------

    def _script(self, record: OpRecord, before: dict[str, Any], inputs: dict[str, Any]) -> script.Script:
        plan, finding = self._plan, self._finding
        checks = self._checks if self._kind in ("mismatch", "unstable") else self._all_results()
        memory = self._kind == "memory"
        if memory:
            checks = tuple(c for c in checks if c.name.startswith("output "))
        if any(concerns(finding.op, _position(plan, c.name)) for c in self._checks):
            raise _refusal(
                f"{finding.op} was judged by the equation that defines its result: element by element, right results "
                "may differ."
            )
        return script.Script(
            title=telling.title(finding, self._target),
            story=tuple(
                telling.story(self._info, finding, record, calls.shown_inputs(before), calls.shown_inputs(inputs))
            ),
            kind=self._kind,
            operator=finding.op,
            call=calls.call_text(plan, self._args, self._kwargs),
            results=tuple((c.name, calls.result_text(plan, c.name)) for c in checks),
            target=self._target,
            ref=self._ref,
            allowed=tuple((c.name, None if isinstance(c.allowed, torch.Tensor) else c.allowed) for c in checks),
            laid=memory or calls.needs_layout(inputs),
            written=plan.mutated_names if memory else (),
            returned=tuple(returned_arguments(plan).items()) if memory else (),
            on_cpu=tuple(name for name in plan.on_cpu if name in inputs),
            strides=any(c.strides for c in checks),
            signed_zeros=any(c.signed_zeros for c in checks),
            key=torchplatform.dispatch_key(self._target.device.partition(":")[0]) if self._kind == "fallback" else "",
            ratio=_ratio(self._info),
        )


def _ratio(info: RunInfo) -> float:
    """What was slow in the run: a finite number, since it becomes part of a script."""
    found = info.config.get("slow_ratio", _SLOW_RATIO)
    is_one = isinstance(found, (int, float)) and not isinstance(found, bool) and 1 < found < _MOST_RATIO
    return float(found) if is_one else _SLOW_RATIO


def _plan(call: tensors.Captured, *, checked: bool) -> OpPlan:
    """The operator, with arguments that fit its schema."""
    try:
        plan = operator(call.op, checked=checked)
    except Refused as why:
        raise UsageError(f"No script is written: {why}.", slug="operator-refused") from None
    except (AttributeError, RuntimeError):
        raise _refusal(
            f"This torch has no operator {call.op}: import the library that brings it, or use the version of the run."
        ) from None
    try:
        check_arguments(plan.func, call.args, call.kwargs, checked=checked)
    except Refused as why:
        raise DataFileError(f"The captured inputs do not fit {call.op}: {why}.", slug="captured-inputs") from None
    if plan.action in (Action.PASS, Action.EMPTY):
        raise DataFileError(f"The captured inputs do not fit {call.op}.", slug="captured-inputs")
    return plan


def _position(plan: OpPlan, name: str) -> int:
    number = name.removeprefix("output ").partition("[")[0]
    return list(plan.fresh).index(int(number)) if number.isdecimal() and int(number) in plan.fresh else -1
