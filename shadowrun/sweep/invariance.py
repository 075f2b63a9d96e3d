"""Whether a platform agrees with itself: vector body and scalar tail, strided and contiguous, a batch and its slices.

A case's function runs once on the CPU, to see which operators it calls with which inputs. Each of these then runs on
the target twice, in the two ways that have to agree. The judge decides whether rounding explains a difference: where it
does not, one of the two is wrong, whatever the reference would say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.platforms.remote import WorkerDied
from shadowrun.replay import results
from shadowrun.replay.case import Case, Value
from shadowrun.replay.execution import Executor
from shadowrun.replay.judge import Judge
from shadowrun.sweep.calls import Calls
from shadowrun.sweep.cases import Part
from shadowrun.sweep.inputs import leaves, strided, transposed
from shadowrun.sweep.judging import finding_of_error
from shadowrun.sweep.outcome import NOT_INVARIANT, Finding, Kind
from shadowrun.sweep.slices import batched, sliced
from shadowrun.sweep.ways import Way, as_table, at, flattened, mapped, packed
from shadowrun.types import Cause, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.finding import Finding as Wrong
    from shadowrun.types import TensorDiff, Verdict

__all__ = ["Differing", "Invariance"]

_MAX_BYTES = 1 << 28
_MOST_CALLS = 16
_MOST_SINGLE = 1200
_WORDS = {
    Part.TAIL: "vector body and scalar tail differ",
    Part.LAYOUT: "strided and contiguous inputs differ",
    Part.SLICE: "in a batch and alone differ",
}


@dataclass(frozen=True, slots=True)
class _Pair:
    """The results of an operator in two ways, on the CPU, and the inputs that give the second."""

    way: Way
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    actual: tuple[Value, ...]
    expected: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Differing:
    """A call whose two ways differ by more than rounding explains.

    Attributes:
        way: The two ways.
        verdict, diffs, wrong: What the judge says of the way that is wrong.
        case: What it looked at.
    """

    way: Way
    verdict: Verdict
    diffs: tuple[TensorDiff, ...]
    wrong: tuple[Wrong, ...]
    case: Case


class Invariance:
    """Compares a platform with itself.

    Args:
        platform: The one under test.
    """

    def __init__(self, platform: Platform) -> None:
        self._executor = Executor(platform)
        self._judge = Judge(hypotheses=False)
        self._plans: dict[int, OpPlan] = {}

    def run(self, part: Part, prepared: Callable[[], Any], on_target: Callable[[], None]) -> list[Finding] | None:
        """Compare each operator that a function calls.

        Args:
            part: TAIL, LAYOUT or SLICE.
            prepared: The function, on the CPU.
            on_target: Called when that has run and the target begins.

        Returns:
            Findings; None where it calls no operator to which the part applies.

        Raises:
            Exception: What the function raises.
        """
        calls = self.calls(prepared)
        on_target()
        findings: list[Finding] = []
        n = 0
        for plan, args, kwargs in calls:
            try:
                for pair in self._pairs(part, plan, args, kwargs):
                    n += 1
                    findings += self._judged(part, plan, pair)
            except _Refused as refused:
                findings.append(refused.finding)
        return findings if n or findings else None

    def calls(self, prepared: Callable[[], Any]) -> list[tuple[OpPlan, tuple[Any, ...], dict[str, Any]]]:
        """The calls that a function makes on the CPU: operators with their inputs."""
        calls = Calls(self._plans)
        with torch.no_grad(), calls:
            prepared()
        return calls.found[:_MOST_CALLS]

    def differing(self, part: Part, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Differing | None:
        """The first two ways of a call that differ by more than rounding explains; None where all agree.

        Args:
            part: TAIL, LAYOUT or SLICE.
            plan: The operator.
            args: Its inputs, on the CPU.
            kwargs: Those by name.
        """
        try:
            for pair in self._pairs(part, plan, args, kwargs):
                found = self._examined(plan, pair)
                if found is not None and found.verdict.status is Status.MISMATCH:
                    return found
        except _Refused:
            return None
        return None

    def _pairs(self, part: Part, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Pair]:
        made = {Part.TAIL: self._tail, Part.LAYOUT: self._layout, Part.SLICE: self._slice}[part](plan, args, kwargs)
        yield from made

    def _tail(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.pointwise not in plan.func.tags:
            return
        flat = flattened(args, kwargs)
        if flat is None:
            return
        args, kwargs, n = flat
        names, whole = self._ran(plan, args, kwargs, first=True)
        if not all(isinstance(v, torch.Tensor) and v.shape == (n,) for v in whole):
            return
        step = max(1, -(-n // _MOST_SINGLE))
        picked = range(0, n, step)
        alone = [self._ran(plan, *mapped(args, kwargs, lambda t, k=k: at(t, k)))[1] for k in picked]
        way = Way(args, kwargs)
        if step > 1:
            index = torch.tensor(picked)
            args, kwargs = mapped(args, kwargs, lambda t: t[index] if t.dim() else t)
            whole = tuple(v[index] for v in whole if isinstance(v, torch.Tensor))
        yield _Pair(way, names, args, kwargs, whole, tuple(torch.cat(list(one)) for one in zip(*alone, strict=True)))

    def _layout(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "as_strided" in plan.name or "resize" in plan.name:  # what strides mean to them
            return
        if torch.Tag.pointwise in plan.func.tags:
            args, kwargs = as_table(args, kwargs)
        args, kwargs = mapped(args, kwargs, packed)
        for change in (strided, transposed):
            other = mapped(args, kwargs, change)
            if all(a is b for a, b in zip(leaves([args, kwargs]), leaves(list(other)), strict=True)):
                continue
            names, straight = self._ran(plan, args, kwargs, first=True)
            _, turned = self._ran(plan, *other, first=True)  # which layouts an operator takes is its own affair
            yield _Pair(Way(args, kwargs, change.__name__), names, args, kwargs, turned, straight)

    def _slice(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places, n = batched(plan.func, args, kwargs)
        if n < 2:
            return
        names, whole = self._ran(plan, args, kwargs, first=True)
        for k in sorted({0, n // 2, n - 1}):
            alone = sliced(args, places, k)
            _, one = self._ran(plan, alone, kwargs)
            # What has no batch (a saved seed, statistics of all) is not compared.
            kept = [
                i
                for i, (w, o) in enumerate(zip(whole, one, strict=False))
                if isinstance(w, torch.Tensor)
                and isinstance(o, torch.Tensor)
                and (w.shape[:1], o.shape[:1]) == ((n,), (1,))
                and w.shape[1:] == o.shape[1:]
            ]
            if kept != list(range(len(kept))):
                continue
            part = tuple(whole[i][k : k + 1].contiguous() for i in kept)  # type: ignore[index]
            way = Way(args, kwargs, places=places, item=k)
            yield _Pair(way, names[: len(kept)], alone, kwargs, part, tuple(one[i] for i in kept))

    def _ran(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool = False
    ) -> tuple[tuple[str, ...], tuple[Value, ...]]:
        """Run an operator on the target; its results on the CPU, contiguous.

        Raises:
            _Refused: The target cannot run it; where this is no first run, it refuses a part of what it has accepted.
        """
        try:
            ran = self._executor.run_mirrored(plan, args, kwargs, _MAX_BYTES)
            values = self._executor.values(plan, ran)
            names = results.names(plan, ran.args, ran.kwargs, ran.out)[: len(values)]
        except Exception as error:
            found = finding_of_error(error, plan.name)
            if first and not isinstance(error, WorkerDied):
                found = Finding(Kind.UNVERIFIED, plan.name, "", "", "the target cannot run it", found.message)
            raise _Refused(found) from None
        return names, tuple(packed(v) if isinstance(v, torch.Tensor) else v for v in values)

    def _examined(self, plan: OpPlan, pair: _Pair) -> Differing | None:
        """What the judge says of two ways; None where they agree bit by bit, or cannot be compared."""
        try:
            if all(map(bits_equal, pair.actual, pair.expected)):
                return None
        except Uncomparable:
            return None

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Value, ...]:
            return self._ran(plan, args, kwargs)[1]

        case = Case(
            plan.func, pair.args, pair.kwargs, (), pair.names, pair.actual, pair.expected, run, run, same_device=False
        )
        verdict, diffs, wrong = self._judge.examine(case)
        if verdict.cause is Cause.REFERENCE:  # of the two ways, the second is the wrong one
            case = replace(case, actual=pair.expected, expected=pair.actual)
            _, diffs, wrong = self._judge.examine(case)
        return Differing(pair.way, verdict, diffs, wrong, case)

    def _judged(self, part: Part, plan: OpPlan, pair: _Pair) -> list[Finding]:
        found = self._examined(plan, pair)
        if found is None:
            return []
        verdict, wrong = found.verdict, found.wrong
        if verdict.status is Status.MISMATCH:
            cause = Cause.EXCEPTIONAL_VALUES if wrong and all(f.has_only_classes for f in wrong) else Cause.LAYOUT
            return [
                Finding(
                    Kind.MISMATCH, plan.name, "", cause, _WORDS[part], _evidence(pair, wrong) or verdict.evidence[:300]
                )
            ]
        if verdict.status is Status.UNVERIFIED:
            return [Finding(Kind.UNVERIFIED, plan.name, "", verdict.cause or "", verdict.explanation)]
        if part is Part.SLICE:
            return [Finding(Kind.PASS, plan.name, "", Cause.ROUNDING, NOT_INVARIANT, verdict.evidence[:300])]
        return []


def _evidence(pair: _Pair, wrong: tuple[Wrong, ...]) -> str:
    """The first element that is wrong: ``12 of 99 elements; [3]: inf against 1.8e+38, inputs 89.4``."""
    for finding in wrong:
        if finding.bad.size:
            k, n = int(finding.bad[0]), finding.actual.numel()
            values = [_printed(v, k, n) for v in (pair.actual[finding.position], pair.expected[finding.position])]
            given = [_printed(t, k, n) for t in leaves([pair.args]) if t.numel() in (1, n)]
            inputs = f", inputs {', '.join(given)}" if given else ""
            return f"{finding.bad.size} of {n} elements; [{k}]: {' against '.join(values)}{inputs}"
    return ""


def _printed(value: Value, k: int, n: int) -> str:
    flat = torch.as_tensor(value).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return f"{flat[k if flat.numel() == n else 0].item():.9g}"


class _Refused(Exception):  # noqa: N818 - a reason, caught inside
    """The target does not run an operator."""

    def __init__(self, finding: Finding) -> None:
        super().__init__()
        self.finding = finding
