"""Layout and batch invariance: whether a platform agrees with itself.

Three pairs of calls must agree: vector body and scalar tail, strided and contiguous inputs, and a batch and its slices.
`CallTracer` runs the function of a case once on the CPU and copies its operator calls. `Invariance` runs each call on
the target in both variants. The judge decides whether rounding explains a difference. If rounding does not explain it,
one of the two results is wrong, and no reference platform is needed to see that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action, OpPlan, make_plan
from shadowrun.intercept.torchapi import DispatchMode
from shadowrun.intercept.untrusted.checked_calls import check_call
from shadowrun.judge.judge import Judge
from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.operators.case import Case, Value, exact_copy
from shadowrun.operators.vendor_ops import COUNTERPARTS
from shadowrun.platforms.worker.client import WorkerDied
from shadowrun.replay.executor import Executor
from shadowrun.studies.sweep.batch_arguments import batch_arguments, batch_item
from shadowrun.studies.sweep.cases import NOT_INVARIANT, CaseFinding, Kind, Part
from shadowrun.studies.sweep.inputs import is_plain, leaves, strided, transposed
from shadowrun.studies.sweep.sweep_findings import finding_of_error
from shadowrun.types import Cause, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.judge.result_diff import ResultDiff as Wrong
    from shadowrun.platforms.device import Platform
    from shadowrun.types import TensorDiff, Verdict

__all__ = [
    "CallTracer",
    "Invariance",
    "LayoutVariant",
    "Pair",
    "TargetUnsupported",
    "VariantMismatch",
    "flattened",
    "map_tensors",
]


_COLUMNS = 7


@dataclass(frozen=True, slots=True)
class LayoutVariant:
    """How the two variants of a call differ.

    Attributes:
        args, kwargs: Inputs of the call on all elements: flat vectors, contiguous tensors, the whole batch.
        change: Layout of the other variant, ``strided`` or ``transposed``, or ``reversed``, ``in place``,
            ``in place, transposed``; empty in other parts.
        places: Indices in `args` of inputs with a batch; empty in other parts.
        item: Index of the batch item that ran alone.
        written_by: The in-place operator that the other variant calls.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    change: str = ""
    places: tuple[int, ...] = ()
    item: int = 0
    written_by: OpPlan | None = None


def map_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with each tensor changed, also in lists."""

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return type(value)(each(v) for v in value) if type(value) in (list, tuple) else value

    return tuple(each(a) for a in args), {k: each(v) for k, v in kwargs.items()}


def as_contiguous(t: torch.Tensor) -> torch.Tensor:
    """A contiguous copy; the tensor itself if it is not plain."""
    return t.contiguous() if is_plain(t) else t


def element(t: torch.Tensor, k: int) -> torch.Tensor:
    """Element `k` of a vector, as a vector; a tensor without dimensions is returned unchanged."""
    return t[k : k + 1] if t.dim() else t


def as_table(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Reshape vectors of one length to two dimensions, without the rest: a vector cannot be transposed in memory."""
    # Only where all have one shape: operands that are broadcast would be reshaped out of step.
    shapes = {t.shape for t in leaves([args, kwargs]) if t.dim()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        return args, kwargs
    n_rows = next(iter(shapes))[0] // _COLUMNS
    return map_tensors(args, kwargs, lambda t: t[: n_rows * _COLUMNS].reshape(n_rows, _COLUMNS) if t.dim() else t)


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], int] | None:
    """Inputs of an element-wise operator as vectors, and their length; None if they cannot be broadcast."""
    # A tensor without dimensions stays as it is: in type promotion its dtype counts less than that of a vector.
    shapes = [t.shape for t in leaves([args, kwargs]) if t.dim()]
    try:
        shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    n = shape.numel()
    if not shapes or n < 2:
        return None
    args, kwargs = map_tensors(args, kwargs, lambda t: t.expand(shape).contiguous().reshape(-1) if t.dim() else t)
    return args, kwargs, n


class CallTracer(DispatchMode):  # type: ignore[no-untyped-call]
    """Copies the calls of deterministic operators that mutate nothing.

    Args:
        plans: Plans by the `id` of the operator; new ones are added.

    Attributes:
        calls: Plan, args and kwargs of each call.
    """

    def __init__(self, plans: dict[int, OpPlan]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plans = plans
        self.calls: list[tuple[OpPlan, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            plan = self._plans.get(id(func))
            if plan is None:
                plan = self._plans[id(func)] = make_plan(func, len(self._plans))
            tensors = list(leaves([args, kwargs]))
            if (
                _is_repeatable(plan)
                and tensors
                and all(is_plain(t) and not t.is_conj() and not t.is_neg() for t in tensors)
            ):
                self.calls.append((plan, *map_tensors(args, kwargs, exact_copy)))
        return func(*args, **kwargs)


def _is_repeatable(plan: OpPlan) -> bool:
    named = plan.name.partition("::")[2]
    empty = named.startswith(("empty", "new_empty", "_local_scalar", "_fused_dropout"))
    replayed = plan.action is Action.REPLAY and not plan.mutated and not plan.unstable and not plan.custom
    return replayed and not empty and torch.Tag.nondeterministic_seeded not in plan.func.tags


_MAX_BYTES = 1 << 28
_MAX_CALLS = 16
_MAX_SINGLE = 1200
_EXPLANATIONS = {
    Part.TAIL: "vector body and scalar tail differ",
    Part.LAYOUT: "strided and contiguous inputs differ",
    Part.SLICE: "in a batch and alone differ",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Results of an operator in two variants, on the CPU, and the inputs of the second variant."""

    variant: LayoutVariant
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    actual: tuple[Value, ...]
    expected: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class VariantMismatch:
    """A call whose two variants differ by more than rounding explains.

    Attributes:
        variant: The two variants.
        verdict, diffs, wrong: What the judge says of the variant that is wrong.
        case: The call as the judge got it.
    """

    variant: LayoutVariant
    verdict: Verdict
    diffs: tuple[TensorDiff, ...]
    wrong: tuple[Wrong, ...]
    case: Case


class Invariance:
    """Compares a platform with itself.

    Args:
        platform: Platform under test.
        max_single: Elements of a vector that are computed alone, each in a call.
        checked: Look at each call as at one of a file: an item of a batch may not fit the other arguments.
    """

    def __init__(self, platform: Platform, max_single: int = _MAX_SINGLE, *, checked: bool = False) -> None:
        self._max_single = max_single
        self._checked = checked
        self._executor = Executor(platform)
        # The finding names the two variants: no hypothesis on the cause is needed.
        self._judge = Judge(hypotheses=False)
        self._plans: dict[int, OpPlan] = {}

    def run(self, part: Part, prepared: Callable[[], Any], on_target: Callable[[], None]) -> list[CaseFinding] | None:
        """Compare the two variants of each operator call of a function.

        Args:
            part: TAIL, LAYOUT or SLICE.
            prepared: The function, on the CPU.
            on_target: Called when the function has run on the CPU and before the target runs.

        Returns:
            Findings; None if the part applies to no operator that it calls.

        Raises:
            Exception: Any exception of the function.
        """
        calls = self.calls(prepared)
        on_target()
        findings: list[CaseFinding] = []
        n = 0
        for plan, args, kwargs in calls:
            try:
                for pair in self.pairs(part, plan, args, kwargs):
                    n += 1
                    findings += self._findings(part, plan, pair)
            except TargetUnsupported as refused:
                findings.append(refused.finding)
        return findings if n or findings else None

    def calls(
        self, prepared: Callable[[], Any], limit: int = _MAX_CALLS
    ) -> list[tuple[OpPlan, tuple[Any, ...], dict[str, Any]]]:
        """The operator calls of a function on the CPU, with copies of their inputs; at most `limit`."""
        tracer = CallTracer(self._plans)
        with torch.no_grad(), tracer:
            prepared()
        return tracer.calls[:limit]

    def first_mismatch(
        self, part: Part, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> VariantMismatch | None:
        """The first pair of variants that differs by more than rounding explains; None if all agree.

        Args:
            part: TAIL, LAYOUT or SLICE.
            plan: The operator.
            args: Its inputs, on the CPU.
            kwargs: Its keyword arguments.
        """
        try:
            for pair in self.pairs(part, plan, args, kwargs):
                mismatch = self.compare(plan, pair)
                if mismatch is not None and mismatch.verdict.status is Status.MISMATCH:
                    return mismatch
        except TargetUnsupported:
            return None
        return None

    def pairs(self, part: Part, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Pair]:
        """The results of a call in its variants.

        Args:
            part: TAIL, LAYOUT or SLICE.
            plan: The operator.
            args: Its inputs, on the CPU.
            kwargs: Its keyword arguments.

        Raises:
            TargetUnsupported: The target cannot run it.
        """
        made = {Part.TAIL: self._tail, Part.LAYOUT: self._layout, Part.SLICE: self._slice}[part](plan, args, kwargs)
        yield from made

    def _tail(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.pointwise not in plan.func.tags:
            return
        flat = flattened(args, kwargs)
        if flat is None:
            return
        args, kwargs, n = flat
        names, whole = self.results(plan, args, kwargs, first=True)
        if not all(isinstance(v, torch.Tensor) and v.shape == (n,) for v in whole):
            return
        step = max(1, -(-n // self._max_single))  # a call per element is slow: of a long vector, every `step`-th
        picked = range(0, n, step)
        # One element each: a vector of length 1 is all scalar tail.
        alone = [self.results(plan, *map_tensors(args, kwargs, lambda t, k=k: element(t, k)))[1] for k in picked]
        variant = LayoutVariant(args, kwargs)
        if step > 1:
            index = torch.tensor(picked)
            args, kwargs = map_tensors(args, kwargs, lambda t: t[index] if t.dim() else t)
            whole = tuple(v[index] for v in whole if isinstance(v, torch.Tensor))
        yield Pair(variant, names, args, kwargs, whole, tuple(torch.cat(list(one)) for one in zip(*alone, strict=True)))

    def _layout(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "as_strided" in plan.name or "resize" in plan.name:  # their result depends on the strides
            return
        if torch.Tag.pointwise in plan.func.tags:
            args, kwargs = as_table(args, kwargs)
        args, kwargs = map_tensors(args, kwargs, as_contiguous)
        for change in (strided, transposed):
            other = map_tensors(args, kwargs, change)
            # The change does not apply to any of these tensors: the pair would be one call twice.
            if all(a is b for a, b in zip(leaves([args, kwargs]), leaves(list(other)), strict=True)):
                continue
            names, straight = self.results(plan, args, kwargs, first=True)
            _, turned = self.results(plan, *other, first=True)  # `first`: an operator may refuse a layout
            yield Pair(LayoutVariant(args, kwargs, change.__name__), names, args, kwargs, turned, straight)

    def _slice(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places, n = batch_arguments(plan.func, args, kwargs)
        if n < 2:
            return
        names, whole = self.results(plan, args, kwargs, first=True)
        # The ends and the middle: blocks of a kernel begin at the first item, and its tail has the last.
        for k in sorted({0, n // 2, n - 1}):
            alone = batch_item(args, places, k)
            _, one = self.results(plan, alone, kwargs)
            # Results without a batch dimension (a saved seed, statistics over the batch) cannot be compared.
            kept = [
                i
                for i, (w, o) in enumerate(zip(whole, one, strict=False))
                if isinstance(w, torch.Tensor)
                and isinstance(o, torch.Tensor)
                and (w.shape[:1], o.shape[:1]) == ((n,), (1,))
                and w.shape[1:] == o.shape[1:]
            ]
            # Names belong to results by position: only the first ones may be kept.
            if kept != list(range(len(kept))):
                continue
            # Strides are compared too, and a slice has those of the batch.
            part = tuple(whole[i][k : k + 1].contiguous() for i in kept)  # type: ignore[index]
            variant = LayoutVariant(args, kwargs, places=places, item=k)
            yield Pair(variant, names[: len(kept)], alone, kwargs, part, tuple(one[i] for i in kept))

    def results(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool = False
    ) -> tuple[tuple[str, ...], tuple[Value, ...]]:
        """Run an operator on the target; its results on the CPU, contiguous.

        Raises:
            TargetUnsupported: The target cannot run it. If `first` is false, that is a failure: it accepted the whole
                input.
            Refused: It is looked at, and no file may have it made.
        """
        if self._checked:
            check_call(plan.func, args, kwargs, stand_in=COUNTERPARTS.get(plan.name))
        try:
            ran = self._executor.run_mirrored(plan, args, kwargs, _MAX_BYTES)
            values = self._executor.values(plan, ran)
            names = ran.names(plan)[: len(values)]
        except Exception as error:
            finding = finding_of_error(error, plan.name)
            if first and not isinstance(error, WorkerDied):
                finding = CaseFinding(Kind.UNVERIFIED, plan.name, "", "", "the target cannot run it", finding.message)
            raise TargetUnsupported(finding) from None
        return names, tuple(as_contiguous(v) if isinstance(v, torch.Tensor) else v for v in values)

    def compare(self, plan: OpPlan, pair: Pair) -> VariantMismatch | None:
        """Judge two variants; None if they agree bit by bit or cannot be compared."""
        try:
            if all(map(bits_equal, pair.actual, pair.expected)):
                return None
        except Uncomparable:
            return None

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Value, ...]:
            return self.results(plan, args, kwargs)[1]

        case = Case(
            plan.func, pair.args, pair.kwargs, (), pair.names, pair.actual, pair.expected, run, run, same_device=False
        )
        verdict, diffs, wrong = self._judge.examine(case)
        if verdict.cause is Cause.REFERENCE:  # the second variant is the wrong one: judge it as the actual result
            case = replace(case, actual=pair.expected, expected=pair.actual)
            _, diffs, wrong = self._judge.examine(case)
        return VariantMismatch(pair.variant, verdict, diffs, wrong, case)

    def _findings(self, part: Part, plan: OpPlan, pair: Pair) -> list[CaseFinding]:
        mismatch = self.compare(plan, pair)
        if mismatch is None:
            return []
        verdict, wrong = mismatch.verdict, mismatch.wrong
        if verdict.status is Status.MISMATCH:
            cause = Cause.EXCEPTIONAL_VALUES if wrong and all(f.has_only_classes for f in wrong) else Cause.LAYOUT
            return [
                CaseFinding(
                    Kind.MISMATCH,
                    plan.name,
                    "",
                    cause,
                    _EXPLANATIONS[part],
                    _evidence(pair, wrong) or verdict.evidence[:300],
                )
            ]
        if verdict.status is Status.UNVERIFIED:
            return [CaseFinding(Kind.UNVERIFIED, plan.name, "", verdict.cause or "", verdict.explanation)]
        if part is Part.SLICE:  # a remark: no standard requires that rounding is independent of the batch
            return [CaseFinding(Kind.PASS, plan.name, "", Cause.ROUNDING, NOT_INVARIANT, verdict.evidence[:300])]
        return []


def _evidence(pair: Pair, wrong: tuple[Wrong, ...]) -> str:
    """Number of wrong elements and the first one: ``12 of 99 elements; [3]: inf against 1.8e+38, inputs 89.4``."""
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


class TargetUnsupported(Exception):  # noqa: N818 - a reason, caught inside
    """The target cannot run an operator."""

    def __init__(self, finding: CaseFinding) -> None:
        super().__init__()
        self.finding = finding
