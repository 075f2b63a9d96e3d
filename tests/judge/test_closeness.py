"""What passes without the oracle is rounding; what is none goes on to the oracle."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shadowrun import Status
from shadowrun.judge import judgement
from shadowrun.judge.judge import Judge
from shadowrun.judge.oracle import MANY_RUNS, Oracle
from shadowrun.judge.rounding import closeness
from shadowrun.judge.rounding.closeness import (
    FEW_ULP,
    MAX_TERMS,
    ClosenessCheck,
    are_close,
)
from shadowrun.numerics.device_statistics import PendingStatistics
from shadowrun.numerics.diff import diff
from shadowrun.numerics.input_roundings import to_tf32
from tests.case_kit import make_case

aten = torch.ops.aten
MANY_BYTES = 1 << 30


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def screened(case, position=0, max_bytes=MANY_BYTES):
    d = diff("", case.actual[position], case.expected[position])
    return ClosenessCheck(case, max_bytes).verdict(position, d)


def term_by_term(a, b):
    out = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        out += a[:, k : k + 1] * b[k]
    return out


def in_blocks(x, w):
    """A convolution whose channels are added up in two halves, by float32."""
    half = x.shape[1] // 2
    return aten.convolution(
        x[:, :half].contiguous(), w[:, :half].contiguous(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    ) + aten.convolution(
        x[:, half:].contiguous(), w[:, half:].contiguous(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )


def test_a_product_in_another_order(make_case):
    case = make_case(aten.mm.default, term_by_term, normal(24, 512), normal(512, 24, seed=1))
    assert diff("", case.actual[0], case.expected[0]).max_ulp > 8
    assert screened(case).status is Status.MATCH
    assert screened(case, max_bytes=1000) is None


def test_a_convolution_and_its_gradients_in_another_order(make_case):
    x, w = normal(2, 32, 9, 9), normal(8, 32, 3, 3, seed=1)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert screened(make_case(aten.convolution.default, lambda x, w, *_: in_blocks(x, w), x, w, None, *how)) is not None

    def backward(grad, x, w, *rest):
        wide = aten.convolution_backward(grad.double(), x.double(), w.double(), *rest)
        return tuple(t.float() for t in wide)

    case = make_case(
        aten.convolution_backward.default, backward, normal(2, 8, 9, 9, seed=2), x, w, [8], *how, [True] * 3
    )
    for position in range(3):
        assert screened(case, position) is not None


@settings(deadline=None, max_examples=40)
@example(units=25.0, seed=3, n=8)
@given(units=st.floats(0, 200), seed=st.integers(0, 99), n=st.sampled_from([8, 64, 1024]))
def test_one_element_off_by_units_of_rounding(units, seed, n):
    """A fault is 80 units off and more: none passes, and what is far below does; the reference's own is 2, 6 and 36."""
    from tests.case_kit import make_case

    a, b = normal(4, n, seed=seed), normal(n, 4, seed=seed + 100)
    exact = a.double() @ b.double()
    size = ((a.double().square() @ b.double().square()).sqrt() + exact.abs())[1, 2]

    def target(a, b):
        wide = a.double() @ b.double()
        wide[1, 2] += units * 2.0**-24 * size
        return wide.float()

    case = make_case(aten.mm.default, target, a, b)
    verdict = screened(case)
    if units > {8: 22, 64: 28, 1024: 60}[n]:
        assert verdict is None
    if units < 4 and n <= 64:
        assert verdict is not None


@pytest.mark.parametrize("n", [64, 1024, 16384, MAX_TERMS])
def test_tf32_does_not_pass(make_case, n):
    """Positive terms hide it best: it falls with the root of their number."""
    a, b = normal(8, n).abs(), normal(n, 8, seed=1).abs()

    def rounded(a, b):
        return (to_tf32(a.double()) @ to_tf32(b.double())).float()

    case = make_case(aten.mm.default, rounded, a, b)
    assert screened(replace(case, expected=((a.double() @ b.double()).float(),))) is None
    if n <= 1024:  # in longer sums of positive terms, float32 itself is as far off at times
        exact = make_case(aten.mm.default, lambda a, b: (a.double() @ b.double()).float(), a, b)
        assert screened(exact) is not None


def test_sums_that_are_too_long_are_left_to_the_oracle(make_case):
    x = normal(1, 2 * MAX_TERMS)
    case = make_case(aten.sum.dim_IntList, lambda x, d: x.double().sum(d).float() * (1 + 2e-6), x, [1])
    assert screened(case) is None


@pytest.mark.parametrize("op", [aten.addcmul.default, aten.addcdiv.default])
def test_chains_of_arithmetic(make_case, op):
    args = [normal(64, seed=k) for k in range(3)]
    args[2] = args[2] + 3 * args[2].sign()
    wide = make_case(op, lambda *a, value: op(*(t.double() for t in a), value=value).float(), *args, value=-0.1)
    assert screened(wide) is not None
    wrong = make_case(op, lambda *a, value: op(*a, value=value * 1.0001), *args, value=-0.1)
    assert screened(wrong) is None
    assert Judge()(wrong)[0].status is Status.MISMATCH


def cancelling(left, right, dims, dtype=torch.bfloat16, left_over=0.03):
    """Two factors in whose product all terms but one small one cancel."""
    x, y = normal(*left, dtype=dtype), normal(*right, seed=1, dtype=dtype)
    rest = (t.narrow(dim, 0, 1) * left_over for t, dim in zip((x, y), dims, strict=True))
    return torch.cat([x, x, next(rest)], dims[0]), torch.cat([y, -y, next(rest)], dims[1])


COLUMNS = cancelling((250, 80), (90, 250), (0, 1))
SIXTEEN_BITS = {
    "mm": (aten.mm.default, cancelling((80, 250), (250, 90), (1, 0)), {}),
    "mm of columns": (aten.mm.default, tuple(t.t() for t in COLUMNS), {}),
    "mm of fp16": (aten.mm.default, cancelling((80, 250), (250, 90), (1, 0), torch.float16, 0.2), {}),
    "addmm": (
        aten.addmm.default,
        (normal(90, seed=2, dtype=torch.bfloat16) * 1e-5, *cancelling((80, 250), (250, 90), (1, 0))),
        {"beta": 2.0, "alpha": 1e-3},
    ),
    "bmm": (aten.bmm.default, cancelling((6, 40, 150), (6, 150, 30), (2, 1)), {}),
    "convolution": (
        aten.convolution.default,
        (*cancelling((4, 32, 9, 9), (16, 32, 3, 3), (1, 1)), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
    ),
}


def in_wide(op, dtype, change=lambda t: t):
    def target(*args, **kwargs):
        wide = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]
        return change(op(*wide, **kwargs).to(args[1].dtype))

    return target


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_sums_in_16_bits_that_cancel(make_case, monkeypatch, name):
    op, args, kwargs = SIXTEEN_BITS[name]
    # Inputs off by four unit roundoffs of float32 do what another order of its sums does.
    noisy = [a.double() * (1 + 2.0**-22 * normal(*a.shape, seed=9)) if isinstance(a, torch.Tensor) else a for a in args]
    out = op(*noisy, **kwargs).to(args[1].dtype)
    case = make_case(op, lambda *_, **__: out.clone(), *args, **kwargs)
    d = diff("", case.actual[0], case.expected[0])
    assert d.max_ulp > 1
    monkeypatch.setattr(Oracle, "__init__", lambda *_: pytest.fail("the oracle was asked"))
    assert "units of rounding of the float32 sum" in Judge()(case)[0].evidence


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_an_element_of_16_bits_that_is_two_units_off_does_not_pass(make_case, name):
    op, args, kwargs = SIXTEEN_BITS[name]

    def two_up(t):
        flat = t.view(-1)
        k = int(flat.abs().argmax())
        flat[k : k + 1].view(torch.int16).add_(2)
        return t

    case = make_case(op, in_wide(op, torch.float32, two_up), *args, **kwargs)
    assert diff("", case.actual[0], case.expected[0]).max_ulp >= 2
    assert screened(case) is None


def test_partial_sums_in_16_bits_do_not_pass(make_case):
    op, (a, b), _ = SIXTEEN_BITS["mm"]

    def in_two_blocks(a, b):
        return aten.mm(a[:, :250], b[:250]) + aten.mm(a[:, 250:], b[250:])

    case = make_case(op, in_two_blocks, a, b)
    few = diff("", case.actual[0], case.expected[0])
    assert few.max_ulp > 1
    assert screened(case) is None


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor])
def test_sums_with_a_factor_that_cancel(make_case, op):
    x = normal(400)
    near = x / 0.3 * (1 + 0.3 * normal(400, seed=1))
    args = (x, -near) if op is aten.add.Tensor else (x, near) if op is aten.sub.Tensor else (near, x)
    wide = make_case(op, lambda *a, alpha: op(*(t.double() for t in a), alpha=alpha).float(), *args, alpha=0.3)
    assert diff("", wide.actual[0], wide.expected[0]).max_ulp > 4
    assert "units of rounding" in screened(wide).evidence
    wrong = make_case(op, lambda *a, alpha: op(*a, alpha=alpha * 1.00001), *args, alpha=0.3)
    assert screened(wrong) is None
    assert Judge()(wrong)[0].status is Status.MISMATCH


def items(scale, seed):
    return [normal(40, 30, seed=seed) * scale, normal(70, seed=seed + 1) * scale]


STEPS = [torch.tensor(7.0), torch.tensor(7.0)]
ADAM = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
SGD = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
OPTIMIZERS = {
    "adamw": (
        aten._fused_adamw_.default,
        (
            items(1.0, seed=0),
            items(0.1, seed=2),
            items(0.05, seed=4),
            [t.abs() for t in items(1e-3, seed=6)],
            [],
            STEPS,
        ),
        ADAM,
    ),
    "adam": (
        aten._fused_adam_.default,
        (
            items(0.0, seed=0),
            items(0.1, seed=2),
            items(0.05, seed=4),
            [t.abs() for t in items(1e-3, seed=6)],
            [],
            STEPS,
        ),
        {**ADAM, "weight_decay": 0.0, "maximize": False},
    ),
    "sgd": (
        aten._fused_sgd_.default,
        (items(1.0, seed=0), items(0.1, seed=2), items(1.0, seed=4)),
        {**SGD, "is_first_step": False},
    ),
    "adagrad": (
        aten._fused_adagrad_.default,
        (items(0.01, seed=0), items(0.1, seed=2), [t.abs() for t in items(0.1, seed=4)], STEPS),
        {"lr": 0.01, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10, "maximize": False},
    ),
}


def in_float64(op, **other):
    """The optimizer in float64, rounded once; with other numbers it is a wrong one."""

    def target(*lists, **numbers):
        wide = [[t.double() if t.dim() else t for t in given] for given in lists]
        op(*wide, **{**numbers, **other})
        for mine, theirs in zip(lists, wide, strict=True):
            for t, w in zip(mine, theirs, strict=True):
                t.copy_(w)

    return target


def optimizer_verdicts(case):
    check = ClosenessCheck(case, MANY_BYTES)
    diffs = [diff("", a, e) for a, e in zip(case.actual, case.expected, strict=True)]
    assert max(d.max_ulp for d in diffs) > 4
    return [check.verdict(k, d) for k, d in enumerate(diffs) if d.n_different]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizers_are_chains_of_arithmetic(make_case, name):
    op, args, numbers = OPTIMIZERS[name]
    case = make_case(op, in_float64(op), *args, **numbers)
    found = optimizer_verdicts(case)
    assert None not in found
    assert any("units of rounding" in verdict.evidence for verdict in found)
    assert Judge()(case)[0].status is Status.MATCH


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("adamw", {"lr": 1.001e-3}),
        ("adamw", {"beta2": 0.9991}),
        ("adamw", {"weight_decay": 0.0}),
        ("adam", {"beta1": 0.9001}),
        ("adam", {"lr": 1.001e-3}),
        ("sgd", {"nesterov": True}),
        ("sgd", {"lr": 0.10001}),
        ("adagrad", {"lr": 0.01001}),
    ],
)
def test_a_wrong_number_of_an_optimizer_does_not_pass(make_case, name, wrong):
    op, args, numbers = OPTIMIZERS[name]
    case = make_case(op, in_float64(op, **wrong), *args, **numbers)
    assert None in optimizer_verdicts(case)
    assert Judge()(case)[0].status is Status.MISMATCH


X, Y, Z = normal(40, 64), normal(40, 64, seed=1), normal(64, seed=2)
AT_ELEMENTS = [
    pytest.param(op, args, options, id=f"{op.name()} {options}")
    for op, args, options in (
        (aten.lerp.Scalar, (X, Y, 0.1), {}),
        (aten.lerp_.Scalar, (X, Y, 0.1), {}),
        (aten.lerp.Tensor, (X, Y, torch.tensor(0.3)), {}),
        (aten.addcmul.default, (X, Y, Z), {"value": -0.7}),
        (aten.addcdiv_.default, (X, Y, Z), {"value": -0.7}),
        (aten.add.Tensor, (X, Z), {"alpha": -2.5}),
        (aten.sub.Tensor, (Z, X), {"alpha": 0.5}),
        (aten.rsub.Tensor, (X, Y), {"alpha": 3.0}),
        (aten.mm.default, (X, normal(64, 30, seed=3)), {}),
        (aten.addmm.default, (normal(30), X, normal(64, 30, seed=3)), {"beta": -2.0, "alpha": 0.5}),
        (aten._softmax.default, (X, 1, False), {}),
    )
]


@pytest.mark.parametrize("units", [0.45, 0.9, 1.1, 3.0])
@pytest.mark.parametrize(("op", "args", "options"), AT_ELEMENTS)
def test_few_elements_are_judged_as_all_of_them_are(make_case, monkeypatch, op, args, options, units):
    """Some elements are off by a share of the bound that the sizes of all elements give."""
    monkeypatch.setattr(closeness, "_MANY", 0)
    case = make_case(op, op, *args, **options)
    whole = ClosenessCheck(case, MANY_BYTES)
    e = case.expected[0]
    size = whole._sizes[0].sqrt() if case.facts.n_factors else whole._sizes[0].abs()
    bound = (e.abs() + size) * (whole._units(0) * 2.0**-24)
    where = torch.randperm(e.numel(), generator=torch.Generator().manual_seed(5))[: e.numel() // 20]
    off = e.flatten().clone()
    signs = torch.where(torch.arange(len(where)) % 2 == 0, 1.0, -1.0)
    off[where] += units * signs * bound.flatten()[where]
    case = replace(case, actual=(off.view_as(e),))
    found = screened(case)
    assert (found is not None) == (units < 1)
    monkeypatch.setattr(closeness, "_FEW", 1 << 40)
    assert screened(case) == found


@pytest.mark.parametrize(("op", "args", "options"), AT_ELEMENTS[-3:])
def test_sizes_are_computed_where_an_element_needs_one_only(make_case, monkeypatch, op, args, options):
    case = make_case(op, op, *args, **options)
    e = case.expected[0]
    nearby = e + 7 * 2.0**-24 * e * torch.where(torch.arange(e.shape[1]) % 2 == 0, 1.0, -1.0)
    case = replace(case, actual=(nearby,))
    monkeypatch.setattr(closeness, "evaluate", lambda *_: pytest.fail("no element needs it"))
    monkeypatch.setattr(closeness, "row_sizes", lambda *_: pytest.fail("no element needs it"))
    d = diff("", nearby, e)
    assert d.max_ulp > FEW_ULP
    assert screened(case).status is Status.MATCH


def test_overflow_of_the_squares_is_no_pass(make_case):
    a, b = normal(4, 4) * 1e25, normal(4, 4, seed=1)
    case = make_case(aten.mm.default, lambda a, b: (a @ b) * 1.01, a, b)
    assert screened(case) is None
    assert Judge()(case)[0].status is Status.MISMATCH


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_other_classes_of_values_go_on(make_case, bad):
    def target(a, b):
        out = a @ b
        out[0, 0] = bad
        return out

    case = make_case(aten.mm.default, target, normal(4, 4), normal(4, 4, seed=1))
    assert screened(case) is None
    assert Judge()(case)[0].status is Status.MISMATCH


def test_one_rounding_more_of_a_16_bit_result(make_case):
    x = normal(8, 64, dtype=torch.bfloat16)

    def next_to_it(x, *rest):
        out = aten.native_layer_norm(x, *rest)
        first = out[0].clone()
        first.view(torch.int16).view(-1)[::16] += 1  # more than one in ten has to be looked at as a whole
        return (first, *out[1:])

    assert screened(make_case(aten.native_layer_norm.default, next_to_it, x, [64], None, None, 1e-5)) is not None

    def two_off(x, *rest):
        out = aten.native_layer_norm(x, *rest)
        first = out[0].clone()
        first.view(torch.int16)[::3] += 2
        return (first, *out[1:])

    assert screened(make_case(aten.native_layer_norm.default, two_off, x, [64], None, None, 1e-5)) is None


def test_exact_operators_and_the_user_s_tolerances_come_first(make_case, monkeypatch):
    monkeypatch.setattr(judgement.ClosenessCheck, "verdict", lambda *_: pytest.fail("it was asked"))
    x = normal(16)
    copied = make_case(aten.clone.default, lambda x: x.nextafter(torch.tensor(9.0)), x)
    assert Judge()(copied)[0].status is Status.MISMATCH
    a, b = normal(24, 512), normal(512, 24, seed=1)
    product = make_case(aten.mm.default, term_by_term, a, b)
    assert Judge(rtol=0.0, atol=1e-9)(product)[0].status is Status.MISMATCH


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mm.default, (normal(16, 300), normal(300, 16, seed=1))),
        (aten.sum.dim_IntList, (normal(64, 300), [1])),
        (aten.addmm.default, (normal(16), normal(16, 300, seed=2), normal(300, 16, seed=1))),
        (
            aten.convolution.default,
            (normal(2, 8, 9, 9), normal(4, 8, 3, 3, seed=1), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        ),
        (aten.mm.default, (normal(16, 300, dtype=torch.bfloat16), normal(300, 16, seed=1, dtype=torch.bfloat16))),
    ],
    ids=lambda v: str(v) if not isinstance(v, tuple) else str(v[0].dtype),
)
def test_spreads_are_those_that_perturbing_gives(make_case, monkeypatch, op, args):
    case = make_case(op, op, *args)
    known = Oracle(case, MANY_BYTES)
    known.perturb(4)
    assert known.n_perturbed_runs == MANY_RUNS
    monkeypatch.setattr(Oracle, "_estimate_spread", lambda _: False)
    perturbed = Oracle(case, MANY_BYTES)
    perturbed.perturb(MANY_RUNS)
    ratio = known.truths[0].spread / perturbed.truths[0].spread
    assert 0.9 < np.median(ratio) < 1.2
    assert ratio.min() > 0.4


def test_a_factor_other_than_one_is_perturbed(make_case):
    case = make_case(aten.addmm.default, aten.addmm, normal(4), normal(4, 8), normal(8, 4, seed=1), beta=0.5)
    oracle = Oracle(case, MANY_BYTES)
    oracle.perturb(4)
    assert oracle.n_perturbed_runs == 4
    assert oracle.truths[0].spread.max() > 0


FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def stays_on_the_device(case):
    pending = PendingStatistics()
    pending.add(case.actual[0], case.expected[0])
    return are_close(case, dict(enumerate(pending.fetch())), MANY_BYTES)


@settings(max_examples=300, deadline=None)
@given(st.data(), FLOATS, st.sampled_from([5, 200]))
def test_what_stays_on_the_device_is_close(data, dtype, n):
    """No result passes there that this check would leave to the oracle, whatever its bits."""
    width = torch.iinfo(BITS[dtype])
    start = data.draw(st.sampled_from([0, 1, width.max // 2, torch.finfo(dtype).tiny, 1.0, math.inf, math.nan, -0.0]))
    base = torch.full((n,), start, dtype=dtype) if isinstance(start, float) else torch.full((n,), start).to(dtype)
    base = base.clone()
    base.view(BITS[dtype])[: data.draw(st.integers(0, n))] += data.draw(st.integers(0, 200))
    other = base.clone()
    steps = torch.tensor(data.draw(st.lists(st.integers(-6, 6), min_size=1, max_size=n)), dtype=BITS[dtype])
    other.view(BITS[dtype])[: len(steps)] += steps
    other[data.draw(st.integers(0, n - 1))] *= data.draw(st.sampled_from([1, -1]))
    one = make_case(aten.mm.default, torch.mm, torch.ones(n, 1), torch.ones(1, 1))
    case = replace(one, actual=(other.view(n, 1),), expected=(base.view(n, 1),))
    close = torch.equal(base.view(BITS[dtype]), other.view(BITS[dtype])) or screened(case) is not None
    assert stays_on_the_device(case) == close


@pytest.mark.parametrize("value", [1.0, 2.0, 2.0**-126, 3e38])
def test_another_sign_is_never_close(make_case, value):
    x = torch.full((4,), value)
    # 2.0 and -2.0 are 2**31 numbers apart, which wraps to a negative int32.
    assert not stays_on_the_device(make_case(aten.sin.default, lambda x: -x.sin().div(x.sin()).mul(value), x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_cancel_stay_on_the_device_and_coarse_ones_leave_it(make_case, dtype):
    a, b = normal(64, 512, dtype=dtype), normal(512, 64, dtype=dtype, seed=1)

    def stays(compute):
        case = make_case(aten.mm.default, compute, a, b)
        return stays_on_the_device(replace(case, expected=((a.double() @ b.double()).to(dtype),)))

    def in_order(a, b):
        return term_by_term(a.float(), b.float()).to(dtype)

    assert stays(in_order)
    assert not stays(lambda a, b: in_order(a, b) * (1.0001 if dtype is torch.float32 else 1.01))
    coarse = (lambda a, b: to_tf32(a) @ to_tf32(b)) if dtype is torch.float32 else in_halves
    assert not stays(coarse)
    # A common factor within the tolerance of each element.
    assert dtype is torch.bfloat16 or not stays(lambda a, b: (a.double() @ b.double() * (1 + 2.0**-20)).float())


def in_halves(a, b):
    """A sum that is rounded to 16 bits half way."""
    return a[:, :256] @ b[:256] + a[:, 256:] @ b[256:]


@pytest.mark.parametrize("op", [aten.relu.default, aten.exp.default])
def test_an_operator_with_a_bound_of_its_own_is_held_to_it(make_case, op):
    x = normal(256).abs()
    bound = {aten.relu.default: 0, aten.exp.default: 4}[op]
    for steps in (1, 5):

        def off(x, steps=steps):
            out = op(x)
            out.view(torch.int32).add_(steps)
            return out

        assert stays_on_the_device(make_case(op, off, x)) == (steps <= bound)


def test_bias_of_sixteen_bits_leaves_the_device(make_case):
    x = normal(4096, dtype=torch.bfloat16).abs()
    down = x.clone()
    down.view(torch.int16)[::2] -= 1
    mixed = x.clone()
    mixed.view(torch.int16)[::2] += torch.tensor([1, -1], dtype=torch.int16).repeat(1024)
    case = make_case(aten.silu.default, aten.silu.default, x)
    assert not stays_on_the_device(replace(case, actual=(down,), expected=(x,)))
    assert stays_on_the_device(replace(case, actual=(mixed,), expected=(x,)))
