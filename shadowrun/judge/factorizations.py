"""Results that are unique only up to sign, phase, basis or order: verified by the equation that defines them.

The factors of a matrix (eigenvectors, singular vectors, QR, LU) are put into their equation in float64, for each
matrix of a batch and each column: how far is A V from V diag(L), and V from orthonormal? The unit is the rounding of
the whole matrix, u times its Frobenius norm: backward stable algorithms promise that (Higham, Accuracy and Stability,
2nd ed., chapters 9, 19 and 20; Golub & Van Loan, sections 8.1 and 8.6) and nothing for single elements. The bound
is that of sums, compared with the residual of the reference. So a vector of other sign or phase, or another basis of
the space of a repeated eigenvalue, is right, and a wrong one is wrong, whether its eigenvalue is repeated or not.

Each function ``_eigh``, ``_svd``, … puts the results of one side into the equation and returns residuals in units of
rounding. Matrices are divided by their greatest element first, so that no square overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.judge.oracle_verdict import reference_wrong
from shadowrun.judge.rounding.bounds import RATIO
from shadowrun.judge.rounding.rounding_bounds import BOUND, ROOT
from shadowrun.numerics.precision import FORMATS
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.judge.oracle import Oracle
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.operators.case import Case

__all__ = ["EQUATIONS", "Equation", "Residual", "by_equation", "in_another_order"]


Tensor = torch.Tensor
Named = Mapping[str, Any]
Values = Sequence[Any]
Truths = Mapping[int, Tensor]
DEPENDENT: Final = 128.0
"""Excess of vectors that are linearly dependent to half of the digits: beyond the bound, and within the permitted
ratio of a reference whose vectors are a quarter as dependent."""
TINY: Final = torch.finfo(torch.float64).tiny


class Residual(NamedTuple):
    """By how much one part of an equation is missed.

    Attributes:
        name: ``A V = V diag(L)``.
        excess: (batch, columns), in units of rounding; not finite where a result is not.
        places: Positions of the results that it concerns, and where in them a column lies: ``columns``, ``rows``,
            ``all`` of the matrix, or a ``vector``.
    """

    name: str
    excess: npt.NDArray[np.float64]
    places: Mapping[int, str]


class Equation(NamedTuple):
    """How the results of one operator are verified.

    Attributes:
        what: What they are: ``eigenvectors``.
        matrix: Name of the argument that is decomposed.
        unique: Results whose true values the residuals need.
        residuals: Of (arguments, results of one side, true values, unit roundoff); None if the result is unique here.
    """

    what: str
    matrix: str
    unique: tuple[int, ...]
    residuals: Callable[[Named, Values, Truths, float], list[Residual] | None]


def _wide(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj()
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of matrices divided by their greatest elements, and these: (batch, m, n) and (batch, 1, 1)."""
    wide = _batch(_wide(matrix))
    # The square of an element above 1e154 overflows in float64; a division by the greatest one avoids that.
    scale = wide.abs().amax((-2, -1), keepdim=True).clamp_min(TINY)
    return wide / scale, scale


def _batch(t: Tensor) -> Tensor:
    return t.reshape(-1, *t.shape[-2:])


def _norm(matrix: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(matrix)
    return norm.clamp_min(TINY).unsqueeze(-1)


def _columns(gap: Tensor, unit: Tensor) -> npt.NDArray[np.float64]:
    excess: npt.NDArray[np.float64] = (torch.linalg.vector_norm(gap, dim=-2) / unit).numpy()
    return excess


def _orthonormal(vectors: Tensor, roundoff: float, name: str, places: Mapping[int, str]) -> Residual:
    """Columns of `vectors` against their own transpose; the unit is that of a product of as many rows."""
    gap = vectors.mH @ vectors - torch.eye(vectors.shape[-1], dtype=vectors.dtype)
    unit = roundoff * max(vectors.shape[-2], 1) ** 0.5
    return Residual(name, _columns(gap, torch.tensor(unit)), places)


def _eigh(named: Named, values: Values, truths: Truths, u: float) -> list[Residual] | None:
    if not named["compute_v"]:
        return None
    matrix, scale = _scaled(named["A"])
    # The operator reads one triangle only; the other may hold anything.
    half = matrix.tril() if named["UPLO"].upper() == "L" else matrix.triu()
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).real.to(matrix.dtype)
    matrix = half + half.mH
    # `half + half.mH` has twice the diagonal; LAPACK ignores its imaginary part.
    matrix.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    vectors = _batch(_wide(values[1]))
    # The oracle's eigenvalues, not the target's own: those are unique, and judged as a result of their own.
    true = truths[0].reshape(-1, 1, matrix.shape[-1]) / scale
    return [
        _orthonormal(vectors, u, "V orthonormal", {1: "columns"}),
        Residual("A V = V diag(L)", _columns(matrix @ vectors - vectors * true, u * _norm(matrix)), {1: "columns"}),
    ]


def _eig(named: Named, values: Values, _truths: Truths, u: float) -> list[Residual] | None:
    matrix, scale = _scaled(named["self"])
    # A real matrix may have complex eigenvalues.
    matrix = matrix.to(torch.complex128)
    # Its own eigenvalues: they may come in any order, if the vectors come in the same.
    found = _wide(values[0]).reshape(-1, 1, matrix.shape[-1]) / scale
    vectors = _batch(_wide(values[1]))
    # Zeros have no length: what is not finite fails, and has singular values.
    vectors = torch.where(torch.isfinite(vectors), vectors, 0)
    lengths = torch.linalg.vector_norm(vectors, dim=-2) - 1
    least = torch.linalg.svdvals(vectors)[..., -1:] if vectors.numel() else torch.ones(vectors.shape[0], 1)
    return [
        Residual("A V = V diag(L)", _columns(matrix @ vectors - vectors * found, u * _norm(matrix)), {1: "columns"}),
        Residual("columns of V of length 1", (lengths.abs() / u).numpy(), {1: "columns"}),
        # Eigenvectors of a defective matrix are sqrt(u) apart or less. Where the reference's are, all is right.
        Residual("V of full rank", DEPENDENT * (u**0.5 / least.clamp_min(TINY)).clamp_max(1.0).numpy(), {1: "all"}),
    ]


def _svd(named: Named, values: Values, truths: Truths, u: float) -> list[Residual] | None:
    if not named["compute_uv"]:
        return None
    matrix, scale = _scaled(named["A"])
    left, right = _batch(_wide(values[0])), _batch(_wide(values[2])).mH
    k = min(matrix.shape[-2:])
    true = truths[1].reshape(-1, 1, k) / scale
    unit = u * _norm(matrix)
    both = {0: "columns", 2: "rows"}
    return [
        _orthonormal(left, u, "U orthonormal", {0: "columns"}),
        _orthonormal(right, u, "Vh orthonormal", {2: "rows"}),
        Residual("A V = U diag(S)", _columns(matrix @ right[..., :k] - left[..., :k] * true, unit), both),
        Residual("Ah U = V diag(S)", _columns(matrix.mH @ left[..., :k] - right[..., :k] * true, unit), both),
    ]


def _qr(named: Named, values: Values, _truths: Truths, u: float) -> list[Residual] | None:
    matrix, scale = _scaled(named["A"])
    upper = _batch(_wide(values[1])) / scale
    unit = u * _norm(matrix)
    triangular = Residual("R triangular", _columns(upper.tril(-1), unit), {1: "columns"})
    # Without Q, the Gram matrix determines R up to the sign or phase of its rows.
    if named["mode"] == "r":
        gap = upper.mH @ upper - matrix.mH @ matrix
        return [triangular, Residual("Rh R = Ah A", _columns(gap, unit * _norm(matrix)), {1: "columns"})]
    q = _batch(_wide(values[0]))
    return [
        _orthonormal(q, u, "Q orthonormal", {0: "columns"}),
        triangular,
        Residual("A = Q R", _columns(matrix - q @ upper, unit), {0: "all", 1: "columns"}),
    ]


def _geqrf(named: Named, values: Values, _truths: Truths, u: float) -> list[Residual] | None:
    matrix, scale = _scaled(named["self"])
    packed, tau = _batch(_wide(values[0])), _wide(values[1])
    k = min(matrix.shape[-2:])
    q = torch.linalg.householder_product(packed[..., :k].contiguous(), tau.reshape(-1, k))
    upper = packed[..., :k, :].triu() / scale
    return [
        _orthonormal(q, u, "Q orthonormal", {0: "columns", 1: "vector"}),
        Residual("A = Q R", _columns(matrix - q @ upper, u * _norm(matrix)), {0: "columns", 1: "vector"}),
    ]


def _lu(named: Named, values: Values, _truths: Truths, u: float) -> list[Residual] | None:
    matrix, scale = _scaled(named["A"])
    p, lower, upper = (_batch(_wide(v)) for v in values[:3])
    upper = upper / scale
    unit = u * _norm(matrix)
    k = lower.shape[-1]
    below = lower.triu() - torch.eye(lower.shape[-2], k, dtype=lower.dtype)
    places = {0: "all", 1: "all", 2: "columns"}
    found = [
        Residual("L unit triangular", _columns(below, torch.tensor(u)), {1: "columns"}),
        Residual("U triangular", _columns(upper.tril(-1), unit), {2: "columns"}),
        Residual("A = P L U", _columns(matrix - (p @ lower if p.shape[-1] else lower) @ upper, unit), places),
    ]
    if p.shape[-1]:
        found.append(_orthonormal(p, u, "P a permutation", {0: "columns"}))
    return found


def _packed_lu(first: int, *, transposed: bool) -> Callable[[Named, Values, Truths, float], list[Residual] | None]:
    """Residuals of L and U packed in one matrix, with pivots; of A, or of its transpose if that is nearer."""

    def residuals(named: Named, values: Values, _truths: Truths, u: float) -> list[Residual] | None:
        matrix, scale = _scaled(named["A"])
        factors, pivots = _batch(_wide(values[first])), values[first + 1]
        places = {first: "columns", first + 1: "vector"}
        m = factors.shape[-2]
        if bool(((pivots < 1) | (pivots > m)).any()):
            return [Residual("pivots in range", np.full((factors.shape[0], 1), np.inf), places)]
        p, lower, upper = torch.lu_unpack(factors, pivots.reshape(-1, pivots.shape[-1]))
        product, unit = p @ lower @ (upper / scale), u * _norm(matrix)
        excess = _columns(matrix - product, unit)
        if transposed:
            # LAPACK takes columns, so a kernel may factorise the transpose of a row-major matrix without a copy.
            of_transpose = _columns(matrix.mT - product, unit)
            nearer = of_transpose.max(1, keepdims=True, initial=0.0) < excess.max(1, keepdims=True, initial=0.0)
            excess = np.where(nearer, of_transpose, excess)
        return [Residual("A = P L U", excess, places)]

    return residuals


def _lstsq(named: Named, values: Values, _truths: Truths, u: float) -> list[Residual] | None:
    """Only where the matrix has no full rank: else the solution is unique."""
    matrix, scale = _scaled(named["self"])
    right = _wide(named["b"])
    vector = right.dim() == named["self"].dim() - 1
    right = right.unsqueeze(-1) if vector else right
    right = right.expand(*named["self"].shape[:-2], *right.shape[-2:])
    solution = _wide(values[0])
    solution = solution.unsqueeze(-1) if vector else solution
    x, b = _batch(solution) * scale, _batch(right)
    gap = matrix.mH @ (matrix @ x - b)
    norm = _norm(matrix)
    size = norm * torch.linalg.vector_norm(x, dim=-2) + torch.linalg.vector_norm(b, dim=-2)
    places = {0: "vector" if vector else "columns"}
    if _full_rank(matrix, named["rcond"], u):
        return None
    return [Residual("Ah (A X - B) = 0", _columns(gap, (u * norm * size).clamp_min(TINY)), places)]


def _full_rank(matrix: Tensor, rcond: float | None, u: float) -> bool:
    values = torch.linalg.svdvals(matrix)
    least = max(rcond or 0.0, 2 * u * max(matrix.shape[-2:]))
    return not values.numel() or bool((values[..., -1] > least * values[..., 0]).all())


EQUATIONS: Final[dict[str, Equation]] = {
    "_linalg_eigh": Equation("eigenvectors", "A", (0,), _eigh),
    "linalg_eig": Equation("eigenvectors", "self", (), _eig),
    "_linalg_svd": Equation("singular vectors", "A", (1,), _svd),
    "linalg_qr": Equation("factors Q and R", "A", (), _qr),
    "geqrf": Equation("factors Q and R", "self", (), _geqrf),
    "linalg_lu": Equation("factors P, L and U", "A", (), _lu),
    "linalg_lu_factor_ex": Equation("factors L and U", "A", (), _packed_lu(0, transposed=False)),
    "_linalg_det": Equation("factors L and U", "A", (), _packed_lu(1, transposed=True)),
    "_linalg_slogdet": Equation("factors L and U", "A", (), _packed_lu(2, transposed=True)),
    "_linalg_solve_ex": Equation("factors L and U", "A", (), _packed_lu(1, transposed=True)),
    "linalg_lstsq": Equation("least-squares solution", "self", (), _lstsq),
}


def by_equation(case: Case, result_diff: ResultDiff, get_oracle: Callable[[], Oracle]) -> Verdict | None:
    """Judge a result that is not unique.

    Args:
        case: The call.
        result_diff: The result; its mismatched elements are filled in.
        get_oracle: Returns the oracle.

    Returns:
        None where the result is unique after all (least squares of full rank).

    Raises:
        NoOracle: If the equation needs the oracle's values, and there is no oracle.
    """
    equation = EQUATIONS[case.facts.name]
    named = case.arguments()
    matrix = named[equation.matrix].detach()
    # LAPACK leaves the factors of such a matrix undefined.
    if not bool(torch.isfinite(matrix).all()):
        return _open(result_diff, "the input is not finite")
    truths = _truths(equation, case, get_oracle)
    roundoff = FORMATS[matrix.abs().dtype].roundoff
    actual_residuals = equation.residuals(named, case.actual, truths, roundoff)
    expected_residuals = equation.residuals(named, case.expected, truths, roundoff)
    if actual_residuals is None or expected_residuals is None:
        return None
    # LAPACK reaches 11 units in the equations and 5 in orthonormality, for sizes 2 to 400; wrong vectors miss by
    # thousands.
    limit = BOUND + ROOT * max(matrix.shape[-2:], default=1) ** 0.5
    bad = np.zeros(result_diff.where.size, bool)
    evidence, failed, reference_failed = "", "", ""
    worst = -1.0
    for actual, expected in zip(actual_residuals, expected_residuals, strict=True):
        if result_diff.position not in actual.places:
            continue
        own, found = _greatest(expected), _greatest(actual)
        text = f"{actual.name} to {found:.3g} units of rounding, the reference to {own:.3g}"
        if found > worst:
            worst, evidence = found, text
        beyond = ~(actual.excess <= max(limit, RATIO * own if np.isfinite(own) else 0.0))
        if bool(beyond.any()):
            failed = failed or text
            bad |= _elements(case, result_diff, actual, beyond)
        elif not own <= RATIO * limit and found <= limit:
            reference_failed = reference_failed or text
    if failed:
        if not np.isfinite(sum(_greatest(r) for r in expected_residuals)):
            return _open(result_diff, f"the reference's own is not finite; {failed}")
        result_diff.bad = result_diff.where[bad] if bad.any() else result_diff.where
        sentence = f"{result_diff.name}: {result_diff.bad.size} of {result_diff.actual.numel()} elements; {failed}"
        return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, f"not {equation.what}", sentence, 0.8)
    if reference_failed:
        return reference_wrong(f"{result_diff.name}: {reference_failed}")
    # Other factors are valid, but the program continues with other numbers than on the reference: the report says so.
    if _near(result_diff, roundoff):
        return Verdict(Status.MATCH, Cause.ROUNDING, "", evidence)
    return Verdict(Status.MATCH, Cause.UNDEFINED, f"not unique: other {equation.what}, as valid", evidence)


def in_another_order(case: Case, result_diff: ResultDiff, oracle: Oracle) -> Verdict | None:
    """Judge eigenvalues that are wrong in their places; None if they are wrong in any order.

    Each is paired with the nearest of the oracle's that is left. What they may be off is what the oracle's are off
    under perturbation, and u times the norm of the matrix.
    """
    truth = oracle.truths[0]
    n = case.expected[0].shape[-1] if isinstance(case.expected[0], torch.Tensor) else 0
    if truth is None or not n:
        return None
    matrix = case.arguments()["self"].detach()
    roundoff = FORMATS[matrix.abs().dtype].roundoff
    norms = torch.linalg.matrix_norm(matrix.abs().to(torch.float64)).reshape(-1, 1).numpy()
    shape = (-1, n, 2)
    value, spread = (np.asarray(x, np.float64).reshape(shape) for x in (truth.value, truth.spread))
    # Which of two close eigenvalues moved is unknown once they are paired anew, so the greatest spread counts for all.
    unit = np.hypot(spread[..., 0], spread[..., 1]).max(-1, keepdims=True) + roundoff * norms
    excess = [
        _paired(flat.to(torch.float64).numpy().reshape(shape), value) / np.maximum(unit, np.finfo(float).tiny)
        for flat in (result_diff.actual, result_diff.expected)
    ]
    actual_excess, own = (float(np.nan_to_num(x, nan=np.inf).max()) for x in excess)
    limit = BOUND + ROOT * n**0.5
    if actual_excess > max(limit, RATIO * own) or not _goes_with_vectors(case, roundoff, limit):
        return None
    evidence = (
        f"{result_diff.name}: greatest excess {actual_excess:.3g} units of rounding against {own:.3g} of the reference"
    )
    return Verdict(Status.MATCH, Cause.UNDEFINED, "not unique: the same eigenvalues in another order", evidence)


def _goes_with_vectors(case: Case, roundoff: float, limit: float) -> bool:
    """Whether the target's eigenvalues come in the order of its eigenvectors, where it returned any."""
    equation = EQUATIONS.get(case.facts.name)
    found = None if equation is None else equation.residuals(case.arguments(), case.actual, {}, roundoff)
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


def _open(result_diff: ResultDiff, why: str) -> Verdict:
    return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, f"{result_diff.name} is not unique", why)


def _truths(equation: Equation, case: Case, get_oracle: Callable[[], Oracle]) -> dict[int, torch.Tensor]:
    """The oracle's values of the results that are unique."""
    found = {}
    for position in equation.unique:
        truth = get_oracle().truths[position]
        result = case.expected[position]
        if truth is not None and isinstance(result, torch.Tensor):
            found[position] = torch.from_numpy(truth.value).reshape(result.shape)
    return found


def _greatest(residual: Residual) -> float:
    return float(np.nan_to_num(residual.excess, nan=np.inf).max(initial=0.0))


def _elements(
    case: Case, result_diff: ResultDiff, residual: Residual, beyond: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which of the differing elements lie in a vector that fails."""
    result = case.actual[result_diff.position]
    assert isinstance(result, torch.Tensor)
    place = result_diff.where // (2 if result.is_complex() else 1)
    axis = residual.places[result_diff.position]
    rows, columns = (1, result.shape[-1]) if axis == "vector" else result.shape[-2:]
    batch = place // (rows * columns)
    lines = {"columns": (columns, place % columns), "rows": (rows, (place // columns) % rows)}
    n_lines, line = lines.get(axis, (-1, place))
    # A part of the equation may have fewer columns than the result: then the whole matrix is marked.
    matrices: npt.NDArray[np.bool_] = np.logical_or.reduce(beyond, axis=1)
    return beyond[batch, line] if beyond.shape[1] == n_lines else matrices[batch]


def _near(result_diff: ResultDiff, roundoff: float) -> bool:
    """Whether the two sides agree to half of their digits: then it is rounding, not another choice."""
    a, e = result_diff.actual.to(torch.float64), result_diff.expected.to(torch.float64)
    return bool(torch.linalg.vector_norm(a - e) <= roundoff**0.5 * torch.linalg.vector_norm(e))
