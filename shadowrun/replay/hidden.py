"""Inputs rounded to tf32 that the bound of a long product hides, but all of its elements together show.

The bound of a sum grows with the root of its length, and the errors of rounded inputs average out: from about 15,000
positive terms no single element proves them. But they are known numbers: the oracle on rounded inputs gives them. If
the target's distance from the oracle falls by half when they are taken away, that is where it came from. Errors that
have nothing to do with them would make it greater.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from shadowrun.numerics.tolerance import accumulates
from shadowrun.replay.finding import flat_values, op_name
from shadowrun.replay.hypotheses import to_tf32
from shadowrun.replay.oracle import NoOracle, n_terms, tensors
from shadowrun.replay.weighing import reference_wrong
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.replay.case import Case
    from shadowrun.replay.finding import Finding
    from shadowrun.replay.oracle import Oracle

__all__ = ["hidden_rounding"]

MANY_TERMS: Final = 4096
"""Shorter products show rounded inputs in single elements: 600 units at 1024 positive terms, 157 at 16384."""
ENOUGH: Final = 64
"""Elements of which a correlation of 0.87 is no chance."""
SHARE: Final = 0.5
"""What must be left of the root mean square distance at most."""


def hidden_rounding(case: Case, finding: Finding, oracle: Oracle) -> Verdict | None:
    """Look for tf32 in a long float32 product that passed element by element.

    Returns:
        A mismatch, or None if there is nothing to see; the finding's mismatched elements are then all that differ.
    """
    assert finding.truth is not None
    long = n_terms(case, finding.position) >= MANY_TERMS and finding.actual.numel() >= ENOUGH
    factors = [t for t in tensors(case.args, case.kwargs) if t.dtype == torch.float32 and t.dim() >= 2]
    if not long or len(factors) < 2 or finding.actual.dtype != torch.float32 or not accumulates(op_name(case)):
        return None
    try:
        value = oracle.under(to_tf32)[finding.position]
    except NoOracle:
        return None
    truth = finding.truth.value
    rounded = flat_values(value).numpy()
    left = [_left(t.to(torch.float64).numpy(), truth, rounded) for t in (finding.actual, finding.expected)]
    text = f"{finding.name}: without tf32 in its inputs, {left[0]:.2g} of its distance from the oracle is left"
    if left[0] <= SHARE < left[1]:
        finding.bad = finding.where
        evidence = f"{text}; {left[1]:.2g} of the reference's"
        return Verdict(Status.MISMATCH, Cause.REDUCED_PRECISION, "inputs rounded to tf32", evidence, 0.9)
    if left[1] <= SHARE < left[0]:
        return reference_wrong(f"{finding.name}: its inputs were rounded to tf32")
    return None


def _left(values: np.ndarray, truth: np.ndarray, rounded: np.ndarray) -> float:
    """Share of the root mean square distance from the truth that is left from the truth on rounded inputs."""
    with np.errstate(all="ignore"):
        before, after = (float(np.sqrt(np.mean(np.square(values - o)))) for o in (truth, rounded))
    return after / before if before > 0 and np.isfinite(before) and np.isfinite(after) else np.inf
