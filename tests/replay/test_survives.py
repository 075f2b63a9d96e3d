"""What a verdict must survive: one test for each way in which a tolerance or a cosine is fooled.

Each runs real operators; the target's result is the reference's own with one fault, or a right one by another way.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import shadowrun
from shadowrun.judge.judge import Judge
from shadowrun.types import Cause, Status

aten = torch.ops.aten
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN, INF = math.nan, math.inf


def normal(*shape, seed=0, scale=1.0, dtype=F32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).to(dtype)


def scaled_softmax(scale, dtype):
    """Rows with one great element: all others come out as small as `scale`."""
    x = normal(24, 40)
    x[:, 7] += max(0.0, -math.log(scale))
    return x.to(dtype), -1, False


OPERATORS = {
    "add": (aten.add.Tensor, lambda s, t: (normal(24, 40, scale=s, dtype=t), normal(24, 40, seed=1, scale=s, dtype=t))),
    "matmul": (aten.mm.default, lambda s, t: (normal(24, 64, scale=s, dtype=t), normal(64, 40, dtype=t))),
    "softmax": (aten._softmax.default, scaled_softmax),
    "sum": (aten.sum.dim_IntList, lambda s, t: (normal(24, 10, 40, scale=s, dtype=t), [1])),
    "layer_norm": (
        aten.native_layer_norm.default,
        lambda s, t: (normal(24, 40, dtype=t), [40], *(normal(40, seed=i, scale=s, dtype=t) for i in range(2)), 1e-5),
    ),
}  # fmt: skip
operators = pytest.mark.parametrize("name", OPERATORS)
dtypes = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)


def first(op, change):
    """The operator with its first result changed."""

    def run(*args, **kwargs):
        out = op(*args, **kwargs)
        if isinstance(out, tuple):
            return change(out[0]), *out[1:]
        return change(out)

    return run


def verdict_on(make_case, name, change, dtype=F32, scale=1.0, *, cause=False):
    op, args = OPERATORS[name]
    return Judge(hypotheses=cause)(make_case(op, first(op, change), *args(scale, dtype)))[0]


def poked(place, change):
    def run(t):
        t = t.clone()
        t.view(-1)[place] = change(t.view(-1)[place])
        return t

    return run


def swapped(t):
    t = t.clone()
    flat = t.view(-1)
    flat[3], flat[5] = flat[5].clone(), flat[3].clone()
    return t


# Magnitudes at which an absolute tolerance sees nothing, or overflows.


@operators
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_a_thousand_times_too_great_at_1e_7(make_case, name, dtype):
    # Where a softmax is 1e-7, a thousand times as much is still below 1e-3.
    places = slice(8, 40) if name == "softmax" else slice(None)
    verdict = verdict_on(make_case, name, poked(places, lambda v: v * 1000), dtype, 1e-7)
    assert verdict.status is Status.MISMATCH


@operators
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_a_thousand_times_too_great_or_small_at_1e30(make_case, name, dtype):
    if name == "softmax":
        pytest.skip("a softmax is at most 1")
    for factor in (1000.0, 1e-3):
        assert verdict_on(make_case, name, lambda t, f=factor: t * f, dtype, 1e30).status is Status.MISMATCH


# What a sum, a norm, a correlation or a cosine over the whole tensor does not see.


@operators
@dtypes
def test_sign_flips(make_case, name, dtype):
    for change in (torch.neg, poked(5, torch.neg)):
        assert verdict_on(make_case, name, change, dtype).status is Status.MISMATCH


@operators
@dtypes
def test_permutations(make_case, name, dtype):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    for change in (lambda t: t.flip(-1), lambda t: t[order], lambda t: t.roll(1, -1)):
        assert verdict_on(make_case, name, change, dtype).status is Status.MISMATCH


@operators
@dtypes
def test_a_swap_of_two_elements(make_case, name, dtype):
    assert verdict_on(make_case, name, swapped, dtype).status is Status.MISMATCH


@operators
@dtypes
def test_twice_the_result_whose_cosine_is_1(make_case, name, dtype):
    verdict = verdict_on(make_case, name, lambda t: t * 2, dtype, cause=True)
    assert (verdict.status, verdict.explanation) == (Status.MISMATCH, "scaled by 2")


@operators
@pytest.mark.parametrize("value", [0.0, 1.5, -3.0])
def test_constant_tensors_which_have_no_correlation(make_case, name, value):
    op, args = OPERATORS[name]
    constant = tuple(torch.full_like(a, value) if isinstance(a, torch.Tensor) else a for a in args(1.0, F32))
    plus = Judge()(make_case(op, first(op, lambda t: t + 0.01), *constant))[0]
    assert plus.status is Status.MISMATCH
    right = make_case(op, first(op, lambda t: t.double().to(F32)), *constant)
    assert Judge()(right)[0].status is Status.MATCH


BIG = {
    "add": (aten.add.Tensor, lambda: (normal(10**7), normal(10**7, seed=1))),
    "matmul": (aten.mm.default, lambda: (normal(3200, 4), normal(4, 3125))),
    "softmax": (aten._softmax.default, lambda: (normal(3200, 3125), -1, False)),
}


@pytest.mark.parametrize("name", BIG)
def test_one_bad_element_in_ten_million(make_case, name):
    op, args = BIG[name]
    case = make_case(op, first(op, poked(7654321, lambda v: v * 1.01)), *args())
    assert case.actual[0].numel() == 10**7
    verdict, diffs = Judge(hypotheses=False)(case)
    assert verdict.status is Status.MISMATCH
    assert diffs[0].n_mismatched == 1


# NaN.


@operators
@dtypes
def test_nan_on_one_side_only(make_case, name, dtype):
    verdict = verdict_on(make_case, name, poked(7, lambda v: v * NAN), dtype, cause=True)
    assert (verdict.status, verdict.cause) == (Status.MISMATCH, Cause.EXCEPTIONAL_VALUES)
    op, args = OPERATORS[name]
    x, *rest = args(1.0, dtype)
    x.view(-1)[3] = NAN
    verdict, _ = Judge()(make_case(op, first(op, torch.nan_to_num), x, *rest))
    assert (verdict.status, verdict.cause) == (Status.MISMATCH, Cause.EXCEPTIONAL_VALUES)
    assert Judge()(make_case(op, first(op, torch.clone), x, *rest))[0].status is Status.MATCH


@operators
@dtypes
def test_nan_on_both_sides_in_different_places(make_case, name, dtype):
    op, args = OPERATORS[name]
    x, *rest = args(1.0, dtype)
    x.view(-1)[3] = NAN
    # Only row 0, or column 3 of the sum, is NaN.
    verdict, diffs = Judge()(make_case(op, first(op, lambda t: t.roll((1, 1), (0, 1))), x, *rest))
    assert verdict.status is Status.MISMATCH
    assert diffs[0].n_nan >= 2


# Forms.


@operators
def test_broadcast_shapes(make_case, name):
    # A comparison that broadcasts takes these for equal.
    for change in (lambda t: t[:1], lambda t: t.unsqueeze(0), lambda t: t[:, :1], lambda t: t.T):
        verdict = verdict_on(make_case, name, lambda t, c=change: c(torch.ones_like(t)))
        assert (verdict.status, verdict.cause, verdict.explanation) == (Status.MISMATCH, Cause.METADATA, "shape")


@pytest.mark.parametrize(
    "wrong", [lambda r: r[:-1], lambda r: [*r, r[0]], lambda r: r[:0]], ids=["less", "more", "none"]
)
def test_list_lengths(make_case, wrong):
    for op, args in (
        (aten.split_copy.Tensor, (normal(12, 4), 3)),
        (aten._foreach_add.List, ([normal(3), normal(4)], [normal(3), normal(4)])),
    ):
        verdict, _ = Judge()(make_case(op, lambda *a, op=op, **k: wrong(op(*a, **k)), *args))
        assert (verdict.cause, verdict.explanation) == (Cause.METADATA, "number of results")
        assert verdict.status is Status.MISMATCH


@operators
@dtypes
def test_dtype_changes(make_case, name, dtype):
    for other in {F64, F32, F16, BF16, torch.int64} - {dtype}:
        verdict = verdict_on(make_case, name, lambda t, d=other: t.to(d), dtype)
        assert (verdict.status, verdict.cause, verdict.explanation) == (Status.MISMATCH, Cause.METADATA, "dtype")


@dtypes
def test_empty_tensors(make_case, dtype):
    a, b = torch.empty(0, 5, dtype=dtype), torch.empty(5, 0, dtype=dtype)
    calls = (
        (aten.add.Tensor, a, a),
        (aten.mm.default, a, torch.ones(5, 3, dtype=dtype)),
        (aten._softmax.default, a, -1, False),
        (aten.sum.dim_IntList, a, [1]),
    )
    for op, *args in calls:
        assert Judge()(make_case(op, first(op, torch.clone), *args))[0].status is Status.MATCH
        one = torch.ones(1, dtype=dtype)
        assert Judge()(make_case(op, first(op, lambda _, one=one: one), *args))[0].cause is Cause.METADATA
    # Sums over nothing have elements, and these must be right.
    for op, args in (
        (aten.mm.default, (torch.empty(3, 0, dtype=dtype), torch.empty(0, 4, dtype=dtype))),
        (aten.sum.dim_IntList, (b, [1])),
    ):
        assert Judge()(make_case(op, first(op, lambda t: t + 1), *args))[0].status is Status.MISMATCH


# Rounding against faults in short dtypes.


SHORT = {
    **OPERATORS,
    "short matmul": (aten.mm.default, lambda _s, t: (normal(24, 16, dtype=t), normal(16, 40, dtype=t))),
}


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_one_ulp_everywhere_is_rounding_unless_it_is_all_one_way(make_case, name, dtype):
    op, args = SHORT[name]
    g = torch.Generator().manual_seed(0)

    def moved(t, step):
        return torch.where(t == 0, t, (t.view(torch.int16) + step.short()).view(dtype))

    up = lambda t: moved(t, torch.ones(t.shape))  # noqa: E731
    either = lambda t: moved(t, torch.randint(0, 2, t.shape, generator=g) * 2 - 1)  # noqa: E731
    verdict, diffs = Judge()(make_case(op, first(op, either), *args(1.0, dtype)))
    assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.ROUNDING), verdict
    assert diffs[0].n_different > 0.9 * diffs[0].n_elements
    verdict, _ = Judge()(make_case(op, first(op, up), *args(1.0, dtype)))
    assert verdict.status is Status.MISMATCH, verdict


@operators
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("by", [0.97, 1.03])
def test_three_percent_on_one_element_is_a_mismatch(make_case, name, dtype, by):
    op, args = OPERATORS[name]
    values = args(1.0, dtype)
    out = op(*values)
    greatest = int((out[0] if isinstance(out, tuple) else out).abs().argmax())
    verdict, diffs = Judge()(make_case(op, first(op, poked(greatest, lambda v: v * by)), *values))
    assert verdict.status is Status.MISMATCH
    assert diffs[0].n_mismatched == 1


# Exact dtypes, complex numbers.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_integers_and_bools_are_exact(make_case, dtype):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 2 if dtype is torch.bool else 50, (24, 40), generator=g).to(dtype) for _ in range(2))
    off = (lambda t: ~t) if dtype is torch.bool else (lambda t: t + 1)
    calls = [(aten.add.Tensor, a, b), (aten.maximum.default, a, b), (aten.cat.default, [a, b])]
    if dtype is not torch.bool:
        calls += [(aten.mm.default, a, b.T.contiguous()), (aten.sum.dim_IntList, a, [1])]
    for op, *args in calls:
        change = off if op(*args).dtype is dtype else (lambda t: t + 1)
        verdict, diffs = Judge()(make_case(op, first(op, poked(9, change)), *args))
        assert verdict.status is Status.MISMATCH
        assert diffs[0].n_mismatched == 1
        # A tolerance of the user is for floating numbers.
        assert Judge(rtol=1.0, atol=9.0)(make_case(op, first(op, poked(9, change)), *args))[0].status is Status.MISMATCH


def complex_normal(*shape, dtype=torch.complex64, seed=0):
    return torch.complex(normal(*shape, seed=seed), normal(*shape, seed=seed + 1)).to(dtype)


COMPLEX = {
    "add": (aten.add.Tensor, complex_normal(24, 40), complex_normal(24, 40, seed=2)),
    "mul": (aten.mul.Tensor, complex_normal(24, 40), complex_normal(24, 40, seed=2)),
    "matmul": (aten.mm.default, complex_normal(24, 64), complex_normal(64, 40)),
    "sum": (aten.sum.dim_IntList, complex_normal(24, 10, 40), [1]),
    "exp": (aten.exp.default, complex_normal(24, 40)),
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers(make_case, name, dtype):
    op, *args = COMPLEX[name]
    args = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]
    for change in (torch.conj_physical, lambda t: t * 1j, lambda t: t * 1.001, lambda t: torch.complex(t.imag, t.real),
                   poked(9, lambda v: v * 1.01), lambda t: torch.complex(t.real, t.imag * NAN)):  # fmt: skip
        assert Judge(hypotheses=False)(make_case(op, first(op, change), *args))[0].status is Status.MISMATCH
    # A rounding of the modulus is one of both components, however small one of these is.
    near = lambda t: t * (1 + torch.finfo(dtype).eps * 1j)  # noqa: E731
    assert Judge()(make_case(op, first(op, near), *args))[0].status is Status.MATCH


# What the definition leaves open: said so, neither passed nor condemned.


def undefined(verdict, reason):
    return (verdict.status, verdict.cause, verdict.explanation) == (Status.UNVERIFIED, Cause.UNDEFINED, reason)


def written_backwards(self, dim, index, src):
    return aten.scatter.src(self, dim, index.flip(dim), src.flip(dim))


def put_backwards(self, indices, values, accumulate=False):
    return aten.index_put.default(self, [i.flip(0) for i in indices], values.flip(0), accumulate)


@dtypes
def test_duplicate_writes_are_undefined(make_case, dtype):
    values = normal(6, dtype=dtype)
    index = torch.tensor([1, 1, 2, 0, 2, 1])
    zeros = torch.zeros(4, dtype=dtype)
    scatter = make_case(aten.scatter.src, written_backwards, zeros, 0, index, values)
    assert undefined(Judge()(scatter)[0], "duplicate indices")
    put = make_case(aten.index_put.default, put_backwards, zeros, [index], values)
    assert undefined(Judge()(put)[0], "duplicate indices")
    # The element that is written once is not open, and sums over duplicates are defined.
    off = make_case(
        aten.index_put.default, first(aten.index_put.default, poked(0, lambda v: v + 1)), zeros, [index], values
    )
    assert Judge()(off)[0].status is Status.MISMATCH
    lost = make_case(aten.index_put.default, lambda s, i, v, _a: put_backwards(s, i, v), zeros, [index], values, True)
    assert Judge()(lost)[0].status is Status.MISMATCH


def sorted_backwards(x, dim=-1, descending=False):
    values, index = torch.sort(x.flip(dim), dim=dim, descending=descending, stable=True)
    return values, x.shape[dim] - 1 - index


def top_backwards(x, k, dim=-1, *_):
    values, index = sorted_backwards(x, dim, True)
    return values.narrow(dim, 0, k).contiguous(), index.narrow(dim, 0, k).contiguous()


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_ties_are_undefined(make_case, dtype, dim):
    x = torch.randint(0, 3, (6, 5, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    last = lambda t, d: t.shape[d] - 1 - aten.argmax(t.flip(d), d)  # noqa: E731
    for op, target, *args in (
        (aten.argmax.default, last, dim),
        (aten.sort.default, sorted_backwards, dim, False),
        (aten.topk.default, top_backwards, 3, dim),
    ):
        assert undefined(Judge()(make_case(op, target, x, *args))[0], "tie"), op
        # Indices that lead to other values are wrong, ties or not.
        index = (lambda t: (t + 1) % 5) if op is aten.argmax.default else None
        wrong = first(op, index) if index else lambda *a, op=op: (op(*a)[0], (op(*a)[1] + 1) % x.shape[dim])
        assert Judge()(make_case(op, wrong, x, *args))[0].status is Status.MISMATCH
    promised = lambda t, stable, dim, descending: sorted_backwards(t, dim, descending)  # noqa: E731
    stable = make_case(aten.sort.stable, promised, x, stable=True, dim=dim, descending=False)
    assert Judge()(stable)[0].status is Status.MISMATCH


@pytest.mark.parametrize("source", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("target", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_nan_and_what_does_not_fit_to_integers_is_undefined(make_case, source, target):
    x = torch.tensor([NAN, INF, -INF, 3.0], dtype=source)

    def other(t, dtype):
        out = t.nan_to_num(0.0, 0.0, 0.0).to(dtype)
        return torch.where(t.isfinite(), out, torch.full_like(out, 77))

    assert undefined(Judge()(make_case(aten._to_copy.default, other, x, dtype=target))[0], "conversion out of range")
    off = make_case(aten._to_copy.default, first(aten._to_copy.default, poked(3, lambda v: v + 1)), x, dtype=target)
    assert Judge()(off)[0].status is Status.MISMATCH


@dtypes
def test_nothing_here_hangs_on_the_cause(make_case, dtype):
    """The verdict is the same without the search for causes, which may only name what is wrong."""
    for name, (op, args) in OPERATORS.items():
        case = make_case(op, first(op, poked(5, torch.neg)), *args(1.0, dtype))
        assert Judge(hypotheses=False)(case)[0].status is Status.MISMATCH, name
        same = replace(case, actual=case.expected)
        assert Judge()(same)[0].status is Status.MATCH


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kept", [slice(None, -1), slice(0, 0)])
def test_a_device_that_gives_fewer_results_is_wrong(clean_sim, give_sim, behind, kept):
    """Also where all that it gives are right."""
    give_sim("unbind_copy.int", lambda x, dim=0: [t.clone() for t in x.unbind(dim)][kept])
    with clean_sim.asynchronous() if behind else nullcontext(), shadowrun.compare("sim") as run:
        aten.unbind_copy(torch.rand(3, 2).to("sim"))
    verdict = next(run.records(op="*unbind*")).verdict
    assert (verdict.status, verdict.explanation) == (Status.MISMATCH, "number of results")
