"""The equations that matrix decompositions solve, as residuals in units of rounding.

Each function puts the results of one side into the equation, in float64, and gives for each matrix of a batch and each
column by how much it misses. Matrices are divided by their greatest element first, so that no square overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["EQUATIONS", "Equation", "Residual"]

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
        positions: Results that are not unique.
        unique: Results whose true values the residuals need.
        residuals: Of (arguments, results of one side, true values, unit roundoff); None if the result is unique here.
    """

    what: str
    matrix: str
    positions: tuple[int, ...]
    unique: tuple[int, ...]
    residuals: Callable[[Named, Values, Truths, float], list[Residual] | None]


def _wide(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj()
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of matrices divided by their greatest elements, and these: (batch, m, n) and (batch, 1, 1)."""
    wide = _batch(_wide(matrix))
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
    half = matrix.tril() if named["UPLO"].upper() == "L" else matrix.triu()
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).real.to(matrix.dtype)
    matrix = half + half.mH
    matrix.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    vectors = _batch(_wide(values[1]))
    true = truths[0].reshape(-1, 1, matrix.shape[-1]) / scale
    return [
        _orthonormal(vectors, u, "V orthonormal", {1: "columns"}),
        Residual("A V = V diag(L)", _columns(matrix @ vectors - vectors * true, u * _norm(matrix)), {1: "columns"}),
    ]


def _eig(named: Named, values: Values, _truths: Truths, u: float) -> list[Residual] | None:
    matrix, scale = _scaled(named["self"])
    matrix = matrix.to(torch.complex128)
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
    """Residuals of factors in one matrix, with pivots beside; of A, or of its transpose where the layout suggests."""

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
            other = _columns(matrix.mT - product, unit)
            nearer = other.max(1, keepdims=True, initial=0.0) < excess.max(1, keepdims=True, initial=0.0)
            excess = np.where(nearer, other, excess)
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
    "_linalg_eigh": Equation("eigenvectors", "A", (1,), (0,), _eigh),
    "linalg_eig": Equation("eigenvectors", "self", (1,), (), _eig),
    "_linalg_svd": Equation("singular vectors", "A", (0, 2), (1,), _svd),
    "linalg_qr": Equation("factors Q and R", "A", (0, 1), (), _qr),
    "geqrf": Equation("factors Q and R", "self", (0, 1), (), _geqrf),
    "linalg_lu": Equation("factors P, L and U", "A", (0, 1, 2), (), _lu),
    "linalg_lu_factor_ex": Equation("factors L and U", "A", (0, 1), (), _packed_lu(0, transposed=False)),
    "_linalg_det": Equation("factors L and U", "A", (1, 2), (), _packed_lu(1, transposed=True)),
    "_linalg_slogdet": Equation("factors L and U", "A", (2, 3), (), _packed_lu(2, transposed=True)),
    "_linalg_solve_ex": Equation("factors L and U", "A", (1, 2), (), _packed_lu(1, transposed=True)),
    "linalg_lstsq": Equation("least-squares solution", "self", (0,), (), _lstsq),
}
