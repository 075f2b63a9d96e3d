"""Short 16-bit products: too short to be split, so a correct one is summed in float32 and rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from shadowrun.numerics.tolerance import base_name
from shadowrun.replay.finding import Finding, flat_values, op_name
from shadowrun.replay.oracle import NoOracle
from shadowrun.replay.undefined import arguments
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.numerics.excess import Array
    from shadowrun.replay.case import Case, Value
    from shadowrun.replay.oracle import Oracle

__all__ = ["beyond_one_rounding"]

SHORT: Final = 64
"""Terms below which no library splits a sum into blocks that are rounded on their own: one step of a tile of matrix
units takes 16 to 64, and a block is at least one step."""
FAITHFUL: Final = 2.0
"""Unit roundoffs of one rounding to either neighbour; to the nearest would be 1."""
_FLOAT32: Final = 2.0**-24
_PLAIN: Final = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec")}
_ADDED: Final = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}


def beyond_one_rounding(case: Case, finding: Finding, oracle: Oracle) -> Verdict | None:
    """Find short 16-bit products that were rounded on the way, not only at their end.

    The excess takes for rounding what a change of the inputs by one rounding makes, and hides it in sums that cancel.
    Here a sum is held to the errors of float32, and a result to one of the neighbours of the truth; a product may be
    rounded before something is added to it, and once more for each factor.

    Returns:
        A MISMATCH, with `finding.bad` set; None if there are none, if the reference is no better, or if the operator is
        no such product.
    """
    name, named = base_name(op_name(case)), arguments(case)
    factors = _PLAIN.get(name) or _ADDED.get(name)
    scales = [named.get(k, 1) for k in ("alpha", "beta")]
    if factors is None or finding.fmt is None or finding.truth is None or finding.classes.any():
        return None
    left = named[factors[0]]
    terms = left.shape[-1]
    if terms >= SHORT or left.dtype not in (torch.float16, torch.bfloat16) or not all(map(_is_positive, scales)):
        return None
    truth = finding.truth.value[finding.where]
    try:
        size = _at(oracle.under(torch.abs), finding)
        added = truth * 0.0
        if name in _ADDED:
            added = truth - _at(oracle.under(torch.zero_, lambda t: t is named["self"]), finding)
    except NoOracle:
        return None
    rounded = np.abs(truth)
    if name in _ADDED:
        times = sum(s != 1 for s in scales)
        rounded = rounded + (1 + times) * np.abs(truth - added) + times * np.abs(added)
    unit = finding.fmt.roundoff * rounded + terms * _FLOAT32 * size + finding.fmt.normal
    ours, theirs = (np.abs(finding.taken(t) - truth) / unit for t in (finding.actual, finding.expected))
    wrong = ours > FAITHFUL
    if not wrong.any() or (theirs > FAITHFUL).any():
        return None
    finding.bad = finding.where[wrong]
    evidence = (
        f"{finding.name}: {finding.bad.size} of {finding.actual.numel()} elements are no neighbours of the sum of "
        f"{terms} terms in float32: at most {ours.max():.3g} roundings off, {theirs.max():.3g} on the reference"
    )
    return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)


def _is_positive(scale: object) -> bool:
    return isinstance(scale, (int, float)) and scale > 0


def _at(values: tuple[Value, ...], finding: Finding) -> Array:
    flat: Array = flat_values(values[finding.position]).to(torch.float64).numpy()
    return flat[finding.where]
