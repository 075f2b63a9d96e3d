"""Results that are unique only up to sign, phase, basis or order: right ones are valid, wrong ones are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.operators.case import exact_copy
from shadowrun.types import Cause, Status

aten = torch.ops.aten
F32, F64, C64 = torch.float32, torch.float64, torch.complex64


def normal(*shape, dtype=F32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def hermitian(*shape, dtype=F32, seed=0):
    a = normal(*shape, dtype=dtype, seed=seed)
    return a + a.mH


def repeated(n, dtype=F32):
    """A matrix with three eigenvalues, each repeated, and its float32 rounding."""
    q = torch.linalg.qr(normal(n, n, dtype=F64 if dtype is F32 else torch.complex128))[0]
    values = (torch.arange(n) % 3 + 1).to(q.dtype)
    a = (q * values) @ q.mH
    return ((a + a.mH) / 2).to(dtype)


def basis(n, dtype, seed=5):
    return torch.linalg.qr(normal(n, n, dtype=dtype, seed=seed))[0]


def judged(make_case, op, target, *args, **kwargs):
    return Judge()(make_case(op, target, *args, **kwargs))[0]


def changed(op, *changes):
    """The operator with some of its results changed: pairs of position and function."""

    def run(*args, **kwargs):
        out = list(op(*args, **kwargs))
        for position, change in changes:
            # The same memory layout: a mere stride would be a finding of its own.
            out[position] = exact_copy(out[position]).copy_(change(out[position].clone()))
        return tuple(out)

    return run


def signs(v):
    return v * torch.where(torch.arange(v.shape[-1]) % 2 == 0, -1.0, 1.0).to(v.dtype)


def phases(v):
    return v * torch.polar(torch.ones(v.shape[-1]), torch.arange(v.shape[-1]) + 0.5).to(v.dtype)


def one_element(v):
    v = v.clone()
    v[(0,) * (v.dim() - 2) + (1, 2)] += 1e-3
    return v


def swapped(v):
    order = torch.arange(v.shape[-1])
    order[[0, 2]] = order[[2, 0]]
    return v[..., order]


WRONG = {
    "one element": one_element,
    "two columns swapped": swapped,
    "not normalised": lambda v: v * 1.001,
    "one column doubled": lambda v: v * torch.tensor([2.0] + [1.0] * (v.shape[-1] - 1)).to(v.dtype),
    "two equal columns": lambda v: torch.cat([v[..., 1:2], v[..., 1:]], -1),
    "sheared": lambda v: v + 1e-3 * v.roll(1, -1),
    "zeros": torch.zeros_like,
    "one NaN": lambda v: torch.where(torch.arange(v.numel()).reshape(v.shape) == 3, float("nan"), v),
}
MATRICES = {
    "f32": hermitian(12, 12),
    "f64": hermitian(7, 7, dtype=F64),
    "c64": hermitian(9, 9, dtype=C64),
    "batched": hermitian(3, 2, 6, 6),
    "repeated": repeated(9),
    "repeated c64": repeated(9, C64),
    "tiny": hermitian(5, 5) * 1e-30,
    "graded": hermitian(8, 8) * torch.logspace(0, -6, 8) * torch.logspace(0, -6, 8)[:, None],
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_eigenvectors_of_other_sign_or_phase_are_valid(make_case, matrix):
    a = MATRICES[matrix]
    for change in (signs, phases) if a.is_complex() else (signs,):
        verdict = judged(make_case, aten._linalg_eigh.default, changed(aten._linalg_eigh.default, (1, change)), a)
        assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.UNDEFINED), verdict
        assert verdict.explanation == "not unique: other eigenvectors, as valid"


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("matrix", MATRICES)
def test_wrong_eigenvectors_are_mismatches(make_case, matrix, wrong):
    # Column 0 and 2 of the repeated matrices have the same eigenvalue: those two may be swapped.
    change = WRONG[wrong]
    if wrong == "two columns swapped" and matrix.startswith("repeated"):
        change = lambda v: v.flip(-1)  # noqa: E731
    target = changed(aten._linalg_eigh.default, (1, lambda v: change(signs(v))))
    verdict = judged(make_case, aten._linalg_eigh.default, target, MATRICES[matrix])
    assert verdict.status is Status.MISMATCH, verdict
    assert verdict.cause is not Cause.REFERENCE


@pytest.mark.parametrize("dtype", [F32, C64], ids=str)
def test_any_basis_of_a_repeated_eigenvalue_is_valid(make_case, dtype):
    a = repeated(9, dtype)

    def rotated(v):
        return torch.cat([v[:, 3 * i : 3 * i + 3] @ basis(3, dtype) for i in range(3)], 1)

    op = aten._linalg_eigh.default
    verdict = judged(make_case, op, changed(op, (1, rotated)), a)
    assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.UNDEFINED)
    mixed = changed(op, (1, lambda v: v @ basis(9, dtype)))
    assert judged(make_case, op, mixed, a).status is Status.MISMATCH
    both = torch.eye(6, dtype=dtype)
    assert judged(make_case, op, changed(op, (1, lambda _: basis(6, dtype))), both).status is Status.MATCH


def in_float64(op):
    def run(*args, **kwargs):
        wide = [a.to(torch.complex128 if a.is_complex() else F64) if isinstance(a, torch.Tensor) else a for a in args]
        return tuple(exact_copy(t).copy_(w) for t, w in zip(op(*args, **kwargs), op(*wide, **kwargs), strict=True))

    return run


def square(*shape, dtype=F32):
    return normal(*shape, dtype=dtype, seed=3)


OPERATORS = {
    "eigh": (aten._linalg_eigh.default, hermitian(20, 20)),
    "eigh upper": (aten._linalg_eigh.default, hermitian(20, 20), "U"),
    "eigh, one triangle": (aten._linalg_eigh.default, square(10, 10)),
    "eig": (aten.linalg_eig.default, square(10, 10)),
    "eig c64": (aten.linalg_eig.default, square(10, 10, dtype=C64)),
    "svd": (aten._linalg_svd.default, square(8, 5)),
    "svd full, c64": (aten._linalg_svd.default, square(5, 8, dtype=C64), True),
    "svd batched": (aten._linalg_svd.default, square(4, 8, 5)),
    "qr": (aten.linalg_qr.default, square(8, 5)),
    "qr complete": (aten.linalg_qr.default, square(3, 8, 5), "complete"),
    "qr wide": (aten.linalg_qr.default, square(5, 8)),
    "qr r": (aten.linalg_qr.default, square(8, 5), "r"),
    "geqrf": (aten.geqrf.default, square(8, 5)),
    "geqrf wide": (aten.geqrf.default, square(2, 5, 8)),
    "lu": (aten.linalg_lu.default, square(8, 5)),
    "lu factor": (aten.linalg_lu_factor_ex.default, square(2, 5, 8)),
    "det": (aten._linalg_det.default, square(3, 6, 6)),
    "slogdet": (aten._linalg_slogdet.default, square(6, 6, dtype=C64)),
    "solve": (aten._linalg_solve_ex.default, square(6, 6), square(6, 3)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_better_algorithm_is_right(make_case, name):
    op, *args = OPERATORS[name]
    verdict = judged(make_case, op, in_float64(op), *args)
    assert verdict.status is Status.MATCH, verdict


@pytest.mark.parametrize("name", OPERATORS)
def test_one_wrong_element_of_any_factor_is_seen(make_case, name):
    op, *args = OPERATORS[name]
    for position, result in enumerate(op(*args)):
        if result.dim() < 2 or not result.numel() or not result.is_floating_point():
            continue
        verdict = judged(make_case, op, changed(op, (position, one_element)), *args)
        assert verdict.status is Status.MISMATCH, (position, verdict)


def test_signs_of_singular_vectors_go_together(make_case):
    op, a = aten._linalg_svd.default, square(8, 5)
    both = changed(op, (0, signs), (2, lambda v: signs(v.mT).mT))
    verdict = judged(make_case, op, both, a)
    assert (verdict.cause, verdict.explanation) == (Cause.UNDEFINED, "not unique: other singular vectors, as valid")
    for one in (changed(op, (0, signs)), changed(op, (2, lambda v: signs(v.mT).mT))):
        assert judged(make_case, op, one, a).status is Status.MISMATCH
    # The vectors of a singular value of zero are free, and those beyond the rank.
    low = normal(8, 2) @ normal(2, 5)
    free = changed(op, (0, lambda u: torch.cat([u[:, :5], u[:, 5:] @ basis(3, F32)], 1)))
    assert judged(make_case, op, free, low, True).cause is Cause.UNDEFINED


def test_signs_of_qr_go_together(make_case):
    op, a = aten.linalg_qr.default, square(8, 5)
    both = changed(op, (0, signs), (1, lambda r: signs(r.mT).mT))
    assert judged(make_case, op, both, a).cause is Cause.UNDEFINED
    assert judged(make_case, op, changed(op, (0, signs)), a).status is Status.MISMATCH
    full = changed(op, (1, lambda r: r + 1e-3))
    assert judged(make_case, op, full, a).status is Status.MISMATCH


def test_other_pivots_are_valid(make_case):
    a = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 5.0, 1.0], [1.0, 1.0, 7.0]])
    other = torch.tensor([2, 0, 1])

    def from_below(m, pivot=True):
        p, lower, upper = torch.linalg.lu(m[other])
        return torch.eye(3)[other].mT @ p, lower, upper

    verdict = judged(make_case, aten.linalg_lu.default, from_below, a)
    assert (verdict.status, verdict.explanation) == (Status.MATCH, "not unique: other factors P, L and U, as valid")
    packed = aten.linalg_lu_factor_ex.default
    moved = changed(packed, (1, lambda p: torch.arange(1, 5)))
    assert judged(make_case, packed, moved, square(4, 4)).status is Status.MISMATCH
    beyond = changed(packed, (1, lambda p: p + 7))
    assert judged(make_case, packed, beyond, square(4, 4)).status is Status.MISMATCH


def test_eigenvalues_of_a_general_matrix_have_no_order(make_case):
    op, a = aten.linalg_eig.default, square(8, 8)
    backwards = changed(op, (0, lambda v: v.flip(-1)), (1, lambda v: v.flip(-1)))
    verdict = judged(make_case, op, backwards, a)
    assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.UNDEFINED), verdict
    assert judged(make_case, op, changed(op, (1, phases)), a).cause is Cause.UNDEFINED
    assert judged(make_case, op, changed(op, (0, lambda v: v.flip(-1))), a).status is Status.MISMATCH
    values = aten.linalg_eigvals.default
    assert judged(make_case, values, lambda m: values(m).flip(-1), a).cause is Cause.UNDEFINED
    for wrong in (lambda v: v * 1.001, lambda v: torch.cat([v[:1], v[:-1]])):
        assert judged(make_case, values, lambda m, w=wrong: w(values(m)), a).status is Status.MISMATCH


def test_one_vector_for_all_of_a_repeated_eigenvalue_is_wrong(make_case):
    op = aten.linalg_eig.default
    same = changed(op, (1, lambda v: v[:, :1].expand(4, 4).clone()))
    assert judged(make_case, op, same, torch.eye(4) * 3).status is Status.MISMATCH
    turned = changed(op, (1, lambda v: v @ basis(4, C64)))
    assert judged(make_case, op, turned, torch.eye(4) * 3).cause is Cause.UNDEFINED
    defective = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert judged(make_case, op, in_float64(op), defective).status is Status.MATCH


def test_least_squares_in_the_null_space(make_case):
    op = aten.linalg_lstsq.default
    a = normal(9, 2) @ normal(2, 5)
    null = torch.linalg.svd(a)[2][2:].T
    b = normal(9, 3)
    moved = changed(op, (0, lambda x: x + null @ normal(3, 3)))
    verdict = judged(make_case, op, moved, a, b)
    assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.UNDEFINED), verdict
    off = changed(op, (0, lambda x: x + 1e-3))
    assert judged(make_case, op, off, a, b).status is Status.MISMATCH
    assert judged(make_case, op, moved, normal(9, 5), b).status is Status.MISMATCH
    assert judged(make_case, op, in_float64(op), normal(9, 5), b).status is Status.MATCH


def test_small_eigenvalues_are_right_to_the_rounding_of_the_matrix(make_case):
    op, a = aten._linalg_eigh.default, hermitian(8, 8) + torch.diag(torch.tensor([1e4] + [0.0] * 7))
    size = float(torch.linalg.matrix_norm(a))
    for by, status in ((4 * size * 2.0**-24, Status.MATCH), (400 * size * 2.0**-24, Status.MISMATCH)):
        assert judged(make_case, op, changed(op, (0, lambda v, by=by: v + by)), a, "L", False).status is status


def test_a_wrong_reference_is_named(make_case):
    op = aten._linalg_eigh.default
    case = make_case(op, changed(op, (1, signs)), hermitian(6, 6))
    off = replace(case, expected=(case.expected[0], one_element(case.expected[1])))
    assert Judge()(off)[0].cause is Cause.REFERENCE


def test_what_cannot_be_verified_says_so(make_case):
    op = aten._linalg_eigh.default
    case = make_case(op, changed(op, (1, signs)), hermitian(6, 6))
    verdict = Judge(max_bytes=100)(case)[0]
    assert verdict.status is Status.UNVERIFIED
    assert verdict.explanation.startswith("no float64 oracle")


def test_tolerances_of_the_user_do_not_make_signs_wrong(make_case):
    op = aten._linalg_eigh.default
    case = make_case(op, changed(op, (1, signs)), hermitian(6, 6))
    assert Judge(rtol=1e-3)(case)[0].cause is Cause.UNDEFINED
    near = make_case(op, changed(op, (1, one_element)), hermitian(6, 6))
    assert Judge(atol=1e-2)(near)[0].status is Status.MATCH
    assert Judge(atol=1e-4)(near)[0].status is Status.MISMATCH
