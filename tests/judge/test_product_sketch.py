"""A sketch measures how far a product or convolution is from that of rounded inputs, without computing that."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shadowrun.judge.cause import known_roundings, product_sketch
from shadowrun.judge.cause.convolution_sketch import sketch_convolution
from shadowrun.judge.cause.known_roundings import KnownRoundings
from shadowrun.judge.cause.product_sketch import sketch_product
from shadowrun.judge.judge import Judge
from shadowrun.numerics import input_roundings
from shadowrun.numerics.diff import diff
from shadowrun.numerics.input_roundings import IN_FLOAT32
from tests.case_kit import make_case

aten = torch.ops.aten
bf16 = IN_FLOAT32["bf16"]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case_of(op, rounded=bf16, change=lambda out: out, seed=0, rows=192, **scales):
    """A call whose target rounds its matrices."""
    m, k, n = rows, 96, 128 if rows > 1 else 576
    batch = (3,) if "b" in op.name().removesuffix("mm").removeprefix("aten::") else ()
    factors = random(*batch, m, k, seed=seed), random(*batch, n, k, seed=seed + 1).transpose(-1, -2)
    added = (random(n, seed=seed + 2),) if "add" in op.name() else ()

    def on_target(*args, **kwargs):
        return change(op(*(rounded(t) if t.dim() > 1 else t for t in args), **kwargs))

    return make_case(op, on_target, *added, *factors, **scales)


OPS = [
    pytest.param(op, scales, id=f"{op.name()} {scales}")
    for op, scales in (
        (aten.mm.default, {}),
        (aten.bmm.default, {}),
        (aten.addmm.default, {}),
        (aten.addmm.default, {"beta": 0.5, "alpha": 3}),
        (aten.baddbmm.default, {"beta": 0}),
        (aten.baddbmm.default, {"beta": 2.0, "alpha": 0.25}),
    )
]


@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("rows", [192, 1])
@pytest.mark.parametrize(("op", "scales"), OPS)
def test_c_and_torch_give_the_same_sketch(op, scales, rows, instructions, monkeypatch):
    if input_roundings.core is None:
        pytest.skip("without the C extension torch multiplies")
    noise, found = 0.01 * random(rows, 128 if rows > 1 else 576, seed=9), []
    case = case_of(op, change=lambda out: out + noise, rows=rows, **scales)
    original = input_roundings.core.product_sketch

    def noted(*args):
        try:
            found.append(original(*args, instructions))
        except ValueError as error:
            pytest.skip(str(error))
        return found[-1]

    monkeypatch.setattr(input_roundings, "core", SimpleNamespace(product_sketch=noted))
    in_c = sketch_product(case, case.actual[0], bf16, only_operands=True)
    assert found == [(pytest.approx(in_c.norm**2), in_c.greatest)]
    monkeypatch.setattr(input_roundings, "core", None)
    assert in_c == pytest.approx(sketch_product(case, case.actual[0], bf16, only_operands=True), rel=1e-3)


def test_c_refuses_what_does_not_fit_and_keeps_nan():
    core = pytest.importorskip("shadowrun.native._core")
    left, right, vector, bits = random(70, 40), random(40, 30), random(30), bf16.bits
    actual = left @ right
    for a, b, p, v, start in (
        (left, right.T, actual, vector, None),
        (left, right, actual.T, vector, None),
        (left, right, actual, vector[:-1], None),
        (left, right, actual, vector, random(69)),
        (left[None], right, actual, vector, None),
        (left.double(), right, actual, vector, None),
        (left, right, actual, vector[::2], None),
        (left.repeat(2, 2)[::2, ::2], right, actual, vector, None),
        (left[None, None], right[None, None], actual[None, None], vector, None),
    ):
        assert core.product_sketch(a, b, p, v, start, -1.0, bits) is None
    actual[3, 2] = torch.nan
    assert all(x != x for x in core.product_sketch(left, right, actual, vector, None, -1.0, bits))


@pytest.mark.parametrize("rows", [192, 1])
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize(("op", "scales"), OPS)
def test_a_sketch_has_the_norm_of_the_difference(op, scales, changes, rows):
    noise = 0.01 * random(rows, 128 if rows > 1 else 576, seed=9)
    case = case_of(op, change=(lambda out: out + noise) if changes else lambda out: out, rows=rows, **scales)
    found = sketch_product(case, case.actual[0], bf16, only_operands=True)
    if changes:
        assert found.norm == pytest.approx(float(noise.expand_as(case.actual[0]).norm()), rel=0.2)
    else:
        assert found.norm < 1e-3 * float((case.actual[0] - case.expected[0]).norm())
    # A vector that is rounded too gives another sum.
    if "add" in op.name() and scales.get("beta", 1) and not changes:
        assert sketch_product(case, case.actual[0], bf16, only_operands=False).norm > 10 * found.norm


def test_a_matrix_that_is_added_is_no_operand():
    added, *factors = random(192, 128, seed=2), random(192, 96), random(96, 128, seed=1)
    case = make_case(aten.addmm.default, lambda c, a, b: c + bf16(a) @ bf16(b), added, *factors)
    found = sketch_product(case, case.actual[0], bf16, only_operands=True)
    assert found.norm < 1e-3 * float((case.actual[0] - case.expected[0]).norm())
    again = known_roundings._on_rounded_inputs(case, "inputs rounded to bf16", only_operands=True)
    torch.testing.assert_close(again[0], case.actual[0])


def test_what_is_multiplied_by_zero_is_not_read():
    factors = random(192, 96), random(128, 96, seed=1).T
    case = make_case(
        aten.addmm.default,
        lambda added, a, b, beta: aten.addmm.default(added, bf16(a), bf16(b), beta=beta),
        torch.full((128,), torch.nan),
        *factors,
        beta=0,
    )
    assert sketch_product(case, case.actual[0], bf16, only_operands=True).norm < 0.01


def test_a_sketch_with_an_element_that_is_off_is_no_measure_for_later_calls():
    for by, usable in ((0.0, True), (0.3, False)):
        case = case_of(aten.mm.default, change=one_is_off(by))
        found = diff("output 0", case.actual[0], case.expected[0])
        fit = known_roundings._sketched(case, "inputs rounded to bf16", {0: found}, only_operands=False)
        assert (fit is not None) == usable


def test_small_products_and_other_operators_have_none():
    small = make_case(aten.mm.default, lambda a, b: a @ b, random(64, 8), random(8, 8))
    few_rows = make_case(aten.mm.default, lambda a, b: a @ b, random(2, 512), random(512, 512))
    vector = make_case(aten.mv.default, lambda a, b: a @ b, random(512, 512), random(512))
    for case in (small, few_rows, vector):
        assert sketch_product(case, case.actual[0], bf16, only_operands=True) is None


def test_the_generator_of_the_program_is_left_alone():
    case, state = case_of(aten.mm.default), torch.get_rng_state()
    product_sketch.random_vector.cache_clear()
    sketch_product(case, case.actual[0], bf16, only_operands=True)
    assert torch.equal(torch.get_rng_state(), state)


def convolution_case(change=lambda out: out, rounded=bf16, seed=0, groups=1, bias=True, forward=False, **how):
    """A convolution, or the gradients of one, whose target rounds all inputs with more than one dimension."""
    size, transposed = how.get("size", (12, 13)), how.get("transposed", False)
    n, channels, results = 4, 8, 10
    weight = (channels, results) if transposed else (results, channels // groups)
    each = [1] * len(size)
    x, w = random(n, channels, *size, seed=seed), random(*weight, *(3 for _ in size), seed=seed + 1)
    settings = (how.get("stride", each), each, how.get("dilation", each), transposed, [0] * len(size), groups)
    b = random(results, seed=seed + 2) if bias else None
    if forward:
        op, args = aten.convolution.default, (x, w, b, *settings)
    else:
        gradient = random(*aten.convolution.default(x, w, b, *settings).shape, seed=seed + 3)
        mask = how.get("mask", [True, True, bias])
        op, args = aten.convolution_backward.default, (gradient, x, w, [results] if bias else None, *settings, mask)

    def on_target(*args):
        rounds = (rounded(a) if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in args)
        out = op(*rounds)
        return change(out) if forward else tuple(change(t) if t is not None else t for t in out)

    return make_case(op, on_target, *args)


def noisy(out):
    return out + 0.01 * float(out.std()) * random(*out.shape, seed=9)


CONVOLUTIONS = [
    {"forward": True},
    {"forward": True, "bias": False, "stride": [2, 1], "dilation": [1, 2]},
    {"forward": True, "transposed": True, "stride": [2, 2]},
    {"forward": True, "size": (150,)},
    {},
    {"bias": False, "stride": [2, 1], "dilation": [1, 2]},
    {"transposed": True, "stride": [2, 2]},
    {"size": (6, 5, 7)},
    {"mask": [False, True, True]},
    {"mask": [True, False, False]},
]


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("how", CONVOLUTIONS, ids=str)
def test_sketches_of_a_convolution_have_the_norms_of_the_differences(how, changes):
    case = convolution_case(noisy if changes else lambda out: out, **how)
    exact = convolution_case(**how).actual
    found = sketch_convolution(case, range(len(case.actual)), bf16, only_operands=True)
    assert found.keys() == set(range(len(case.actual)))
    for k, sketch in found.items():
        off = float((case.actual[k] - case.expected[k]).norm())
        if changes:
            assert sketch.norm == pytest.approx(float((case.actual[k] - exact[k]).norm()), rel=0.25)
        else:
            assert sketch.norm < 1e-3 * off
        assert sketch.greatest <= sketch.norm


def test_a_bias_of_a_convolution_that_is_rounded_too_gives_another_sum():
    case = convolution_case(forward=True)
    exact, other = (sketch_convolution(case, [0], bf16, only_operands=only)[0] for only in (True, False))
    assert other.norm > 10 * exact.norm


def test_only_the_results_asked_for_are_looked_at():
    assert sketch_convolution(convolution_case(), [1], bf16, only_operands=True).keys() == {1}


def test_small_convolutions_and_those_by_groups_have_none():
    small = convolution_case(size=(3, 3), forward=True)
    groups = convolution_case(groups=2, forward=True)
    for case in (small, groups):
        assert not sketch_convolution(case, [0], bf16, only_operands=True)


@pytest.fixture
def products(monkeypatch):
    """Operators that were run again on rounded inputs."""
    ran, evaluate = [], known_roundings.evaluate
    monkeypatch.setattr(
        known_roundings, "evaluate", lambda case, *rest: (ran.append(case.op), evaluate(case, *rest))[1]
    )
    return ran


def learned(make):
    known, case = KnownRoundings(), make(seed=100)
    verdict, diffs = Judge()(case)
    assert verdict.explanation == "inputs rounded to bf16"
    known.learn(7, case, verdict, diffs)
    assert known.judge(7, make(seed=101)) is None, "the second call climbs the ladder"
    return known


KNOWN = {op.name(): partial(case_of, op) for op in (aten.mm.default, aten.addmm.default, aten.bmm.default)} | {
    "convolution": partial(convolution_case, forward=True),
    "its gradients": convolution_case,
    "one row": partial(case_of, aten.mm.default, rows=1),
}


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_a_known_rounding_needs_no_product(make, products):
    known = learned(make)
    products.clear()
    case = make(seed=3)
    verdict, diffs = known.judge(7, case)
    full, wanted = Judge()(case)
    assert (verdict.status, verdict.cause, verdict.explanation) == (full.status, full.cause, full.explanation)
    assert [d.n_mismatched for d in diffs] == [d.n_different for d in diffs]
    assert [d.max_abs for d in diffs] == [d.max_abs for d in wanted]
    assert products == []


def test_sketches_may_become_as_coarse_as_a_product_has_confirmed(products):
    known = learned(partial(case_of, aten.mm.default))
    fit = known._known[7].sketched[0]
    known._known[7].sketched = {0: fit._replace(greatest=fit.greatest / 10, remaining=fit.remaining / 10)}
    products.clear()
    assert known.judge(7, case_of(aten.mm.default, seed=3)) is not None
    assert products == ["aten::mm"]
    assert known.judge(7, case_of(aten.mm.default, seed=4)) is None, "the fourth call climbs the ladder"
    assert known.judge(7, case_of(aten.mm.default, seed=5)) is not None
    assert products == ["aten::mm"]
    assert known.judge(7, case_of(aten.mm.default, seed=6, change=one_is_off(1e-3))) is None


def one_is_off(by):
    def change(out):
        out.view(-1)[out.numel() // 3] += by * float(out.abs().max())
        return out

    return change


def a_row_is_off(out):
    out.view(-1)[:128] *= 1.02
    return out


@pytest.mark.parametrize("columns", [64, 100])
def test_what_cancels_in_a_sum_is_not_passed_by_a_sketch(columns):
    def make(change=lambda out: out, seed=0):
        a, b = random(192, 96, seed=seed), random(96, columns, seed=seed + 1)
        return make_case(aten.mm.default, lambda x, y: change(bf16(x) @ bf16(y)), a, b)

    def exchanged(first, second):
        def change(out):
            out[7, [first, second]] = out[7, [second, first]]
            return out

        return change

    def all_of_a_row(out):
        out[7] += 0.1
        return out

    case = make()
    known = known_roundings._fitted(case, *Judge()(case))
    for change in (all_of_a_row, *(exchanged(0, k) for k in range(1, columns, 7))):
        case = make(change, seed=3)
        diffs = {0: diff("output 0", case.actual[0], case.expected[0])}
        assert known_roundings._explained(case, known, diffs) is None


# The distance by rounding to bf16 is about 1/500 of the greatest element here.
@pytest.mark.parametrize("change", [one_is_off(1e-3), one_is_off(0.3), a_row_is_off], ids=["slightly", "much", "row"])
@pytest.mark.parametrize("name", ["aten::mm", "convolution", "its gradients", "one row"])
def test_what_is_off_for_another_reason_too_is_not_passed_by_its_sketch(name, change):
    make = KNOWN[name]
    known = learned(make)
    assert known.judge(7, make(change=change, seed=3)) is None
    assert known.judge(7, make(seed=4)) is None, "the fourth call climbs the ladder"
    assert known.judge(7, make(rounded=IN_FLOAT32["tf32"], seed=3)) is None
    assert known.judge(7, make(seed=5)) is not None
