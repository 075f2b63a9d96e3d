"""What the full ladder decided on a context, remembered: later calls within the same bounds need no ladder.

On another device nearly every result differs by a unit in the last place, and the ladder passes it for the same reason
each time: the operator's ULP bound, or closeness (`judge.rounding.closeness`). Both depend on the operator, dtypes and
shapes, which all calls of a context share, and on the figures of `numerics.diff`. So the first call of a context climbs
the ladder, and the next ones are only measured. What is not certain from these figures climbs it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shadowrun.judge.matrix_products import MANY_TERMS
from shadowrun.judge.oracle import n_terms
from shadowrun.judge.rounding.bias import DIFFERING, ENOUGH
from shadowrun.judge.rounding.bias_over_calls import is_counted
from shadowrun.judge.rounding.closeness import FEW_ULP, FEW_ULP_COARSE
from shadowrun.numerics.bits import plainly_equal
from shadowrun.numerics.diff import native_diff
from shadowrun.numerics.form import dtype_name
from shadowrun.numerics.precision import FORMATS
from shadowrun.operators.case import tensors
from shadowrun.operators.facts import ulp_bound
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.judge.judgement import ToleranceOf
    from shadowrun.operators.case import Case, Value
    from shadowrun.types import TensorDiff

__all__ = ["RememberedBounds", "bounds_of"]

MAX_CONTEXTS: Final = 20_000
"""Contexts that are remembered: a program with changing shapes makes new ones for ever."""
_SCALES: Final = ("alpha", "beta")
_FULL_MANTISSA: Final = 23


class ResultBound(NamedTuple):
    """Within what one result passes.

    Attributes:
        name: Of the result.
        max_ulp: Greatest distance; 0 where any difference climbs the ladder.
        of_operator: The distance is the operator's own; its evidence says so.
        coarse: It has 16 or 8 bits: where more elements differ, all of them are tested for bias.
        form: Number of elements and dtype of an item of a list, which the context may not have; None elsewhere.
    """

    name: str
    max_ulp: int
    of_operator: bool
    coarse: bool
    form: tuple[int, str] | None = None


@dataclass(slots=True)
class ContextBounds:
    """Within what the results of a context's calls pass.

    Attributes:
        results: For each result.
        is_enough: The diffs decide; False where each call also has to be counted.
        is_steady: The order of additions does not vary: else each run of the target is compared with another one.
        passed_subnormals: The oracle passed results with zeros against subnormal numbers, so there is an oracle.
        native: The same in C (native/compare_call.c); None where only Python judges.
    """

    results: tuple[ResultBound, ...]
    is_enough: bool
    is_steady: bool
    passed_subnormals: bool = False
    native: Any = None
    _verdicts: dict[tuple[int, int], Verdict] = field(default_factory=dict)

    def judge(
        self, actual: Sequence[Value], expected: Sequence[Value]
    ) -> tuple[Verdict, tuple[TensorDiff, ...]] | None:
        """The verdict that the ladder would give, and the diffs; None where the ladder has to decide.

        Without the oracle, the evidence does not have its figures.
        """
        results = self.results
        if not self.is_enough or not self.is_steady or len(actual) != len(results) or len(expected) != len(results):
            return None
        first, diffs = None, []
        for k, (a, e, bound) in enumerate(zip(actual, expected, results, strict=True)):
            if not isinstance(a, torch.Tensor) or not isinstance(e, torch.Tensor):
                return None
            if plainly_equal(a, e):
                continue
            d = native_diff(bound.name, a, e) if bound.max_ulp and native_diff is not None else None
            if d is None or not self._passes(bound, d):
                return None
            if first is None:
                first = self._verdict(k, d.max_ulp)
            diffs.append(d)
        return None if first is None else (first, tuple(diffs))

    def for_native(self, make: Callable[..., Any] | None) -> Any:
        """The same in C; None where the diffs do not decide, or without the part in C."""
        if make is None or not self.is_enough or not self.is_steady or any(r.form for r in self.results):
            return None
        return make(tuple((r.max_ulp, r.of_operator, r.coarse) for r in self.results), ENOUGH, DIFFERING)

    def close(self, position: int, d: TensorDiff) -> Verdict | None:
        """MATCH for one result that passes by closeness; None where the ladder has to decide."""
        bound = self.results[position]
        passes = not bound.of_operator and self._passes(bound, d)
        return self._verdict(position, d.max_ulp) if passes else None

    def _passes(self, bound: ResultBound, d: TensorDiff) -> bool:
        if bound.form is not None and bound.form != (d.n_elements, d.expected.dtype):
            return False
        # At most 0 ULP apart: payloads of NaN or signs of zeros, which have evidence of their own.
        if not 1 <= d.max_ulp <= bound.max_ulp or d.n_nan or d.n_inf or d.n_zero_sign:
            return False
        if bound.coarse:
            few = d.n_elements < ENOUGH or d.n_different < DIFFERING * d.n_elements
            return few and (bound.of_operator or not d.n_subnormal)
        if d.n_subnormal and not bound.of_operator:
            # The oracle passes any such result. Its least bound is 16 units, and one unit in the last place is two: if
            # the target were beyond 16, the reference would be beyond 14, and the target not at 4 times that. A bias is
            # 4 units of all elements.
            return self.passed_subnormals and d.max_ulp == 1
        return True

    def _verdict(self, position: int, ulp: int) -> Verdict:
        verdict = self._verdicts.get((position, ulp))
        if verdict is None:
            bound = self.results[position]
            within = f", within {bound.max_ulp} of the operator" if bound.of_operator else ""
            verdict = Verdict(Status.MATCH, Cause.ROUNDING, "", f"max {ulp} ULP{within}")
            self._verdicts[position, ulp] = verdict
        return verdict


class RememberedBounds:
    """The bounds of each context that was judged.

    Args:
        tolerance: The user's tolerances, None where there are none; a result with one is never remembered.
        make_native: Makes what C knows of the bounds of a context; None without it.

    Attributes:
        by_context: Bounds by the number of a context; None where each call climbs the ladder.
        native: What C knows of them, by the same numbers.
    """

    def __init__(self, tolerance: ToleranceOf | None, make_native: Callable[..., Any] | None = None) -> None:
        self._make_native = make_native
        self._tolerance: ToleranceOf = tolerance or (lambda _op, _dtype: None)
        self.by_context: dict[int, ContextBounds | None] = {}
        self.native: dict[int, Any] = {}

    def learn(self, context: int, case: Case, verdict: Verdict, diffs: tuple[TensorDiff, ...]) -> None:
        """Remember what the ladder said of a call, if it passed."""
        if verdict.status is not Status.MATCH:
            return
        known = self.by_context
        if context not in known:
            if len(known) >= MAX_CONTEXTS:
                known.clear()
                self.native.clear()
            bounds = known[context] = bounds_of(case, self._tolerance) if native_diff is not None else None
            if bounds is not None:
                bounds.is_steady = verdict.cause is not Cause.NON_DETERMINISM
            if bounds is not None and (native := bounds.for_native(self._make_native)) is not None:
                bounds.native = self.native[context] = native
        bounds = known[context]
        if bounds is not None and not bounds.passed_subnormals:
            # Rounded inputs of a long product show in all elements together only, which takes the oracle.
            short = all(n_terms(case, k) < MANY_TERMS for k in range(len(case.names)))
            bounds.passed_subnormals = short and any(d.n_subnormal and d.excess_actual >= 0 for d in diffs)
            if bounds.passed_subnormals and bounds.native is not None:
                bounds.native.pass_subnormals()


def bounds_of(case: Case, tolerance: ToleranceOf) -> ContextBounds | None:
    """Within what any call of the same context passes; None where its values decide in another way."""
    row, named = case.facts, case.arguments()
    # A random operator is not judged by values; what is open needs the values.
    if row.open_elements is not None or torch.Tag.nondeterministic_seeded in case.func.tags:
        return None
    # A context has no more than the type of a float.
    if any(type(named.get(k)) is float for k in _SCALES):
        return None
    dtypes = [t.dtype for t in tensors((*case.expected, *case.args), case.kwargs)]
    # And the forms of four items of a list: the others may have another dtype, and with it another bound.
    in_lists = any(isinstance(a, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in a) for a in named.values())
    if in_lists and len(set(dtypes)) > 1:
        return None
    of_operator = ulp_bound(case.op, dtypes, named)
    results, is_enough = [], True
    for k, (name, value) in enumerate(zip(case.names, case.expected, strict=True)):
        fmt = FORMATS.get(value.dtype) if isinstance(value, torch.Tensor) else None
        if fmt is None or not isinstance(value, torch.Tensor) or not fmt.signed:
            results.append(ResultBound(name, 0, of_operator=False, coarse=False))
            continue
        if tolerance(case.op, dtype_name(value.dtype)) is not None:
            return None
        # A bias of small results shows in the number of calls only.
        is_enough = is_enough and not is_counted(case, k)
        coarse = fmt.mantissa < _FULL_MANTISSA
        if k in row.by_equation:
            limit = 0
        elif of_operator is not None:
            limit = of_operator
        else:
            limit = FEW_ULP_COARSE if coarse else FEW_ULP
        form = (value.numel(), dtype_name(value.dtype)) if in_lists else None
        results.append(ResultBound(name, limit, of_operator=of_operator is not None, coarse=coarse, form=form))
    return ContextBounds(tuple(results), is_enough, not row.atomic) if any(r.max_ulp for r in results) else None
