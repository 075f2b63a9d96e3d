"""Cause by hypothesis: the explanation under which the target's result is right to rounding.

A table of small functions, tried from the most specific evidence to the least; the first that holds for every
mismatched element of every mismatched result is the cause. Some look at the values only (`patterns`), some run the
target again (as it was, or on contiguous copies), some run the float64 oracle on changed inputs (`alternatives`). At
most 4 runs of the target and 46 of the oracle, on calls that are wrong: they are few, and what held for a call is tried
first on the next of its kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.judge.cause import rerun_hypotheses, value_hypotheses
from shadowrun.judge.cause.rerun_hypotheses import holds_on_changed_inputs
from shadowrun.judge.cause.value_hypotheses import MismatchedCall
from shadowrun.judge.result_diff import ResultDiff, flat_values
from shadowrun.numerics.bits import bits_equal
from shadowrun.numerics.form import form_difference
from shadowrun.numerics.input_roundings import IN_FLOAT32
from shadowrun.operators.case import exact_copy, tensors
from shadowrun.operators.facts import ulp_bound
from shadowrun.operators.vendor_ops import run_changed
from shadowrun.torch_private import is_zero_tensor
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from shadowrun.judge.oracle import Oracle
    from shadowrun.numerics.input_roundings import InputRounding
    from shadowrun.operators.case import Case, Value

__all__ = [
    "HYPOTHESES",
    "ROUNDED_INPUTS",
    "Hypothesis",
    "KnownCauses",
    "explain",
    "has_foreign_values",
    "operands_of",
    "order_varies",
    "rounding_named",
]


def has_foreign_values(call: MismatchedCall) -> bool:
    """Whether most mismatched elements hold values that no input has, where the reference moves values only."""
    case = call.case
    inputs = list(tensors(case.args, case.kwargs))
    # Arithmetic makes values that no input has; only an operator that moves values cannot.
    if ulp_bound(case.op, [t.dtype for t in inputs]) != 0:
        return False
    given = [flat_values(t) for t in inputs if t.layout == torch.strided and t.numel()]
    return all(_is_foreign(f, given) for f in call.mismatches)


def _is_foreign(result_diff: ResultDiff, given: list[torch.Tensor]) -> bool:
    same = [_bits(t) for t in given if t.dtype == result_diff.expected.dtype]
    # One value may be anywhere by chance, and a buffer of zeros is what a device may return for nothing at all.
    if result_diff.fmt is None or result_diff.bad.size < 2 or not same:
        return False
    known = np.concatenate(same)
    actual = _bits(result_diff.actual)[result_diff.bad]
    return bool(np.isin(_bits(result_diff.expected), known).all()) and bool(
        2 * (~np.isin(actual, known)).sum() >= actual.size
    )


def _bits(flat: torch.Tensor) -> npt.NDArray[np.integer[np.typing.NBitBase]]:
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.contiguous().view(widths[flat.element_size()]).numpy()


ROUNDED_INPUTS: Final = "inputs rounded to "
"""How the explanation of `rounded_inputs` begins."""
RERUNS: Final = 3
CERTAIN: Final = 0.8
"""Confidence from which an explanation is tried first on the next such call."""
GUESSES: Final = 2
"""How often in succession one of less confidence has to be the first that holds, before it is tried first, if none was
certain before: it might keep a better one away."""
# With changing shapes each call is of another kind: memory must not grow with them.
MAX_KNOWN: Final = 1024


class Hypothesis(NamedTuple):
    """One explanation.

    Attributes:
        cause: What it would mean.
        confidence: How sure that is if it holds.
        test: Gives the explanation, or None if it does not hold.
    """

    cause: Cause
    confidence: float
    test: Callable[[MismatchedCall], str | None]


KnownCauses: TypeAlias = "dict[tuple[object, ...], tuple[Hypothesis, str, int]]"
"""Explanations that held, by the kind of call, and how often in succession."""


def explain(
    case: Case, mismatches: list[ResultDiff], oracle: Callable[[], Oracle | None], known: KnownCauses | None = None
) -> Generator[None, None, Verdict | None]:
    """Find the first hypothesis that reproduces the target's result; it may be suspended between two.

    Args:
        case: The call.
        mismatches: Its mismatched results.
        oracle: Returns the oracle, if there is one.
        known: What held for earlier calls, tried first; what holds now is added.

    Returns:
        A MISMATCH with cause, explanation and confidence, its evidence saying what was found; None if none holds.
    """
    # A wrong maximum has a wrong index: no hypothesis on values explains both.
    mismatches = _without_consequences([f for f in mismatches if f.bad.size])
    if not mismatches:
        return None
    key = _kind(case, mismatches)
    call = MismatchedCall(case, mismatches, oracle)
    # Results judged on the whole have no single element that rounding could not explain: any hypothesis would hold.
    on_the_whole = all(
        f.fmt is not None
        and f.limit > 0
        and f.residual(f.expected, most=f.tolerance) <= f.tolerance
        and not np.isin(f.bad, f.where[f.zero_signs]).any()
        for f in mismatches
    )
    hypothesis, found = yield from _first(call, _ON_THE_WHOLE if on_the_whole else HYPOTHESES, known, key)
    if found is None:
        return None
    evidence = f"holds for all {sum(f.bad.size for f in mismatches)} mismatched elements"
    return Verdict(Status.MISMATCH, hypothesis.cause, found, evidence, hypothesis.confidence)


def _first(
    call: MismatchedCall, table: tuple[Hypothesis, ...], known: KnownCauses | None, key: tuple[object, ...]
) -> Generator[None, None, tuple[Hypothesis, str | None]]:
    """The hypothesis that held for such a call before, where it does again; else the first of the table that does."""
    known = {} if known is None else known
    hypothesis, explanation, times = known.get(key, (table[-1], "", 0))
    certain = hypothesis.confidence >= CERTAIN
    first = hypothesis in table and times >= (1 if certain else GUESSES)
    # A training loop repeats a fault in each step; the full search would cost up to 46 runs of the oracle each time.
    if first and hypothesis.test(replace(call, known=explanation)) == explanation:
        return hypothesis, explanation
    for candidate in table:
        # A hypothesis may run the oracle: the overhead budget can pause the search here.
        yield
        found = candidate.test(call)
        if found is not None:
            # A guess takes no place from what was certain once: it would keep it away from then on.
            keeps = certain and times > 0 and candidate.confidence < CERTAIN
            if not keeps and (key in known or len(known) < MAX_KNOWN):
                known[key] = candidate, found, times + 1 if found == explanation else 1
            return candidate, found
    return table[-1], None


def _kind(case: Case, mismatches: list[ResultDiff]) -> tuple[object, ...]:
    """What two calls that mismatch for one reason have in common: operator, forms of the inputs, and what is wrong."""
    forms = [(t.dtype, t.shape, t.layout is torch.strided and t.stride()) for t in tensors(case.args, case.kwargs)]
    return (case.op, *forms, *(f.position for f in mismatches))


def _without_consequences(mismatches: list[ResultDiff]) -> list[ResultDiff]:
    """Leave out indices that are wrong only where their values are (max, topk, median): a consequence."""
    values = [f for f in mismatches if f.fmt is not None]

    def follows(index: ResultDiff, value: ResultDiff) -> bool:
        same_size = index.actual.numel() == value.actual.numel()
        return index.fmt is None and same_size and bool(np.isin(index.bad, value.bad).all())

    return [f for f in mismatches if not any(follows(f, v) for v in values)]


def not_written(call: MismatchedCall) -> str | None:
    """An argument that the operator should have written is as it was."""
    found = value_hypotheses.not_written(call)
    if found is None or not all(bool(f.actual[torch.from_numpy(f.bad)].isnan().all()) for f in call.mismatches):
        return found
    # Any arithmetic with NaN gives NaN. Only where the argument holds numbers does it show whether it is written.
    numbers = MismatchedCall(_from_numbers(call.case), call.mismatches, call.oracle)
    values = _run_target(numbers, exact_copy)
    if values is None:
        return None
    again = [replace(f, actual=flat_values(values[f.position])) for f in call.mismatches]
    return value_hypotheses.not_written(MismatchedCall(numbers.case, again, call.oracle))


def _from_numbers(case: Case) -> Case:
    args, kwargs = case.fresh_inputs(lambda t: t.nan_to_num() if t.is_floating_point() else t)
    return replace(case, args=args, kwargs=kwargs)


def order_varies(case: Case) -> bool:
    """Whether another run of the target differs at all, for operators that add atomically on parallel devices."""
    # Another run of the target costs as much as the call; only atomic additions make it worth that.
    if not case.facts.atomic:
        return False
    # What writes to nothing gets the inputs themselves: copies would take as long as the call.
    inputs = case.fresh_inputs() if case.mutated else (case.args, case.kwargs)
    again = case.run_target(*inputs)
    return not all(bits_equal(a, b) for a, b in zip(again, case.actual, strict=True))


def not_deterministic(call: MismatchedCall) -> str | None:
    """Another run of the target, on the same inputs at the same offsets, differs beyond rounding."""
    first: tuple[Value, ...] | None = None
    for _ in range(RERUNS):
        values = _run_target(call, None, at_offsets=True)
        if values is None:
            return None
        if call.case.run_at_offsets is not None and not _all_right(call, values):
            # What lies before an offset is not copied: a kernel that reads it is wrong in another way each time.
            first = first or values
            again = [replace(f, actual=flat_values(first[f.position])) for f in call.mismatches]
            if all(_residual(f, values) <= f.tolerance for f in again):
                continue
        if any(_residual(f, values) > (0.0 if f.exact else f.tolerance) for f in call.mismatches):
            return "another run of the target differs"
    return None


def _all_right(call: MismatchedCall, values: tuple[Value, ...]) -> bool:
    return all(_residual(replace(f, actual=f.expected, truth=f.truth), values) <= f.tolerance for f in call.mismatches)


def uninitialised(call: MismatchedCall) -> str | None:
    """An operator that only moves values returned others than it was given, and others again in another run."""
    return "uninitialised memory" if has_foreign_values(call) and not_deterministic(call) else None


def right_when_contiguous(call: MismatchedCall) -> str | None:
    """The target is right on contiguous copies of the inputs."""
    inputs = [t for t in tensors(call.case.args, call.case.kwargs) if t.layout == torch.strided]
    # Without a layout or an offset to change, another run would only repeat the first.
    contiguous = all(t.is_contiguous() for t in inputs)
    if contiguous and call.case.run_at_offsets is None and all(t.storage_offset() == 0 for t in inputs):
        return None
    values = _run_target(call, lambda t: t.detach().clone(memory_format=torch.contiguous_format))
    if values is None:
        return None
    for f in call.mismatches:
        found = values[f.position]
        if found is None or form_difference(found, call.case.expected[f.position]).startswith(("shape", "dtype")):
            return None
        # Right by the same limit as the target's own result, not equal: another path rounds differently.
        right = _replaced(f, flat_values(found))
        if right.residual(f.expected) > f.tolerance:
            return None
    return "right without a storage offset" if contiguous else "right on contiguous inputs"


def flushed_inputs(call: MismatchedCall) -> str | None:
    """The oracle agrees with the target once subnormal inputs are zero."""
    inputs = [t for t in tensors(call.case.args, call.case.kwargs) if t.is_floating_point()]
    if not any(_has_subnormals(t) for t in inputs):
        return None
    normal = max((torch.finfo(t.dtype).smallest_normal for t in inputs), default=0.0)

    def flush(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() < normal, x * 0.0, x)

    # Inputs first: flushing of both explains more results, and would hide that only the inputs are flushed.
    if holds_on_changed_inputs(call, flush):
        return "subnormal inputs flushed"
    return "subnormal inputs and results flushed" if holds_on_changed_inputs(call, flush, results=flush) else None


def rounded_inputs(call: MismatchedCall) -> str | None:
    """The oracle agrees with the target once the inputs are rounded to a shorter dtype."""
    judged = [f for f in call.mismatches if f.fmt is not None and f.fmt.mantissa >= 23]
    if len(judged) < len(call.mismatches) or all(1000 * f.bad.size < f.actual.numel() for f in judged):
        return None  # Rounded inputs change most results, not a few; and 16-bit inputs would stay as they are.
    if all(f.bad.size < 2 < f.actual.numel() for f in judged):
        return None  # One element has the value of one of seven roundings too easily.
    is_operand = operands_of(call.case)
    operands = {is_operand(t) for t in tensors(call.case.args, call.case.kwargs) if t.is_floating_point()}
    # Only matrix units compute in tf32, so it is the first guess for products and the last for all others.
    names = _ROUNDINGS if call.case.facts.accumulates else _ROUNDINGS[_TF32:] + _ROUNDINGS[:_TF32]
    for name, change in sorted(names, key=lambda n: call.known != f"{ROUNDED_INPUTS}{n[0]}"):
        if len(operands) == 2 and holds_on_changed_inputs(call, change, is_operand):
            return f"{ROUNDED_INPUTS}{name}"
        if holds_on_changed_inputs(call, change):
            return f"{ROUNDED_INPUTS}{name}"
    return None


def operands_of(case: Case) -> Callable[[torch.Tensor], bool]:
    """Which inputs a unit for matrix products rounds: its operands, but not the bias, or what is added to a product."""
    added = case.arguments().get("self") if case.facts.adds_self else None
    return (lambda t: t.dim() >= 2) if added is None else (lambda t: t is not added)


def _in_float64(rounding: InputRounding) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: rounding(x.to(torch.float32)).to(torch.float64)


_ROUNDINGS: Final = tuple((name, _in_float64(rounding)) for name, rounding in IN_FLOAT32.items())
_TF32: Final = sum(name.startswith("tf32") for name in IN_FLOAT32)


def rounding_named(explanation: str) -> InputRounding | None:
    """The rounding that an explanation of `rounded_inputs` names, of float32 values; None for others."""
    return IN_FLOAT32.get(explanation.removeprefix(ROUNDED_INPUTS))


def _residual(result_diff: ResultDiff, values: tuple[Value, ...], *, only_bad: bool = True) -> float:
    value = values[result_diff.position] if result_diff.position < len(values) else None
    if value is None:
        return float("inf")
    flat = flat_values(value)
    if flat.numel() != result_diff.actual.numel():
        return float("inf")
    # Nearly all second runs give the same bits.
    return 0.0 if bits_equal(flat, result_diff.actual) else result_diff.residual(flat, only_bad=only_bad)


def _replaced(result_diff: ResultDiff, actual: torch.Tensor) -> ResultDiff:
    return replace(result_diff, actual=actual, excess_actual=None, excess_expected=None, exact=False)


def _run_target(
    call: MismatchedCall, convert: Callable[[torch.Tensor], torch.Tensor] | None, *, at_offsets: bool = False
) -> tuple[Value, ...] | None:
    """Run the target again; None where it raises, which is no explanation of wrong values."""
    run = call.case.run_at_offsets if at_offsets else None
    run = run or call.case.run_target
    try:
        if convert is None:  # another run of the call as it was
            return run(*call.case.fresh_inputs())
        return run_changed(call.case, run, call.case.fresh_inputs(convert))
    # Exceptions end the hypothesis, not the comparison: the call was valid once, on these inputs.
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _has_subnormals(t: torch.Tensor) -> bool:
    if t.layout != torch.strided or is_zero_tensor(t):
        return False
    size = t.detach().to(torch.float64).abs()
    return bool(((size > 0) & (size < torch.finfo(t.dtype).smallest_normal)).any())


_TRUNCATED: Final = Hypothesis(Cause.REDUCED_PRECISION, 0.9, rerun_hypotheses.truncated_results)
_SCALED: Final = Hypothesis(Cause.IMPLEMENTATION, 0.9, value_hypotheses.scaled)
_COARSE: Final = Hypothesis(Cause.REDUCED_PRECISION, 0.85, value_hypotheses.coarse_sums)
HYPOTHESES: Final[tuple[Hypothesis, ...]] = (
    # Most specific evidence first: bits of the call before cannot be equal by chance.
    Hypothesis(Cause.IMPLEMENTATION, 0.95, value_hypotheses.stale),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, uninitialised),
    Hypothesis(Cause.NON_DETERMINISM, 0.9, not_deterministic),
    # After non-determinism: a result that varies may be right by chance on contiguous copies.
    Hypothesis(Cause.LAYOUT, 0.95, right_when_contiguous),
    Hypothesis(Cause.IMPLEMENTATION, 0.95, value_hypotheses.biased_variance),
    Hypothesis(Cause.IMPLEMENTATION, 0.95, not_written),
    Hypothesis(Cause.FLUSHED_SUBNORMALS, 0.95, value_hypotheses.flushed_results),
    # Before what compares values, to which both zeros are the same.
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, value_hypotheses.sign_of_zero),
    Hypothesis(Cause.FLUSHED_SUBNORMALS, 0.9, flushed_inputs),
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, value_hypotheses.nan_missing),
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, value_hypotheses.nan_produced),
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, value_hypotheses.early_overflow),
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, value_hypotheses.saturated),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, rerun_hypotheses.argument_ignored),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, rerun_hypotheses.lost_duplicates),
    _TRUNCATED,
    Hypothesis(Cause.REDUCED_PRECISION, 0.95, rounded_inputs),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, rerun_hypotheses.missing_terms),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, rerun_hypotheses.cancelling_formula),
    Hypothesis(Cause.REDUCED_PRECISION, 0.9, value_hypotheses.rounded_results),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, value_hypotheses.sign_flipped),
    Hypothesis(Cause.IMPLEMENTATION, 0.8, value_hypotheses.last_elements),
    _SCALED,
    Hypothesis(Cause.IMPLEMENTATION, 0.85, value_hypotheses.update_scaled),
    Hypothesis(Cause.IMPLEMENTATION, 0.8, value_hypotheses.offset),
    Hypothesis(Cause.IMPLEMENTATION, 0.8, value_hypotheses.equals_input),
    Hypothesis(Cause.IMPLEMENTATION, 0.8, value_hypotheses.permuted),
    Hypothesis(Cause.IMPLEMENTATION, 0.7, value_hypotheses.block_edge),
    _COARSE,
    # Last, as a guess by the size of the errors: any other explanation that holds says more.
    Hypothesis(Cause.REDUCED_PRECISION, 0.4, value_hypotheses.coarse_noise),
)
# Where no element is wrong by itself, only what describes all elements can be shown to hold.
_ON_THE_WHOLE: Final = (_TRUNCATED, _SCALED, _COARSE)
