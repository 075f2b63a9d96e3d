"""The judge of a run: it judges large calls by slices, and keeps what one call says of the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shadowrun.judge import large_results
from shadowrun.judge.decision_trace import Rung, rung_of
from shadowrun.judge.remembered_bounds import bounds_of
from shadowrun.judge.rounding.bias_over_calls import BiasOverCalls
from shadowrun.numerics.bits import Uncomparable
from shadowrun.numerics.form import dtype_name
from shadowrun.types import Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from shadowrun.judge.cause.hypotheses import KnownCauses
    from shadowrun.judge.decision_trace import Trace
    from shadowrun.judge.remembered_bounds import ContextBounds
    from shadowrun.operators.case import Case

from shadowrun.judge.judgement import Judgement, done, is_random

if TYPE_CHECKING:
    from shadowrun.judge.judgement import Examined, Parts, ToleranceOf

__all__ = ["Judge"]


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
        trace: Records the steps of a judgement; None for none.
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
        self._known: KnownCauses = {}
        self.sampled = False
        self.trace: Trace | None = None
        self._bias_over_calls = BiasOverCalls()

    def __call__(self, case: Case, bounds: ContextBounds | None = None) -> tuple[Verdict, tuple[TensorDiff, ...]]:
        """Judge one call.

        Args:
            case: The call.
            bounds: Within what calls of its context pass.

        Returns:
            The verdict, and a diff for each result whose bits or form differ.
        """
        verdict, diffs, _ = done(self.parts(case, bounds))
        return verdict, diffs

    def examine(self, case: Case) -> Examined:
        """Judge one call, and give the results that mismatched element by element; they hold its tensors."""
        return done(self.parts(case))

    def parts(self, case: Case, bounds: ContextBounds | None = None) -> Parts[Examined]:
        """As `examine`, in parts; `case` must not change until the last."""
        try:
            if large_results.is_large(case) and not is_random(case) and not self._has_tolerances(case):
                if bounds is None and (close := self._within_bounds(case)) is not None:
                    return (*close, ())
                # Not pooled with whole calls: the slices farthest off are more biased than the whole result.
                sampled = large_results.by_slices(case, lambda part: done(self._whole(part, BiasOverCalls())))
                if sampled is not None:
                    self.sampled = True
                    if self.trace is not None:
                        self.trace.add_step(Rung.SLICES, "", sampled[0].evidence, "", sampled[0])
                    return sampled
        except Uncomparable as error:
            return Verdict(Status.UNVERIFIED, explanation=str(error)), (), ()
        return (yield from self._whole(case, self._bias_over_calls, bounds))

    def _within_bounds(self, case: Case) -> tuple[Verdict, tuple[TensorDiff, ...]] | None:
        """A MATCH by the distance of all elements, for which no oracle is asked; None where that does not decide."""
        found = bounds_of(case, self._tolerance)
        close = None if found is None else found.judge(case.actual, case.expected)
        if close is not None and self.trace is not None:
            self.trace.add_step(rung_of(close[0]) or Rung.CLOSENESS, "", close[0].evidence, "", close[0])
        return close

    def _has_tolerances(self, case: Case) -> bool:
        """Whether tolerances of the user replace the oracle for all results."""
        dtypes = {dtype_name(v.dtype) for v in case.expected if isinstance(v, torch.Tensor)}
        return all(self._tolerance(case.op, dtype) is not None for dtype in dtypes)

    def _whole(
        self, case: Case, bias_over_calls: BiasOverCalls, bounds: ContextBounds | None = None
    ) -> Parts[Examined]:
        known = self._known if self._hypotheses else None
        judgement = Judgement(case, self._tolerance, self._max_bytes, bias_over_calls, known, bounds)
        judgement.trace = self.trace
        try:
            verdict, diffs = yield from judgement.run()
        except Uncomparable as error:
            return Verdict(Status.UNVERIFIED, explanation=str(error)), tuple(judgement.diffs.values()), ()
        return verdict, diffs, tuple(judgement.mismatches)
