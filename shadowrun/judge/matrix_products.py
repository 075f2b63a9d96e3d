"""Matrix products that pass element by element: short 16-bit ones, and tf32 in long float32 ones.

A short 16-bit product cannot be split into blocks, so a correct one is summed in float32 and rounded once.

The bound of a long sum grows with the root of its length, and errors of rounded inputs average out: from about 15,000
positive terms no single element proves tf32. But these errors are known numbers: the oracle on rounded inputs gives
them. If the distance of the target from the oracle falls by half when they are subtracted, they are its cause. Errors
from another cause would grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from shadowrun.judge.oracle import NoOracle, n_terms
from shadowrun.judge.oracle_verdict import reference_wrong
from shadowrun.judge.result_diff import flat_values
from shadowrun.numerics.input_roundings import to_tf32
from shadowrun.operators.case import tensors
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.judge.oracle import Oracle
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.numerics.excess import Array
    from shadowrun.operators.case import Case, Value

__all__ = ["rounded_inputs_of_long_product", "short_product_error"]


SHORT: Final = 64
"""Terms below which no library splits a sum into blocks that are rounded on their own: one step of a tile of matrix
units takes 16 to 64, and a block is at least one step."""
FAITHFUL: Final = 2.0
"""Unit roundoffs of one rounding to either neighbour; to the nearest would be 1."""
_FLOAT32: Final = 2.0**-24


def short_product_error(case: Case, result_diff: ResultDiff, oracle: Oracle) -> Verdict | None:
    """Find short 16-bit products with intermediate rounding.

    In sums that cancel, the excess accepts what one rounding of the inputs does, which hides intermediate rounding.
    Here a sum is held to the errors of float32, and a result to one of the two neighbours of the truth. A product may
    be rounded before something is added to it, and once more for each factor (alpha, beta).

    Returns:
        A MISMATCH, with `result_diff.bad` set; None if there are none, if the reference is no better, or if the
        operator is no such product.
    """
    row, named = case.facts, case.arguments()
    scales = [named.get(k, 1) for k in ("alpha", "beta")]
    if not row.factors or result_diff.fmt is None or result_diff.truth is None or result_diff.classes.any():
        return None
    first = named[row.factors[0]]
    # The perturbation of the oracle is not used: it moves inputs by a 16-bit rounding, which hides errors of sums that
    # cancel.
    terms = first.shape[-1]
    if terms >= SHORT or first.dtype not in (torch.float16, torch.bfloat16) or not all(map(_is_positive, scales)):
        return None
    truth = result_diff.truth.value[result_diff.where]
    try:
        size = _at(oracle.on_changed_inputs(torch.abs), result_diff)
        added = truth * 0.0
        if row.adds_self:
            added = truth - _at(oracle.on_changed_inputs(torch.zero_, lambda t: t is named["self"]), result_diff)
    except NoOracle:
        return None
    # What may be rounded to 16 bits: the result, the product before the addition, and each scaled operand.
    rounded = np.abs(truth)
    if row.adds_self:
        times = sum(s != 1 for s in scales)
        rounded = rounded + (1 + times) * np.abs(truth - added) + times * np.abs(added)
    # Any order of a float32 sum is within terms * u of the sum of magnitudes.
    unit = result_diff.fmt.roundoff * rounded + terms * _FLOAT32 * size + result_diff.fmt.normal
    actual_excess, expected_excess = (
        np.abs(result_diff.differing_values(t) - truth) / unit for t in (result_diff.actual, result_diff.expected)
    )
    wrong = actual_excess > FAITHFUL
    # A reference that splits sums itself cannot hold the target to this rule.
    if not wrong.any() or (expected_excess > FAITHFUL).any():
        return None
    result_diff.bad = result_diff.where[wrong]
    evidence = (
        f"{result_diff.name}: {result_diff.bad.size} of {result_diff.actual.numel()} elements are no neighbours of the "
        f"sum of {terms} terms in float32: at most {actual_excess.max():.3g} roundings off, "
        f"{expected_excess.max():.3g} on the reference"
    )
    return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)


def _is_positive(scale: object) -> bool:
    return isinstance(scale, (int, float)) and scale > 0


def _at(values: tuple[Value, ...], result_diff: ResultDiff) -> Array:
    flat: Array = flat_values(values[result_diff.position]).to(torch.float64).numpy()
    return flat[result_diff.where]


MANY_TERMS: Final = 4096
"""Shorter products show rounded inputs in single elements: 600 units at 1024 positive terms, 157 at 16384."""
ENOUGH: Final = 64
"""Number of elements from which a correlation of 0.87 is significant."""
SHARE: Final = 0.5
"""At most this share of the root mean square distance remains."""


def rounded_inputs_of_long_product(case: Case, result_diff: ResultDiff, oracle: Oracle) -> Verdict | None:
    """Find tf32 inputs in a long float32 product that passed element by element.

    Returns:
        A mismatch, or None if there is nothing to see; the result_diff's mismatched elements are then all that differ.
    """
    assert result_diff.truth is not None
    long = n_terms(case, result_diff.position) >= MANY_TERMS and result_diff.actual.numel() >= ENOUGH
    factors = [t for t in tensors(case.args, case.kwargs) if t.dtype == torch.float32 and t.dim() >= 2]
    if not long or len(factors) < 2 or result_diff.actual.dtype != torch.float32 or not case.facts.accumulates:
        return None
    try:
        # What rounded inputs would change is known exactly, so it can be subtracted.
        value = oracle.on_changed_inputs(to_tf32)[result_diff.position]
    except NoOracle:
        return None
    truth = result_diff.truth.value
    rounded = flat_values(value).numpy()
    remaining = [
        _remaining_error(t.to(torch.float64).numpy(), truth, rounded)
        for t in (result_diff.actual, result_diff.expected)
    ]
    text = f"{result_diff.name}: without tf32 in its inputs, {remaining[0]:.2g} of its distance from the oracle is left"
    if remaining[0] <= SHARE < remaining[1]:
        result_diff.bad = result_diff.where
        evidence = f"{text}; {remaining[1]:.2g} of the reference's"
        return Verdict(Status.MISMATCH, Cause.REDUCED_PRECISION, "inputs rounded to tf32", evidence, 0.9)
    if remaining[1] <= SHARE < remaining[0]:
        return reference_wrong(f"{result_diff.name}: its inputs were rounded to tf32")
    return None


def _remaining_error(values: np.ndarray, truth: np.ndarray, rounded: np.ndarray) -> float:
    """Share of the root mean square distance from the truth that is left from the truth on rounded inputs."""
    with np.errstate(all="ignore"):
        before, after = (float(np.sqrt(np.mean(np.square(values - o)))) for o in (truth, rounded))
    return after / before if before > 0 and np.isfinite(before) and np.isfinite(after) else np.inf
