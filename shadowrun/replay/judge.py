"""The verdict: could a correct implementation have returned this, for this operator, dtype and inputs?

A ladder; each step decides only what the one before left open: form, classes of values, cheap bounds in units in the
last place, then the float64 oracle with its perturbations (`oracle`, `numerics.excess`). User tolerances take the
place of the last two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.numerics.diff import diff
from shadowrun.numerics.form import dtype_name, form_difference
from shadowrun.numerics.precision import ulp_distance
from shadowrun.numerics.tolerance import base_name, moves, not_unique, saved, ulp_bound
from shadowrun.replay import hypotheses, sampling
from shadowrun.replay.decompositions import any_order, by_equation, concerns, in_another_order
from shadowrun.replay.finding import Finding, look, op_name
from shadowrun.replay.hidden import hidden_rounding
from shadowrun.replay.oracle import FEW_DRAWS, MANY_DRAWS, NoOracle, Oracle, tensors
from shadowrun.replay.pooled import Pool
from shadowrun.replay.products import beyond_one_rounding
from shadowrun.replay.screen import Screen
from shadowrun.replay.systematic import may_be_systematic, systematic
from shadowrun.replay.undefined import arguments, undefined
from shadowrun.replay.weighing import reference_wrong, weigh
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from shadowrun.replay.case import Case, Value
    from shadowrun.replay.hypotheses import Known

__all__ = ["Judge"]

ToleranceOf = Callable[[str, str], tuple[float, float] | None]


class Judge:
    """Judges calls whose results are not equal bit by bit.

    Args:
        rtol: Relative tolerance, as in `torch.testing.assert_close`; takes the place of bounds and oracle.
        atol: Absolute tolerance.
        tolerance: Instead of both: tolerances by operator and dtype of the result, None where there are none.
        max_bytes: Memory that the oracle may take for one call.
        hypotheses: Look for the cause of a mismatch by running the operator under alternative explanations.

    Attributes:
        sampled: Whether it judged a call by slices.
    """

    def __init__(
        self,
        *,
        rtol: float | None = None,
        atol: float | None = None,
        tolerance: ToleranceOf | None = None,
        max_bytes: int = 1 << 30,
        hypotheses: bool = True,
    ) -> None:
        given = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
        self._tolerance: ToleranceOf = tolerance or (lambda _op, _dtype: given)
        self._max_bytes = max_bytes
        self._hypotheses = hypotheses
        self._known: Known = {}
        self.sampled = False
        self._pool = Pool()

    def __call__(self, case: Case) -> tuple[Verdict, tuple[TensorDiff, ...]]:
        """Judge one call.

        Returns:
            The verdict, and a diff for each result whose bits or form differ.
        """
        verdict, diffs, _ = self.examine(case)
        return verdict, diffs

    def examine(self, case: Case) -> tuple[Verdict, tuple[TensorDiff, ...], tuple[Finding, ...]]:
        """Judge one call, and give the results that mismatched element by element; they hold its tensors."""
        try:
            if sampling.is_large(case) and not _is_random(case) and not self._is_told(case):
                # With a pool of their own: the slices that are farthest off lean more than the whole result does.
                sampled = sampling.by_slices(case, lambda part: self._whole(part, Pool()))
                if sampled is not None:
                    self.sampled = True
                    return sampled
        except Uncomparable as error:
            return Verdict(Status.UNVERIFIED, explanation=str(error)), (), ()
        return self._whole(case, self._pool)

    def _is_told(self, case: Case) -> bool:
        """Whether tolerances take the place of the oracle for all results."""
        dtypes = {dtype_name(v.dtype) for v in case.expected if isinstance(v, torch.Tensor)}
        return all(self._tolerance(op_name(case), dtype) is not None for dtype in dtypes)

    def _whole(self, case: Case, pool: Pool) -> tuple[Verdict, tuple[TensorDiff, ...], tuple[Finding, ...]]:
        trial = _Trial(case, self._tolerance, self._max_bytes, pool, self._known if self._hypotheses else None)
        try:
            verdict, diffs = trial.run()
        except Uncomparable as error:
            return Verdict(Status.UNVERIFIED, explanation=str(error)), tuple(trial.diffs.values()), ()
        return verdict, diffs, tuple(trial.findings)


class _Trial:
    """The judgement of one call; each step leaves `diffs` and `findings` richer."""

    def __init__(self, case: Case, tolerance: ToleranceOf, max_bytes: int, pool: Pool, known: Known | None) -> None:
        self.case = case
        self.op = op_name(case)
        self.tolerance = tolerance
        self.tolerances: tuple[float, float] | None = None  # of the result in hand
        self.max_bytes = max_bytes
        self.pool = pool
        self.known = known  # None: no hypotheses are asked
        self.diffs: dict[int, TensorDiff] = {}
        self.screen = Screen(case, max_bytes)
        self.oracle: Oracle | None = None
        self.findings: list[Finding] = []

    def run(self) -> tuple[Verdict, tuple[TensorDiff, ...]]:
        case = self.case
        if len(case.actual) != len(case.expected):
            counts = f"{len(case.actual)} results against {len(case.expected)}"
            return Verdict(Status.MISMATCH, Cause.METADATA, "number of results", counts), ()
        stride_only = ""
        for k, (name, actual, expected) in enumerate(zip(case.names, case.actual, case.expected, strict=True)):
            form = form_difference(actual, expected)
            if form and k in saved(self.op) and _another_way_to_save(actual, expected):
                continue
            if form or not bits_equal(actual, expected):
                self.diffs[k] = diff(name, actual, expected)
            if form and form.startswith("stride"):
                stride_only = stride_only or f"{name}: {form}"
            elif form:
                verdict = Verdict(Status.MISMATCH, Cause.METADATA, form.partition(" ")[0], f"{name}: {form}")
                return verdict, tuple(self.diffs.values())
        verdict = self._values()
        if stride_only and verdict.status is not Status.MISMATCH:
            verdict = Verdict(Status.MISMATCH, Cause.METADATA, "stride", stride_only, 0.9)
        return verdict, tuple(self.diffs.values())

    def _values(self) -> Verdict:
        if not any(d.n_different for d in self.diffs.values()):
            return Verdict(Status.MATCH)
        if _is_random(self.case):
            return Verdict(Status.UNVERIFIED, Cause.RANDOMNESS, "random operator")
        verdicts, findings = [], self.findings
        for k, d in self.diffs.items():
            if d.n_different:
                if (close := self._close(k, d)) is not None:
                    verdicts.append(close)
                    continue
                finding = look(self.case, k, d.n_different)
                verdicts.append(self._one(finding))
                self._note(finding)
                if verdicts[-1].status is Status.MISMATCH:
                    findings.append(finding)
        # Among matches, one that a reader should know of comes first.
        worst = min(verdicts, key=lambda v: (_ORDER[v.status], v.cause in _LAST))
        told = worst.cause in (Cause.REFERENCE, Cause.REDUCED_PRECISION)
        if worst.status is Status.MISMATCH and not told and self.known is not None:
            found = hypotheses.explain(self.case, findings, self._oracle_or_none, self.known)
            if found is not None:
                return replace(found, evidence=f"{worst.evidence}; {found.evidence}")
            if all(f.has_only_classes for f in findings):
                return replace(
                    worst, cause=Cause.EXCEPTIONAL_VALUES, explanation="exceptional values treated otherwise"
                )
        if worst.status is Status.MATCH and self.known is not None and hypotheses.order_varies(self.case):
            return replace(worst, cause=Cause.NON_DETERMINISM, explanation="another run of the target differs")
        return worst

    def _close(self, position: int, d: TensorDiff) -> Verdict | None:
        """Pass a result close to the reference's, where neither the operator alone nor the user says what that is."""
        if self.tolerance(self.op, d.expected.dtype) is not None or d.actual.dtype != d.expected.dtype:
            return None
        if self.pool.note(self.case, position):
            return None
        return None if self.cheap is not None else self.screen.close(position, d)

    @cached_property
    def cheap(self) -> int | None:
        """Units in the last place that the operator alone allows its results; None where it does not tell."""
        dtypes = [t.dtype for t in tensors((*self.case.expected, *self.case.args), self.case.kwargs)]
        return ulp_bound(self.op, dtypes, arguments(self.case))

    def _note(self, finding: Finding) -> None:
        d = self.diffs[finding.position]
        changes: dict[str, object] = {"n_mismatched": int(finding.bad.size)}
        if finding.excess_actual is not None and finding.excess_expected is not None and finding.where.size:
            changes["excess_actual"] = float(finding.excess_actual.max())
            changes["excess_expected"] = float(finding.excess_expected.max())
        self.diffs[finding.position] = replace(d, **changes)  # type: ignore[arg-type]

    def _one(self, finding: Finding) -> Verdict:
        """Judge one result."""
        d = self.diffs[finding.position]
        self.tolerances = self.tolerance(self.op, d.expected.dtype)
        if finding.where.size == 0:
            if moves(self.op, self._floats()):
                evidence = f"{d.n_different} elements of {finding.name}"
                return Verdict(Status.MATCH, Cause.EXCEPTIONAL_VALUES, "a copy changed the payload of NaN", evidence)
            return Verdict(Status.MATCH, Cause.ROUNDING, "", f"{d.n_different} NaN payloads or signs of zeros sums")
        open_ones = undefined(self.case, finding)
        if open_ones is not None:
            reason, mask = open_ones
            if mask.all():
                return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, reason, f"{mask.size} elements of {finding.name}")
            keep = ~mask
            finding.where = finding.where[keep]
            finding.zero_signs, finding.classes = finding.zero_signs[keep], finding.classes[keep]
        if concerns(self.op, finding.position):
            decided = self._by_equation(finding)
            if decided is not None:
                return decided
        if self.tolerances is not None and finding.fmt is not None:
            verdict = self._by_user(finding, *self.tolerances)
            if verdict.status is Status.MISMATCH or not finding.classes.any():
                return verdict
            # Classes are judged whatever the tolerance.
            finding.where, finding.zero_signs = finding.where[finding.classes], finding.zero_signs[finding.classes]
            finding.classes = finding.classes[finding.classes]
            return self._by_oracle(finding)
        if self.cheap is not None:
            decided = self._by_bound(finding, self.cheap)
            if decided is not None:
                return decided
        return self._by_oracle(finding)

    def _floats(self) -> list[torch.dtype]:
        """Dtypes of its floating tensors, inputs and results."""
        found = tensors((*self.case.expected, *self.case.args), self.case.kwargs)
        return [t.dtype for t in found if t.is_floating_point() or t.is_complex()]

    def _by_equation(self, finding: Finding) -> Verdict | None:
        """Judge what is unique only up to sign, basis or order; the tolerances of the user may only accept more."""
        if self.tolerances is not None and finding.fmt is not None and not finding.classes.any():
            verdict = self._by_user(finding, *self.tolerances)
            if verdict.status is Status.MATCH:
                return verdict
        try:
            return by_equation(self.case, finding, self._ask)
        except NoOracle as reason:
            return Verdict(Status.UNVERIFIED, None, str(reason))

    def _by_user(self, finding: Finding, rtol: float, atol: float) -> Verdict:
        a, e = finding.taken(finding.actual), finding.taken(finding.expected)
        with np.errstate(all="ignore"):
            beyond = (np.abs(a - e) > atol + rtol * np.abs(e)) & ~finding.classes
        finding.bad = finding.where[beyond]
        evidence = f"{finding.bad.size} elements of {finding.name} beyond rtol {rtol:g}, atol {atol:g}"
        if finding.bad.size:
            return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
        return Verdict(Status.MATCH, Cause.ROUNDING, "", f"within rtol {rtol:g}, atol {atol:g}")

    def _by_bound(self, finding: Finding, cheap: int) -> Verdict | None:
        """The cheap bound; None if the oracle has to decide."""
        if cheap == 0:
            finding.bad = finding.where
            finding.exact = True
            # The neighbour in float64 is another number than that in float32.
            if base_name(self.op) != "nextafter" and self._oracle_agrees(finding):
                return reference_wrong(f"{finding.bad.size} elements of {finding.name}, an exact operator")
            share = f"{finding.bad.size} of {finding.actual.numel()} elements"
            evidence = f"{share} of {finding.name} differ, and the operator is exact"
            return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
        if finding.fmt is None or finding.classes.any() or finding.zero_signs.any() or not finding.fmt.signed:
            return None
        d = self.diffs[finding.position]
        ulp = d.max_ulp
        if finding.where.size < d.n_different:  # some are left out, which may be those with the greatest distance
            where = torch.from_numpy(finding.where)
            a, e = (t[where].view(finding.fmt.view).numpy() for t in (finding.actual, finding.expected))
            ulp = ulp_distance(a, e, 8 * a.itemsize)
        if ulp > cheap or may_be_systematic(self.case, finding.position, d):
            return None
        return Verdict(Status.MATCH, Cause.ROUNDING, "", f"max {ulp} ULP, within {cheap} of the operator")

    def _oracle_agrees(self, finding: Finding) -> bool:
        """Whether the oracle sides with the target at every differing element of an exact operator."""
        try:
            truth = self._ask().truths[finding.position]
        except NoOracle:
            return False
        if truth is None or truth.value.size != finding.actual.numel():
            return False
        rounded = torch.from_numpy(truth.value).to(finding.actual.dtype)
        where = torch.from_numpy(finding.where)
        return bits_equal(rounded[where], finding.actual[where])

    def _ask(self) -> Oracle:
        if self.oracle is None:
            self.oracle = Oracle(self.case, self.max_bytes)
        return self.oracle

    def _oracle_or_none(self) -> Oracle | None:
        try:
            return self._ask()
        except NoOracle:
            return None

    def _by_oracle(self, finding: Finding) -> Verdict:
        """The truth, and how well the inputs determine it."""
        d = self.diffs[finding.position]
        try:
            oracle = self._ask()
            finding.truth = oracle.truths[finding.position]
            if finding.truth is None or finding.truth.value.size != finding.actual.numel():
                raise NoOracle("no float64 oracle: it returned another number of elements")  # noqa: TRY301
            # Without perturbation every unit is smaller: what passes now passes anyway, for one run of the oracle.
            verdict = weigh(self.case, finding, d, ratio=0.0)
            if verdict.status is not Status.MATCH:
                oracle.draw(FEW_DRAWS)
                verdict = weigh(self.case, finding, d)
            if verdict.status is not Status.MATCH and oracle.n_draws < MANY_DRAWS:
                oracle.draw(MANY_DRAWS)
                verdict = weigh(self.case, finding, d)
        except NoOracle as reason:
            if finding.classes.any():
                finding.bad = finding.where[finding.classes]
                return Verdict(
                    Status.MISMATCH,
                    Cause.EXCEPTIONAL_VALUES,
                    "NaN or infinity on one side only",
                    f"{finding.bad.size} elements of {finding.name}; {reason}",
                    0.7,
                )
            return Verdict(Status.UNVERIFIED, None, str(reason))
        if verdict.status is Status.MATCH:
            # One unit in the last place everywhere is rounding, also where it adds to a rounding of the reference.
            short = beyond_one_rounding(self.case, finding, oracle) if d.max_ulp > 1 else None
            found = short or hidden_rounding(self.case, finding, oracle) or systematic(self.case, finding)
            return found or self.pool.verdict(self.case, finding) or verdict
        if verdict.status is Status.MISMATCH and any_order(self.op, finding.position):
            verdict = in_another_order(self.case, finding, oracle) or verdict
        if verdict.status is Status.MISMATCH and finding.position in not_unique(self.op):
            return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, f"{finding.name} is not unique", verdict.evidence)
        return verdict


def _another_way_to_save(actual: Value, expected: Value) -> bool:
    """Whether one side left empty what the other saved, or saved it in another precision."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    if 0 in (actual.numel(), expected.numel()):
        return True
    floats = actual.is_floating_point() and expected.is_floating_point()
    return floats and actual.shape == expected.shape and actual.dtype is not expected.dtype


def _is_random(case: Case) -> bool:
    if torch.Tag.nondeterministic_seeded not in case.func.tags:
        return False
    named = arguments(case)
    switches = [named[k] for k in ("dropout_p", "p", "dropout", "train", "training") if k in named]
    return all(switches)


_LAST: Final = (Cause.REFERENCE, Cause.ROUNDING)
_ORDER: Final = {Status.MISMATCH: 0, Status.UNVERIFIED: 1, Status.MATCH: 2}
