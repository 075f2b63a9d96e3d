"""From what a sweep found to a folder with a script: the case is made again, and shown in the shortest way.

Where an operator inside the case is to blame, the case runs once more under a comparison, and the script is that of the
operator (`shadowrun.repro.make`). Where a platform disagrees with itself, or a call ends its process, that platform
runs alone. What else fails is shown by the case as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import UsageError
from shadowrun.platforms import parse, sim
from shadowrun.platforms.device import resolve
from shadowrun.platforms.untrusted import simulated_flaws
from shadowrun.repro import Repro, calls, script, telling
from shadowrun.repro.alone import Ends, Itself, write_ends, write_itself
from shadowrun.repro.bench import Judged, operator
from shadowrun.repro.checks import Check, checks_of
from shadowrun.repro.making import try_script, write_new
from shadowrun.repro.memory import bounded
from shadowrun.repro.minimise import Minimiser
from shadowrun.repro.places import check_harmless, checked, places_of
from shadowrun.store.tensors import write_private
from shadowrun.sweep.again import make_again
from shadowrun.sweep.cases import INVARIANCE, Part
from shadowrun.sweep.expression import expression_of
from shadowrun.sweep.found import ON_REFERENCE
from shadowrun.sweep.invariance import Invariance
from shadowrun.sweep.last_call import Where, last_call
from shadowrun.sweep.outcome import Kind
from shadowrun.sweep.trial import Trial
from shadowrun.types import Allowed, RunInfo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.repro.places import Place
    from shadowrun.sweep.again import Again, Origin
    from shadowrun.sweep.coveragefile import SweepInfo
    from shadowrun.sweep.found import Found
    from shadowrun.sweep.invariance import Differing

__all__ = ["write_script"]

_ENDINGS = (Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY)
_CALL_LIMIT_S = 60.0
_KINDS = {
    **dict.fromkeys((Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE), "unsupported"),
    **dict.fromkeys((Kind.ERROR, *_ENDINGS), "error"),
    **dict.fromkeys((Kind.MISMATCH, Kind.FORM, Kind.REFERENCE), "mismatch"),
    **dict.fromkeys((Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK), "fallback"),
}
"""Kinds of a sweep to those of a run's findings."""
_OTHER_WAY = {Part.TAIL: "element by element", Part.SLICE: "alone", Part.LAYOUT: "contiguous"}
_WHAT = {
    Kind.MISSING_ERROR: "is accepted",
    Kind.WRONG_ERROR: "is refused otherwise",
    Kind.MISMATCH: "is wrong",
    Kind.FORM: "has the wrong form",
}
_EXIT = "Exit status: 1 while the fault is there, 0 when it is gone, 2 if it cannot be told here."
_SECONDS = re.compile(r"no end within ([\d.]+(?:e\+?\d+)?) s")
_MOST_SECONDS, _MOST_GIB = 3600.0, 1024.0
"""Of an explanation, which a file may have from anybody."""
_GIB = re.compile(r"more than ([\d.]+) GiB")


def write_script(
    found: Found,
    info: SweepInfo,
    origin: Origin,
    directory: Path,
    *,
    minimise: bool = True,
    time_limit_s: float = 30.0,
    allowed: Allowed = Allowed(),  # noqa: B008 - frozen
) -> Repro:
    """Write a script for something that a sweep found.

    Args:
        found: What.
        info: The sweep.
        origin: Where its inputs come from.
        directory: Where to; it is made if it is not there.
        minimise: Make the inputs smaller and simpler while the fault stays, where one operator shows it.
        time_limit_s: How long that may take.
        allowed: What the coverage file may have started.

    Raises:
        UsageError: No script can show it, or its inputs cannot be made again.
        PlatformError: A platform of the sweep is not on this machine, or takes more than this process and nobody named
            it.
    """
    run = checked(_run_of(info), allowed)
    with bounded(), _simulated(run):
        writer = _Writer(found, run, origin, directory, time_limit_s if minimise else 0.0)
        return writer.write(allowed)


def _run_of(info: SweepInfo) -> RunInfo:
    """A sweep's platforms, as a run tells them."""
    target = info.target_fingerprint.get("platform", info.target.partition(" (")[0])
    return RunInfo(target, info.ref, info.target_fingerprint, info.ref_fingerprint, info.versions, started=info.started)


@contextlib.contextmanager
def _simulated(info: RunInfo) -> Iterator[None]:
    """With the simulated target as it was in the sweep."""
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

    def __init__(self, found: Found, run: RunInfo, origin: Origin, directory: Path, seconds: float) -> None:
        self._run = run
        self._found, self._finding, self._case = found, found.finding, found.first
        self._origin, self._directory, self._seconds = origin, directory, seconds
        self._flaws = simulated_flaws(run.target_fingerprint)
        self._target, self._ref = places_of(run)
        self._notes: list[str] = []

    def write(self, allowed: Allowed) -> Repro:
        """In the shortest way."""
        on_reference = self._finding.explanation.startswith(ON_REFERENCE)
        ends = self._finding.kind in _ENDINGS and not self._finding.op
        again = make_again(self._found, self._origin)
        if on_reference or (ends and not self._raised()):
            return self._ends(again, on_reference=on_reference)
        check_harmless(self._run, allowed)  # all else runs the case in this process
        if self._case.part in INVARIANCE:
            return self._itself(again)
        if "::" in self._finding.op and self._case.part is not Part.INVALID:
            made = self._operator(again)
            if made is not None:
                return made
            self._notes.append(f"{self._finding.op} alone does not show it: this is the whole case")
        return self._whole(again)

    def _raised(self) -> bool:
        """Whether it is an exception, for want of memory, and not the end of a process."""
        return self._finding.kind is Kind.OUT_OF_MEMORY and not _GIB.search(self._finding.explanation)

    # -- one operator of the case --------------------------------------------------------------------

    def _operator(self, again: Again) -> Repro | None:
        trial = Trial(self._run.target, self._run.ref, _CALL_LIMIT_S, lambda: None, capture=True)
        run = trial.watch(again.program)
        kind = _KINDS[self._finding.kind]
        same = [f for f in run.findings() if (f.op, f.kind) == (self._finding.op, kind) and f.captured >= 0]
        same.sort(key=lambda f: ((f.cause or "") != self._finding.cause, f.explanation != self._finding.explanation))
        if not same:
            return None
        return run.repro(same[0], self._directory, minimise=self._seconds > 0, time_limit_s=self._seconds)

    # -- a platform against itself -------------------------------------------------------------------

    def _itself(self, again: Again) -> Repro:
        if self._finding.kind is not Kind.MISMATCH:
            raise UsageError(
                f"{self._finding.op} runs on {self._target.name} in one way and fails in the other: "
                f"{self._finding.kind}, {self._finding.message}. No script shows that.",
                slug="no-repro",
            )
        platform = resolve(self._run.target)
        platform.start()
        try:
            plan, found = self._differing(Invariance(platform), again)
        finally:
            platform.stop()
        way = found.way
        inputs = calls.named_inputs(plan, way.args, way.kwargs)
        names = [a.name for a in plan.func._schema.arguments]
        checks = checks_of(Judged(found.verdict, found.diffs, found.wrong, case=found.case))
        checks = checks or tuple(Check(name) for name in found.case.names)
        other = f"{self._target.name} {_OTHER_WAY[self._case.part]}"
        content = self._content(
            kind="mismatch",
            operator=plan.name,
            call=calls.call_text(plan, way.args, way.kwargs),
            results=tuple((c.name, calls.result_text(plan, c.name)) for c in checks),
            shown=calls.shown_inputs(inputs),
            target=self._target,
            ref=dataclasses.replace(self._target, name=other),
            allowed=tuple((c.name, None if isinstance(c.allowed, torch.Tensor) else c.allowed) for c in checks),
            on_cpu=tuple(name for name in plan.on_cpu if name in inputs),
            signed_zeros=any(c.signed_zeros for c in checks),
        )
        how = Itself(way.change, tuple(names[place] for place in way.places), way.item)
        stored = {c.name: c.allowed for c in checks if isinstance(c.allowed, torch.Tensor)}
        return self._written(write_itself(content, how), inputs | ({"allowed": stored} if stored else {}), inputs)

    def _differing(self, invariance: Invariance, again: Again) -> tuple[OpPlan, Differing]:
        """The call whose two ways differ, made smaller."""
        part = self._case.part
        torch.manual_seed(0)
        for plan, args, kwargs in invariance.calls(again.program(torch.device("cpu"))):
            if plan.name != self._finding.op:
                continue
            last = invariance.differing(part, plan, args, kwargs)
            if last is None:
                continue
            wanted = _character(last)

            def holds(args: tuple[Any, ...], kwargs: dict[str, Any], plan: OpPlan = plan, wanted: Any = wanted) -> bool:
                nonlocal last
                found = invariance.differing(part, plan, args, kwargs)
                if found is None or _character(found) != wanted:
                    return False
                last = found
                return True

            minimiser = Minimiser(holds, self._seconds)
            minimiser.minimise(last.way.args, last.way.kwargs)
            if self._seconds and not minimiser.finished:
                self._notes.append(f"minimising ended after {self._seconds:g} s and {minimiser.n_runs} runs")
            return plan, last
        raise UsageError(
            f"{self._case} does not show it any more: {self._finding.op or self._case.operator} agrees with itself on "
            f"{self._target.name} here.",
            slug="no-repro",
        )

    # -- a call that ends its process ----------------------------------------------------------------

    def _ends(self, again: Again, *, on_reference: bool) -> Repro:
        place = self._ref if on_reference else self._target
        limits = _limits(self._finding.explanation)
        where = Where(self._run.ref) if on_reference else Where(self._run.target, self._target.device, self._flaws)
        if resolve(where.spec).remote is not None:
            raise UsageError(f"{where.spec} has a process of its own, which runs no whole cases.", slug="no-repro")
        call = last_call(self._found, self._origin, where, limits.seconds)
        values: dict[str, Any]
        if call is not None:
            plan = operator(call.op, checked=False)  # it was called here, by a case that may be run
            name, inputs = call.op, calls.named_inputs(plan, call.args, call.kwargs)
            more: dict[str, Any] = {"call": calls.call_text(plan, call.args, call.kwargs)}
            more |= {"results": (("output 0", "out"),), "on_cpu": tuple(n for n in plan.on_cpu if n in inputs)}
        else:
            name, inputs, more = self._expressed(again, whole=False)
            self._notes.append("no operator that torch's dispatcher sees ends it: this is the whole case")
        values = dict(more, operator=name, shown=calls.shown_inputs(inputs), laid=calls.needs_layout(inputs))
        content = self._content(kind="ends", target=place, ref=place, **values)
        return self._written(write_ends(content, limits), inputs, inputs, limit_s=limits.seconds)

    # -- the whole case ------------------------------------------------------------------------------

    def _whole(self, again: Again) -> Repro:
        kind = self._finding.kind
        invalid = self._case.part is Part.INVALID
        compared = kind in (Kind.MISMATCH, Kind.FORM, Kind.REFERENCE)
        if not compared and not invalid and _KINDS.get(kind) == "fallback":
            raise UsageError(f"{self._finding.op} does not fall back any more, or not alone.", slug="no-repro")
        name, inputs, values = self._expressed(again, whole=compared)
        if compared:
            allowed = float("inf") if kind is Kind.FORM else 0.0
            values["allowed"] = tuple((result, allowed) for result, _ in values["results"])
        content = self._content(
            kind="accepts" if invalid else "mismatch" if compared else "raises",
            operator=name,
            shown=calls.shown_inputs(inputs),
            target=self._target,
            ref=self._ref,
            laid=calls.needs_layout(inputs),
            **values,
        )
        return self._written(script.write(content), inputs, inputs)

    def _expressed(self, again: Again, *, whole: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Name, inputs, and what else of a script is the whole case's."""
        expression = expression_of(again, whole=whole)
        values = {f.name: getattr(expression, f.name) for f in dataclasses.fields(expression) if f.name != "inputs"}
        return self._case.operator, dict(expression.inputs), values

    # -- what is written -----------------------------------------------------------------------------

    def _content(self, *, shown: str, target: Place, **values: Any) -> script.Script:
        finding = self._finding
        why = ", ".join(filter(None, (finding.cause, finding.explanation.removeprefix(ON_REFERENCE))))
        ends = values["kind"] == "ends"
        what = "ends its process" if ends else _WHAT.get(finding.kind, f"fails ({finding.kind})")
        known = ", ".join(f"{name} {version}" for name, version in self._run.versions.items() if version)
        story = [f"Seen by shadowrun sweep in {self._case}, seed {self._origin.seed}.", f"Versions: {known}."]
        if finding.message:
            story.append(f"Evidence: {finding.message}.")
        same = shown == self._found.inputs
        story.append(f"Inputs: {shown}." if same else f"Inputs: {shown}; in the sweep {self._found.inputs}.")
        return script.Script(
            title=f"{values['operator']} {what} on {target.name}: {why}.",
            story=(*story, "", _EXIT),
            target=target,
            **values,
        )

    def _written(self, text: str, stored: dict[str, Any], inputs: dict[str, Any], limit_s: float = 0.0) -> Repro:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "repro.py"
        write_private(stored, self._directory / "inputs.pt")
        write_new(path, text)
        write_new(self._directory / "versions.json", telling.versions(self._run))
        shows, said = try_script(path, self._notes, 120.0 + limit_s)
        return Repro(path, calls.shown_inputs(inputs), shows, said, tuple(self._notes))


def _character(found: Differing) -> tuple[object, bool]:
    """What stays of a difference while its inputs get smaller: its cause, and whether it is of classes only."""
    return found.verdict.cause, all(wrong.has_only_classes for wrong in found.wrong)


def _limits(explanation: str) -> Ends:
    """What the sweep's case was given."""
    seconds, gib = _SECONDS.search(explanation), _GIB.search(explanation)
    s, n = float(seconds[1]) if seconds else Ends().seconds, float(gib[1]) if gib else Ends().n_bytes / 2**30
    return Ends(min(s, _MOST_SECONDS), int(min(n, _MOST_GIB) * 2**30))
