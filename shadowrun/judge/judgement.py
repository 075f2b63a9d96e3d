"""The judgement of one call: could a correct implementation have returned this, for this operator, dtype and inputs?

A ladder; each step decides only what the one before left open: form, classes of values, cheap bounds in units in the
last place, then the float64 oracle with its perturbations (`oracle`, `numerics.excess`). User tolerances take the
place of the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import numpy as np
import torch

from shadowrun.judge.cause import hypotheses
from shadowrun.judge.decision_trace import Rung
from shadowrun.judge.factorizations import by_equation, in_another_order
from shadowrun.judge.matrix_products import rounded_inputs_of_long_product, short_product_error
from shadowrun.judge.oracle import FEW_RUNS, MANY_RUNS, NoOracle, Oracle
from shadowrun.judge.oracle_verdict import reference_wrong, verdict_by_oracle
from shadowrun.judge.result_diff import ResultDiff, diff_results
from shadowrun.judge.rounding.bias import bias_verdict, may_be_biased
from shadowrun.judge.rounding.bounds import RATIO
from shadowrun.judge.rounding.closeness import ClosenessCheck
from shadowrun.judge.undefined_elements import undefined
from shadowrun.numerics.bits import bits_equal
from shadowrun.numerics.diff import diff
from shadowrun.numerics.form import form_difference
from shadowrun.numerics.precision import ulp_distance
from shadowrun.operators.case import tensors
from shadowrun.operators.facts import only_moves, ulp_bound
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from shadowrun.judge.cause.hypotheses import KnownCauses
    from shadowrun.judge.decision_trace import Trace
    from shadowrun.judge.remembered_bounds import ContextBounds
    from shadowrun.judge.rounding.bias_over_calls import BiasOverCalls
    from shadowrun.operators.case import Case, Value

__all__ = ["Examined", "Judgement", "Parts", "ToleranceOf", "done", "is_random"]

ToleranceOf = Callable[[str, str], tuple[float, float] | None]
T = TypeVar("T")
Parts: TypeAlias = Generator[None, None, T]
"""Work that may be suspended at each ``yield``: under an overhead budget it is done in parts."""
Examined: TypeAlias = "tuple[Verdict, tuple[TensorDiff, ...], tuple[ResultDiff, ...]]"


class Judgement:
    """The judgement of one call; each step adds to `diffs` and `mismatches`."""

    def __init__(
        self,
        case: Case,
        tolerance: ToleranceOf,
        max_bytes: int,
        bias_over_calls: BiasOverCalls,
        known: KnownCauses | None,
        bounds: ContextBounds | None = None,
    ) -> None:
        self.case = case
        self.facts = case.facts
        self.tolerance = tolerance
        self.tolerances: tuple[float, float] | None = None  # of the result in hand
        self.max_bytes = max_bytes
        self.bias_over_calls = bias_over_calls
        self.known = known  # None: no hypotheses are tried
        self.bounds = bounds  # what an earlier call of the same context passed
        self.diffs: dict[int, TensorDiff] = {}
        self.closeness = ClosenessCheck(case, max_bytes)
        self.oracle: Oracle | None = None
        self.mismatches: list[ResultDiff] = []
        self.trace: Trace | None = None

    def run(self) -> Parts[tuple[Verdict, tuple[TensorDiff, ...]]]:
        """Climb the ladder; the verdict, and a diff for each result whose bits or form differ."""
        case = self.case
        if len(case.actual) != len(case.expected):
            counts = f"{len(case.actual)} results against {len(case.expected)}"
            return Verdict(Status.MISMATCH, Cause.METADATA, "number of results", counts), ()
        stride_only = ""
        for k, (name, actual, expected) in enumerate(zip(case.names, case.actual, case.expected, strict=True)):
            form = form_difference(actual, expected)
            if form and self.trace is not None:
                self.trace.add_step(Rung.FORM, name, form)
            # CUDA keeps the statistics of 16-bit norms in float32, and those of batch norm in evaluation where the CPU
            # keeps none.
            if form and k in self.facts.saved and _another_way_to_save(actual, expected):
                continue
            if form or not bits_equal(actual, expected):
                self.diffs[k] = diff(name, actual, expected)
            # A wrong value is the more serious finding: with other strides only, the values are judged as well.
            if form and form.startswith("stride"):
                # Which of its memory formats a convolution returns, torch decides by the library that computes it.
                if self.facts.convolution and _is_in_a_format(actual) and _is_in_a_format(expected):
                    continue
                stride_only = stride_only or f"{name}: {form}"
            elif form:
                verdict = Verdict(Status.MISMATCH, Cause.METADATA, form.partition(" ")[0], f"{name}: {form}")
                if self.trace is not None:
                    self.trace.add_step(Rung.FORM, name, form, "", verdict)
                return verdict, tuple(self.diffs.values())
        verdict = yield from self._values()
        if stride_only and verdict.status is not Status.MISMATCH:
            verdict = Verdict(Status.MISMATCH, Cause.METADATA, "stride", stride_only, 0.9)
            if self.trace is not None:
                self.trace.add_step(Rung.FORM, "", stride_only, "", verdict)
        return verdict, tuple(self.diffs.values())

    def _values(self) -> Parts[Verdict]:
        if self.trace is not None:
            for name, d in zip(self.case.names, map(self.diffs.get, range(len(self.case.names))), strict=True):
                n = d.n_different if d is not None else 0
                self.trace.add_step(Rung.BITS, name, f"{n} elements differ", "0", None if n else Status.MATCH)
        # Bits are compared as integers: under flushing of subnormals, a floating comparison calls a subnormal equal to
        # 0.
        if not any(d.n_different for d in self.diffs.values()):
            return Verdict(Status.MATCH)
        if is_random(self.case):
            if self.trace is not None:
                self.trace.add_step(Rung.RANDOM, "", "its draws differ", "", Status.UNVERIFIED)
            return Verdict(Status.UNVERIFIED, Cause.RANDOMNESS, "random operator")
        verdicts, mismatches = [], self.mismatches
        for k, d in self.diffs.items():
            if d.n_different:
                # The oracle takes some twenty times as long as the operator, and on another device almost every sum
                # differs.
                if (close := self._close(k, d)) is not None:
                    verdicts.append(close)
                    continue
                result_diff = diff_results(self.case, k, d.n_different)
                yield
                verdicts.append((yield from self._one(result_diff)))
                self._note(result_diff)
                if verdicts[-1].status is Status.MISMATCH:
                    mismatches.append(result_diff)
        # Among matches, one that a reader should know of comes first.
        worst = min(verdicts, key=lambda v: (_ORDER[v.status], v.cause in _LAST))
        is_known = worst.cause in (Cause.REFERENCE, Cause.REDUCED_PRECISION)
        if worst.status is Status.MISMATCH and not is_known and self.known is not None:
            yield
            found = yield from hypotheses.explain(self.case, mismatches, self._oracle_or_none, self.known)
            if found is not None:
                if self.trace is not None:
                    figure = f"{found.explanation}: {found.evidence}, confidence {found.confidence:g}"
                    self.trace.add_step(Rung.CAUSE, "", figure, "", found)
                return replace(found, evidence=f"{worst.evidence}; {found.evidence}")
            if all(f.has_only_classes for f in mismatches):
                return replace(worst, cause=Cause.EXCEPTIONAL_VALUES, explanation="NaN or infinity handled differently")
        # Atomic additions on accelerators vary between runs within rounding: a match, which a reader should know of.
        is_steady = self.known is None or (self.bounds is not None and self.bounds.is_steady)
        if worst.status is Status.MATCH and not is_steady and hypotheses.order_varies(self.case):
            return replace(worst, cause=Cause.NON_DETERMINISM, explanation="another run of the target differs")
        return worst

    def _close(self, position: int, d: TensorDiff) -> Verdict | None:
        """MATCH for a result close to the reference's, where neither a ULP bound nor a user tolerance applies."""
        if self.tolerance(self.case.op, d.expected.dtype) is not None or d.actual.dtype != d.expected.dtype:
            return None
        # Each call is counted, also one that a ULP bound decides: a bias of small results shows in the number of calls
        # only.
        if self.bias_over_calls.add_result(self.case, position) or self.ulp_bound is not None:
            return None
        verdict = self.closeness.verdict(position, d)
        if verdict is None and self.bounds is not None:
            verdict = self.bounds.close(position, d)
        if self.trace is not None:
            figure = verdict.evidence if verdict is not None else f"max {d.max_ulp} ULP"
            self.trace.add_step(Rung.CLOSENESS, d.name, figure, self.closeness.limit(position), verdict)
        return verdict

    @cached_property
    def ulp_bound(self) -> int | None:
        """ULP bound of the operator for this call; None where it has no bound."""
        dtypes = [t.dtype for t in tensors((*self.case.expected, *self.case.args), self.case.kwargs)]
        return ulp_bound(self.case.op, dtypes, self.case.arguments())

    def _note(self, result_diff: ResultDiff) -> None:
        d = self.diffs[result_diff.position]
        changes: dict[str, object] = {"n_mismatched": int(result_diff.bad.size)}
        if result_diff.excess_actual is not None and result_diff.excess_expected is not None and result_diff.where.size:
            changes["excess_actual"] = float(result_diff.excess_actual.max())
            changes["excess_expected"] = float(result_diff.excess_expected.max())
        self.diffs[result_diff.position] = replace(d, **changes)  # type: ignore[arg-type]

    def _one(self, result_diff: ResultDiff) -> Parts[Verdict]:
        """Judge one result."""
        d = self.diffs[result_diff.position]
        self.tolerances = self.tolerance(self.case.op, d.expected.dtype)
        if result_diff.where.size == 0:
            verdict = Verdict(Status.MATCH, Cause.ROUNDING, "", f"{d.n_different} NaN payloads or signs of zeros sums")
            # IEEE 754 leaves NaN payloads to arithmetic, but copies keep all bits (5.5.1); torch promises no payloads,
            # so a match.
            if only_moves(self.case.op, self._floats()):
                evidence = f"{d.n_different} elements of {result_diff.name}"
                verdict = Verdict(Status.MATCH, Cause.EXCEPTIONAL_VALUES, "a copy changed the payload of NaN", evidence)
            return self._decided(Rung.CLASSES, result_diff, verdict)
        open_elements = undefined(self.case, result_diff)
        if open_elements is not None:
            reason, mask = open_elements
            if self.trace is not None:
                figure = f"{reason}: {int(mask.sum())} of {mask.size} differing elements"
                self.trace.add_step(Rung.OPEN, result_diff.name, figure, "", Status.UNVERIFIED if mask.all() else None)
            # Elements that are not open are judged as always: one tie must not excuse a wrong value next to it.
            if mask.all():
                return Verdict(
                    Status.UNVERIFIED, Cause.UNDEFINED, reason, f"{mask.size} elements of {result_diff.name}"
                )
            keep = ~mask
            result_diff.where = result_diff.where[keep]
            result_diff.zero_signs, result_diff.classes = result_diff.zero_signs[keep], result_diff.classes[keep]
        if result_diff.position in self.facts.by_equation:
            decided = self._by_equation(result_diff)
            if decided is not None:
                return self._decided(Rung.EQUATION, result_diff, decided)
        if self.tolerances is not None and result_diff.fmt is not None:
            verdict = self._by_user(result_diff, *self.tolerances)
            if verdict.status is Status.MISMATCH or not result_diff.classes.any():
                return self._decided(Rung.TOLERANCE, result_diff, verdict)
            # Classes are judged whatever the tolerance.
            result_diff.where, result_diff.zero_signs = (
                result_diff.where[result_diff.classes],
                result_diff.zero_signs[result_diff.classes],
            )
            result_diff.classes = result_diff.classes[result_diff.classes]
            return (yield from self._by_oracle(result_diff))
        if self.ulp_bound is not None:
            decided = self._by_bound(result_diff, self.ulp_bound)
            if self.trace is not None:
                figure = decided.evidence if decided is not None else f"max {d.max_ulp} ULP"
                self.trace.add_step(
                    Rung.BOUND, result_diff.name, figure, f"{self.ulp_bound} ULP: {self.facts.source}", decided
                )
            if decided is not None:
                return decided
        return (yield from self._by_oracle(result_diff))

    def _decided(self, rung: Rung, result_diff: ResultDiff, verdict: Verdict) -> Verdict:
        if self.trace is not None:
            self.trace.add_step(rung, result_diff.name, verdict.evidence or verdict.explanation, "", verdict)
        return verdict

    def _floats(self) -> list[torch.dtype]:
        """Dtypes of its floating tensors, inputs and results."""
        found = tensors((*self.case.expected, *self.case.args), self.case.kwargs)
        return [t.dtype for t in found if t.is_floating_point() or t.is_complex()]

    def _by_equation(self, result_diff: ResultDiff) -> Verdict | None:
        """Judge results that are unique only up to sign, basis or order; tolerances can only accept more."""
        if self.tolerances is not None and result_diff.fmt is not None and not result_diff.classes.any():
            verdict = self._by_user(result_diff, *self.tolerances)
            if verdict.status is Status.MATCH:
                return verdict
        try:
            return by_equation(self.case, result_diff, self._get_oracle)
        except NoOracle as reason:
            return Verdict(Status.UNVERIFIED, None, str(reason))

    def _by_user(self, result_diff: ResultDiff, rtol: float, atol: float) -> Verdict:
        a, e = result_diff.differing_values(result_diff.actual), result_diff.differing_values(result_diff.expected)
        with np.errstate(all="ignore"):
            # As `torch.testing.assert_close`: rtol is relative to the expected value.
            beyond = (np.abs(a - e) > atol + rtol * np.abs(e)) & ~result_diff.classes
        result_diff.bad = result_diff.where[beyond]
        evidence = f"{result_diff.bad.size} elements of {result_diff.name} beyond rtol {rtol:g}, atol {atol:g}"
        if result_diff.bad.size:
            return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
        return Verdict(Status.MATCH, Cause.ROUNDING, "", f"within rtol {rtol:g}, atol {atol:g}")

    def _by_bound(self, result_diff: ResultDiff, bound: int) -> Verdict | None:
        """The cheap bound; None if the oracle has to decide."""
        if bound == 0:
            result_diff.bad = result_diff.where
            result_diff.exact = True
            # The neighbour in float64 is another number than that in float32.
            if not self.facts.depends_on_dtype and self._oracle_agrees(result_diff):
                return reference_wrong(f"{result_diff.bad.size} elements of {result_diff.name}, an exact operator")
            share = f"{result_diff.bad.size} of {result_diff.actual.numel()} elements"
            evidence = f"{share} of {result_diff.name} differ, and the operator is exact"
            return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
        if (
            result_diff.fmt is None
            or result_diff.classes.any()
            or result_diff.zero_signs.any()
            or not result_diff.fmt.signed
        ):
            return None
        d = self.diffs[result_diff.position]
        ulp = d.max_ulp
        if result_diff.where.size < d.n_different:  # some are left out, which may be those with the greatest distance
            where = torch.from_numpy(result_diff.where)
            a, e = (t[where].view(result_diff.fmt.view).numpy() for t in (result_diff.actual, result_diff.expected))
            ulp = ulp_distance(a, e, 8 * a.itemsize)
        # Truncation stays within one ULP of each element; only all elements together show it.
        if ulp > bound or may_be_biased(self.case, result_diff.position, d):
            return None
        return Verdict(Status.MATCH, Cause.ROUNDING, "", f"max {ulp} ULP, within {bound} of the operator")

    def _oracle_agrees(self, result_diff: ResultDiff) -> bool:
        """Whether the oracle equals the target's result at every differing element of an exact operator."""
        try:
            truth = self._get_oracle().truths[result_diff.position]
        except NoOracle:
            return False
        if truth is None or truth.value.size != result_diff.actual.numel():
            return False
        # Bits, not values: an exact operator also defines the sign of a zero.
        rounded = torch.from_numpy(truth.value).to(result_diff.actual.dtype)
        where = torch.from_numpy(result_diff.where)
        return bits_equal(rounded[where], result_diff.actual[where])

    def _get_oracle(self) -> Oracle:
        # One oracle for all results and hypotheses of the call: each needs the same run in float64.
        if self.oracle is None:
            self.oracle = Oracle(self.case, self.max_bytes)
        return self.oracle

    def _oracle_or_none(self) -> Oracle | None:
        try:
            return self._get_oracle()
        except NoOracle:
            return None

    def _by_oracle(self, result_diff: ResultDiff) -> Parts[Verdict]:
        """Judge by the float64 result, and by how well the inputs determine it."""
        d = self.diffs[result_diff.position]
        try:
            oracle = self._get_oracle()
            result_diff.truth = oracle.truths[result_diff.position]
            if result_diff.truth is None or result_diff.truth.value.size != result_diff.actual.numel():
                raise NoOracle("no float64 oracle: it returned another number of elements")  # noqa: TRY301
            if result_diff.classes.any():
                oracle.note_open_classes(result_diff.position)
            # Without perturbed runs every unit is smaller: what passes now passes anyway, for one run of the oracle.
            verdict = self._against_oracle(result_diff, d, oracle, 0)
            if verdict.status is not Status.MATCH:
                yield
                # Most calls that are right end here. A call is a mismatch only after 16 runs, which bound the
                # spread more surely.
                oracle.perturb(FEW_RUNS)
                verdict = self._against_oracle(result_diff, d, oracle, FEW_RUNS)
            if verdict.status is not Status.MATCH and oracle.n_perturbed_runs < MANY_RUNS:
                yield
                oracle.perturb(MANY_RUNS)
                verdict = self._against_oracle(result_diff, d, oracle, MANY_RUNS)
        except NoOracle as reason:
            return self._without_oracle(result_diff, reason)
        if verdict.status is Status.MATCH:
            # What passes element by element may be off as a whole: errors of rounding have either sign, a bias has one.
            return self._of_all_elements(result_diff, d, oracle) or verdict
        if verdict.status is Status.MISMATCH and result_diff.position in self.facts.any_order:
            verdict = in_another_order(self.case, result_diff, oracle) or verdict
        # A saved workspace (`_ctc_loss`, `mkldnn_rnn_layer`) is the kernel's own affair; its use in the backward is
        # compared.
        if verdict.status is Status.MISMATCH and result_diff.position in self.facts.not_unique:
            verdict = Verdict(Status.UNVERIFIED, Cause.UNDEFINED, f"{result_diff.name} is not unique", verdict.evidence)
        if self.trace is not None:
            self.trace.decided(verdict)
        return verdict

    def _against_oracle(self, result_diff: ResultDiff, d: TensorDiff, oracle: Oracle, n_runs: int) -> Verdict:
        """Both sides against the truth, after so many perturbed runs."""
        verdict = verdict_by_oracle(self.case, result_diff, d, ratio=RATIO if n_runs else 0.0)
        if self.trace is not None:
            runs = max(n_runs, oracle.n_perturbed_runs)
            limit = f"{result_diff.limit:.3g} units" if result_diff.limit else ""
            figure = f"{verdict.evidence} ({runs} perturbed runs)"
            decided = verdict if verdict.status is Status.MATCH else None
            self.trace.add_step(Rung.ORACLE, result_diff.name, figure, limit, decided)
        return verdict

    def _without_oracle(self, result_diff: ResultDiff, reason: NoOracle) -> Verdict:
        if not result_diff.classes.any():
            return self._decided(Rung.ORACLE, result_diff, Verdict(Status.UNVERIFIED, None, str(reason)))
        result_diff.bad = result_diff.where[result_diff.classes]
        evidence = f"{result_diff.bad.size} elements of {result_diff.name}; {reason}"
        explanation = "NaN or infinity on one side only"
        verdict = Verdict(Status.MISMATCH, Cause.EXCEPTIONAL_VALUES, explanation, evidence, 0.7)
        return self._decided(Rung.CLASSES, result_diff, verdict)

    def _of_all_elements(self, result_diff: ResultDiff, d: TensorDiff, oracle: Oracle) -> Verdict | None:
        """Find what no single element proves: rounding of intermediate values, rounded inputs, and bias."""
        checks: tuple[tuple[Rung, Callable[[], Verdict | None]], ...] = (
            # One unit in the last place everywhere is rounding, also where it adds to a rounding of the reference.
            (
                Rung.SHORT_PRODUCT,
                lambda: short_product_error(self.case, result_diff, oracle) if d.max_ulp > 1 else None,
            ),
            (Rung.LONG_PRODUCT, lambda: rounded_inputs_of_long_product(self.case, result_diff, oracle)),
            (Rung.BIAS, lambda: bias_verdict(self.case, result_diff)),
            (Rung.BIAS_OVER_CALLS, lambda: self.bias_over_calls.verdict(self.case, result_diff)),
        )
        for rung, check in checks:
            verdict = check()
            if verdict is not None:
                return self._decided(rung, result_diff, verdict)
        return None


def done(parts: Parts[T]) -> T:
    """Do all parts at once, and return the result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


def _another_way_to_save(actual: Value, expected: Value) -> bool:
    """Whether one side left empty what the other saved, or saved it in another precision."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    if 0 in (actual.numel(), expected.numel()):
        return True
    floats = actual.is_floating_point() and expected.is_floating_point()
    return floats and actual.shape == expected.shape and actual.dtype is not expected.dtype


def _is_in_a_format(value: Value) -> bool:
    """Whether a tensor is contiguous, or so with the channels last."""
    return isinstance(value, torch.Tensor) and (
        value.is_contiguous() or (value.ndim > 2 and value.movedim(1, -1).is_contiguous())
    )


def is_random(case: Case) -> bool:
    """Whether the call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in case.func.tags:
        return False
    named = case.arguments()
    # The tag belongs to the operator: attention and dropout carry it also where their arguments switch random numbers
    # off.
    switches = [named[k] for k in ("dropout_p", "p", "dropout", "train", "training") if k in named]
    return all(switches)


_LAST: Final = (Cause.REFERENCE, Cause.ROUNDING)
_ORDER: Final = {Status.MISMATCH: 0, Status.UNVERIFIED: 1, Status.MATCH: 2}
