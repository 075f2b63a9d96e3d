"""Results that are unique only up to sign, phase, basis or order: verified by the equation that defines them.

The factors of a matrix (eigenvectors, singular vectors, QR, LU) are put into their equation in float64, for each
matrix of a batch and each column: how far is A V from V diag(L), and V from orthonormal? The unit is the rounding of
the whole matrix, u times its Frobenius norm: backward stable algorithms promise that (Higham, Accuracy and Stability,
2nd ed., chapters 9, 19 and 20; Golub & Van Loan, sections 8.1 and 8.6) and nothing for single elements. The bound
is that of sums, compared with the residual of the reference. So a vector of other sign or phase, or another basis of
the space of a repeated eigenvalue, is right, and a wrong one is wrong, whether its eigenvalue is repeated or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.numerics.precision import FORMATS
from shadowrun.numerics.tolerance import base_name
from shadowrun.replay.bounds import BOUND, RATIO, ROOT
from shadowrun.replay.equations import EQUATIONS, Residual
from shadowrun.replay.finding import Finding, op_name
from shadowrun.replay.undefined import arguments
from shadowrun.replay.weighing import reference_wrong
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shadowrun.replay.case import Case
    from shadowrun.replay.equations import Equation
    from shadowrun.replay.oracle import Oracle

__all__ = ["any_order", "by_equation", "concerns", "in_another_order"]

_ANY_ORDER: Final = frozenset({"linalg_eig", "linalg_eigvals", "_linalg_eigvals"})


def concerns(op: str, position: int) -> bool:
    """Whether a result of an operator is judged by an equation, not element by element."""
    equation = EQUATIONS.get(base_name(op))
    return equation is not None and position in equation.positions


def by_equation(case: Case, finding: Finding, ask: Callable[[], Oracle]) -> Verdict | None:
    """Judge a result that is not unique.

    Args:
        case: The call.
        finding: The result; its mismatched elements are filled in.
        ask: Gives the oracle.

    Returns:
        None where the result is unique after all (least squares of full rank).

    Raises:
        NoOracle: If the equation needs the oracle's values and it cannot be asked.
    """
    equation = EQUATIONS[base_name(op_name(case))]
    named = arguments(case)
    matrix = named[equation.matrix].detach()
    if not bool(torch.isfinite(matrix).all()):
        return _open(finding, "the input is not finite")
    truths = _truths(equation, case, ask)
    roundoff = FORMATS[matrix.abs().dtype].roundoff
    ours = equation.residuals(named, case.actual, truths, roundoff)
    theirs = equation.residuals(named, case.expected, truths, roundoff)
    if ours is None or theirs is None:
        return None
    limit = BOUND + ROOT * max(matrix.shape[-2:], default=1) ** 0.5
    bad = np.zeros(finding.where.size, bool)
    evidence, failed, reference_failed = "", "", ""
    worst = -1.0
    for left, right in zip(ours, theirs, strict=True):
        if finding.position not in left.places:
            continue
        own, found = _greatest(right), _greatest(left)
        text = f"{left.name} to {found:.3g} units of rounding, the reference to {own:.3g}"
        if found > worst:
            worst, evidence = found, text
        beyond = ~(left.excess <= max(limit, RATIO * own if np.isfinite(own) else 0.0))
        if bool(beyond.any()):
            failed = failed or text
            bad |= _elements(case, finding, left, beyond)
        elif not own <= RATIO * limit and found <= limit:
            reference_failed = reference_failed or text
    if failed:
        if not np.isfinite(sum(_greatest(r) for r in theirs)):
            return _open(finding, f"the reference's own is not finite; {failed}")
        finding.bad = finding.where[bad] if bad.any() else finding.where
        sentence = f"{finding.name}: {finding.bad.size} of {finding.actual.numel()} elements; {failed}"
        return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, f"not {equation.what}", sentence, 0.8)
    if reference_failed:
        return reference_wrong(f"{finding.name}: {reference_failed}")
    if _near(finding, roundoff):
        return Verdict(Status.MATCH, Cause.ROUNDING, "", evidence)
    return Verdict(Status.MATCH, Cause.UNDEFINED, f"not unique: other {equation.what}, as valid", evidence)


def any_order(op: str, position: int) -> bool:
    """Whether a result's elements may come in any order: the eigenvalues of a general matrix."""
    return position == 0 and base_name(op) in _ANY_ORDER


def in_another_order(case: Case, finding: Finding, oracle: Oracle) -> Verdict | None:
    """Judge eigenvalues that are wrong in their places; None if they are wrong in any order.

    Each is paired with the nearest of the oracle's that is left. What they may be off is what the oracle's are off
    under perturbation, and u times the norm of the matrix.
    """
    truth = oracle.truths[0]
    n = case.expected[0].shape[-1] if isinstance(case.expected[0], torch.Tensor) else 0
    if truth is None or not n:
        return None
    matrix = arguments(case)["self"].detach()
    roundoff = FORMATS[matrix.abs().dtype].roundoff
    norms = torch.linalg.matrix_norm(matrix.abs().to(torch.float64)).reshape(-1, 1).numpy()
    shape = (-1, n, 2)
    value, spread = (np.asarray(x, np.float64).reshape(shape) for x in (truth.value, truth.spread))
    unit = np.hypot(spread[..., 0], spread[..., 1]).max(-1, keepdims=True) + roundoff * norms
    excess = [
        _paired(flat.to(torch.float64).numpy().reshape(shape), value) / np.maximum(unit, np.finfo(float).tiny)
        for flat in (finding.actual, finding.expected)
    ]
    ours, own = (float(np.nan_to_num(x, nan=np.inf).max()) for x in excess)
    limit = BOUND + ROOT * n**0.5
    if ours > max(limit, RATIO * own) or not _goes_with_vectors(case, roundoff, limit):
        return None
    evidence = f"{finding.name}: greatest excess {ours:.3g} units of rounding against {own:.3g} of the reference"
    return Verdict(Status.MATCH, Cause.UNDEFINED, "not unique: the same eigenvalues in another order", evidence)


def _goes_with_vectors(case: Case, roundoff: float, limit: float) -> bool:
    """Whether the target's eigenvalues come in the order of its eigenvectors, where it returned any."""
    equation = EQUATIONS.get(base_name(op_name(case)))
    found = None if equation is None else equation.residuals(arguments(case), case.actual, {}, roundoff)
    return not found or _greatest(found[0]) <= limit


def _paired(found: npt.NDArray[Any], truth: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Distance of each element from the nearest that no nearer one took: (batch, n), of (batch, n, 2)."""
    with np.errstate(all="ignore"):
        distances = np.hypot(*np.moveaxis(found[:, :, None] - truth[:, None], -1, 0))
    distances = np.nan_to_num(distances, nan=np.inf)
    result = np.full(found.shape[:2], np.inf)
    for b in range(found.shape[0]):
        table = distances[b]
        for _ in range(table.shape[0]):
            row, column = divmod(int(table.argmin()), table.shape[1])
            result[b, row] = table[row, column]
            table[row], table[:, column] = np.inf, np.inf
    return result


def _open(finding: Finding, why: str) -> Verdict:
    return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, f"{finding.name} is not unique", why)


def _truths(equation: Equation, case: Case, ask: Callable[[], Oracle]) -> dict[int, torch.Tensor]:
    """The oracle's values of the results that are unique."""
    found = {}
    for position in equation.unique:
        truth = ask().truths[position]
        result = case.expected[position]
        if truth is not None and isinstance(result, torch.Tensor):
            found[position] = torch.from_numpy(truth.value).reshape(result.shape)
    return found


def _greatest(residual: Residual) -> float:
    return float(np.nan_to_num(residual.excess, nan=np.inf).max(initial=0.0))


def _elements(case: Case, finding: Finding, residual: Residual, beyond: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which of the differing elements lie in a vector that fails."""
    result = case.actual[finding.position]
    assert isinstance(result, torch.Tensor)
    place = finding.where // (2 if result.is_complex() else 1)
    axis = residual.places[finding.position]
    rows, columns = (1, result.shape[-1]) if axis == "vector" else result.shape[-2:]
    batch = place // (rows * columns)
    lines = {"columns": (columns, place % columns), "rows": (rows, (place // columns) % rows)}
    n_lines, line = lines.get(axis, (-1, place))
    # A part of the equation may have fewer columns than the result: then all of the matrix is suspect.
    matrices: npt.NDArray[np.bool_] = np.logical_or.reduce(beyond, axis=1)
    return beyond[batch, line] if beyond.shape[1] == n_lines else matrices[batch]


def _near(finding: Finding, roundoff: float) -> bool:
    """Whether the two sides agree to half of their digits: then it is rounding, not another choice."""
    a, e = finding.actual.to(torch.float64), finding.expected.to(torch.float64)
    return bool(torch.linalg.vector_norm(a - e) <= roundoff**0.5 * torch.linalg.vector_norm(e))
