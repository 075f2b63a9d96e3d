"""The verdict: could a correct implementation have returned this, for this operator, dtype and inputs?

A ladder; each step decides only what the one before left open: form, classes of values, cheap bounds in units in the
last place, then the float64 oracle with its perturbations (`oracle`, `numerics.excess`). User tolerances take the
place of the last two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.numerics.diff import diff
from shadowrun.numerics.form import form_difference
from shadowrun.numerics.precision import ulp_distance
from shadowrun.numerics.tolerance import base_name, not_unique, ulp_bound
from shadowrun.replay import hypotheses
from shadowrun.replay.bounds import (
    BOUND,
    COARSE_SUM_BOUND,
    RATIO,
    REFERENCE_RATIO,
    bound,
    floor,
    is_coarse,
    is_fast_convolution,
)
from shadowrun.replay.finding import Finding, look, op_name
from shadowrun.replay.oracle import FEW_DRAWS, MANY_DRAWS, NoOracle, Oracle, tensors
from shadowrun.replay.undefined import arguments, undefined
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from shadowrun.numerics.excess import Array
    from shadowrun.replay.case import Case

__all__ = ["Judge"]


class Judge:
    """Judges calls whose results are not equal bit by bit.

    Args:
        rtol: Relative tolerance, as in `torch.testing.assert_close`; takes the place of bounds and oracle.
        atol: Absolute tolerance.
        max_bytes: Memory that the oracle may take for one call.
        hypotheses: Look for the cause of a mismatch by running the operator under alternative explanations.
    """

    def __init__(
        self,
        *,
        rtol: float | None = None,
        atol: float | None = None,
        max_bytes: int = 1 << 30,
        hypotheses: bool = True,
    ) -> None:
        self._tolerances = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
        self._max_bytes = max_bytes
        self._hypotheses = hypotheses

    def __call__(self, case: Case) -> tuple[Verdict, tuple[TensorDiff, ...]]:
        """Judge one call.

        Returns:
            The verdict, and a diff for each result whose bits or form differ.
        """
        trial = _Trial(case, self._tolerances, self._max_bytes, self._hypotheses)
        try:
            return trial.run()
        except Uncomparable as error:
            return Verdict(Status.UNVERIFIED, explanation=str(error)), tuple(trial.diffs.values())


class _Trial:
    """The judgement of one call; each step leaves `diffs` and `findings` richer."""

    def __init__(
        self, case: Case, tolerances: tuple[float, float] | None, max_bytes: int, ask_hypotheses: bool
    ) -> None:
        self.case = case
        self.op = op_name(case)
        self.tolerances = tolerances
        self.max_bytes = max_bytes
        self.ask_hypotheses = ask_hypotheses
        self.diffs: dict[int, TensorDiff] = {}
        self.oracle: Oracle | None = None

    def run(self) -> tuple[Verdict, tuple[TensorDiff, ...]]:
        case = self.case
        if len(case.actual) != len(case.expected):
            counts = f"{len(case.actual)} results against {len(case.expected)}"
            return Verdict(Status.MISMATCH, Cause.METADATA, "number of results", counts), ()
        stride_only = ""
        for k, (name, actual, expected) in enumerate(zip(case.names, case.actual, case.expected, strict=True)):
            form = form_difference(actual, expected)
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
        verdicts, findings = [], []
        for k, d in self.diffs.items():
            if d.n_different:
                finding = look(self.case, k)
                verdicts.append(self._one(finding))
                self._note(finding)
                if verdicts[-1].status is Status.MISMATCH:
                    findings.append(finding)
        worst = min(verdicts, key=lambda v: (_ORDER[v.status], v.cause is Cause.REFERENCE))
        if worst.status is Status.MISMATCH and worst.cause is not Cause.REFERENCE and self.ask_hypotheses:
            found = hypotheses.explain(self.case, findings, self._oracle_or_none)
            if found is not None:
                return replace(found, evidence=f"{worst.evidence}; {found.evidence}")
            if all(_only_classes(f) for f in findings):
                return replace(
                    worst, cause=Cause.EXCEPTIONAL_VALUES, explanation="exceptional values treated otherwise"
                )
        if worst.status is Status.MATCH and self.ask_hypotheses and hypotheses.order_varies(self.case):
            return replace(worst, cause=Cause.NON_DETERMINISM, explanation="another run of the target differs")
        return worst

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
        if finding.where.size == 0:
            return Verdict(Status.MATCH, Cause.ROUNDING, "", f"{d.n_different} NaN payloads or signs of zeros sums")
        open_ones = undefined(self.case, finding)
        if open_ones is not None:
            reason, mask = open_ones
            if mask.all():
                return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, reason, f"{mask.size} elements of {finding.name}")
            keep = ~mask
            finding.where = finding.where[keep]
            finding.zero_signs, finding.classes = finding.zero_signs[keep], finding.classes[keep]
        named = arguments(self.case)
        if self.tolerances is not None and finding.fmt is not None:
            verdict = self._by_user(finding, *self.tolerances)
            if verdict.status is Status.MISMATCH or not finding.classes.any():
                return verdict
            # Classes are judged whatever the tolerance.
            finding.where, finding.zero_signs = finding.where[finding.classes], finding.zero_signs[finding.classes]
            finding.classes = finding.classes[finding.classes]
            return self._by_oracle(finding)
        dtypes = [t.dtype for t in tensors((*self.case.expected, *self.case.args), self.case.kwargs)]
        cheap = ulp_bound(self.op, dtypes, named)
        if cheap is not None:
            decided = self._by_bound(finding, cheap)
            if decided is not None:
                return decided
        return self._by_oracle(finding)

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
        """Step 4; None if the oracle has to decide."""
        if cheap == 0:
            finding.bad = finding.where
            # The neighbour in float64 is another number than that in float32.
            if base_name(self.op) != "nextafter" and self._oracle_agrees(finding):
                return _reference_wrong(f"{finding.bad.size} elements of {finding.name}, an exact operator")
            share = f"{finding.bad.size} of {finding.actual.numel()} elements"
            evidence = f"{share} of {finding.name} differ, and the operator is exact"
            return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
        if finding.fmt is None or finding.classes.any() or finding.zero_signs.any() or not finding.fmt.signed:
            return None
        where = torch.from_numpy(finding.where)
        a, e = (t[where].view(finding.fmt.view).numpy() for t in (finding.actual, finding.expected))
        ulp = ulp_distance(a, e, 8 * a.itemsize)
        if ulp > cheap:
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
        """Step 5."""
        try:
            oracle = self._ask()
            finding.truth = oracle.truths[finding.position]
            if finding.truth is None or finding.truth.value.size != finding.actual.numel():
                raise NoOracle("no float64 oracle: it returned another number of elements")  # noqa: TRY301
            # Without perturbation every unit is smaller: what passes now passes anyway, for one run of the oracle.
            verdict = self._weigh(finding, ratio=0.0)
            if verdict.status is not Status.MATCH:
                oracle.draw(FEW_DRAWS)
                verdict = self._weigh(finding)
            if verdict.status is not Status.MATCH and oracle.n_draws < MANY_DRAWS:
                oracle.draw(MANY_DRAWS)
                verdict = self._weigh(finding)
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
        if verdict.status is Status.MISMATCH and finding.position in not_unique(self.op):
            return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, f"{finding.name} is not unique", verdict.evidence)
        return verdict

    def _weigh(self, finding: Finding, ratio: float = RATIO) -> Verdict:
        if finding.fmt is None:
            return self._weigh_integers(finding)
        finding.floor = floor(self.case, finding)
        finding.measure()
        ea, ee = finding.excess_actual, finding.excess_expected
        assert ea is not None
        assert ee is not None
        own = float(ee[np.isfinite(ee)].max(initial=0.0))
        limit = bound(self.case, finding)
        finding.limit = max(limit, ratio * own)
        wrong = ea > finding.limit
        if not wrong.any() and limit == COARSE_SUM_BOUND:
            wrong = self._coarse_on_the_whole(finding)
        if wrong.any() and is_fast_convolution(self.op, finding):
            evidence = f"{finding.name}: noise of a fast convolution (Winograd, FFT), at most {ea.max():.3g} units"
            return Verdict(Status.MATCH, Cause.ROUNDING, "", evidence)
        finding.bad = finding.where[wrong]
        evidence = (
            f"{finding.name}: {finding.bad.size} of {finding.actual.numel()} elements beyond rounding; greatest excess "
            f"{ea.max():.3g} units of rounding against {ee.max():.3g} of the reference"
        )
        if wrong.any():
            if bool(np.isinf(ee[wrong]).all()):
                return Verdict(Status.MISMATCH, Cause.EXCEPTIONAL_VALUES, "neither side is right", evidence, 0.4)
            return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
        if self._reference_off(finding, ee):
            return _reference_wrong(
                f"{finding.name}: greatest excess {ee.max():.3g} units of rounding against {ea.max():.3g} of the target"
            )
        d = self.diffs[finding.position]
        return Verdict(Status.MATCH, Cause.ROUNDING, "", f"max {d.max_ulp} ULP, {ea.max():.2g} units of rounding")

    def _reference_off(self, finding: Finding, ee: Array) -> bool:
        """Whether the reference is wrong beyond doubt: also relative to the greatest element of the result.

        Correct implementations that cancel (a variance of nearly equal values, the tail of gelu) are far off
        relative to one element, but not relative to the whole.
        """
        assert finding.truth is not None
        assert finding.fmt is not None
        assert finding.excess_actual is not None
        if bool((np.isinf(ee) & (finding.excess_actual <= finding.limit)).any()):
            return True
        size = finding.truth.magnitude
        whole = finding.fmt.roundoff * float(size[np.isfinite(size)].max(initial=0.0))
        with np.errstate(all="ignore"):
            gap = np.abs(finding.taken(finding.expected) - finding.truth.value[finding.where])
        off = (ee > REFERENCE_RATIO * BOUND) & (gap > REFERENCE_RATIO * BOUND * whole)
        return bool(off.any())

    def _weigh_integers(self, finding: Finding) -> Verdict:
        assert finding.truth is not None
        where = torch.from_numpy(finding.where)
        truth = finding.truth.value[finding.where]
        tie = finding.truth.flips[finding.where]
        actual, expected = finding.actual[where].numpy(), finding.expected[where].numpy()
        finding.bad = finding.where[~tie & (actual != truth)]
        if finding.bad.size:
            evidence = f"{finding.bad.size} of {finding.actual.numel()} elements of {finding.name} differ"
            return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
        if bool((~tie & (expected != truth)).any()):
            return _reference_wrong(f"{int((~tie).sum())} elements of {finding.name}")
        return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, "tie", f"{int(tie.sum())} elements of {finding.name}")

    def _coarse_on_the_whole(self, finding: Finding) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Find accumulation in 16 bits, which no single element proves but their mean square does.

        Returns:
            A mask over `finding.where` of the elements beyond one rounding; empty of True if the mean is right.
        """
        assert finding.excess_actual is not None
        assert finding.excess_expected is not None
        n = finding.actual.numel()
        whole = replace(finding, where=np.arange(n), zero_signs=np.zeros(n, bool), classes=np.zeros(n, bool), floor=0.0)
        whole.measure()
        assert whole.excess_actual is not None
        assert whole.excess_expected is not None
        actual, expected = (
            float(np.sqrt(np.mean(np.square(x[np.isfinite(x)])))) for x in (whole.excess_actual, whole.excess_expected)
        )
        if n >= 32 and is_coarse(self.op, actual, expected):
            return finding.excess_actual > 1.0
        return np.zeros(finding.where.size, bool)


def _is_random(case: Case) -> bool:
    if torch.Tag.nondeterministic_seeded not in case.func.tags:
        return False
    named = arguments(case)
    switches = [named[k] for k in ("dropout_p", "p", "dropout", "train", "training") if k in named]
    return all(switches)


def _only_classes(finding: Finding) -> bool:
    """Whether all mismatched elements are NaN or infinite on one side only, or zeros of other sign."""
    if finding.fmt is None or not finding.bad.size:
        return False
    return bool(np.isin(finding.bad, finding.where[finding.classes | finding.zero_signs]).all())


def _reference_wrong(evidence: str) -> Verdict:
    sentence = f"the float64 oracle sides with the target: {evidence}"
    return Verdict(Status.MISMATCH, Cause.REFERENCE, "the reference is wrong", sentence, 0.8)


_ORDER: Final = {Status.MISMATCH: 0, Status.UNVERIFIED: 1, Status.MATCH: 2}
