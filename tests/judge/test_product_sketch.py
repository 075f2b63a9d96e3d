"""A sketch measures the distance of a product from that of rounded factors without computing the product."""

import pytest
import torch

from shadowrun.judge.cause import known_roundings, product_sketch
from shadowrun.judge.cause.known_roundings import KnownRoundings
from shadowrun.judge.cause.product_sketch import sketch_product
from shadowrun.judge.judge import Judge
from shadowrun.numerics.diff import diff
from shadowrun.numerics.input_roundings import IN_FLOAT32
from tests.case_kit import make_case

aten = torch.ops.aten
bf16 = IN_FLOAT32["bf16"]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case_of(op, rounded=bf16, change=lambda out: out, seed=0, **scales):
    """A call whose target rounds its matrices."""
    m, k, n = 192, 96, 128
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


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize(("op", "scales"), OPS)
def test_a_sketch_has_the_norm_of_the_difference(op, scales, changes):
    noise = 0.01 * random(192, 128, seed=9)
    case = case_of(op, change=(lambda out: out + noise) if changes else lambda out: out, **scales)
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
        fit = known_roundings._sketched(case, "inputs rounded to bf16", found, only_operands=False)
        assert (fit is not None) == usable


def test_small_products_and_other_operators_have_none():
    small = make_case(aten.mm.default, lambda a, b: a @ b, random(64, 8), random(8, 8))
    few_rows = make_case(aten.mm.default, lambda a, b: a @ b, random(2, 512), random(512, 512))
    vector = make_case(aten.mv.default, lambda a, b: a @ b, random(512, 512), random(512))
    for case in (small, few_rows, vector):
        assert sketch_product(case, case.actual[0], bf16, only_operands=True) is None


def test_the_generator_of_the_program_is_left_alone():
    case, state = case_of(aten.mm.default), torch.get_rng_state()
    product_sketch._signs.cache_clear()
    sketch_product(case, case.actual[0], bf16, only_operands=True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def products(monkeypatch):
    """Operators that were run again on rounded inputs."""
    ran, evaluate = [], known_roundings.evaluate
    monkeypatch.setattr(
        known_roundings, "evaluate", lambda case, *rest: (ran.append(case.op), evaluate(case, *rest))[1]
    )
    return ran


def learned(op):
    known, case = KnownRoundings(), case_of(op, seed=100)
    verdict, diffs = Judge()(case)
    assert verdict.explanation == "inputs rounded to bf16"
    known.learn(7, case, verdict, diffs)
    assert known.judge(7, case_of(op, seed=101)) is None, "the second call climbs the ladder"
    return known


@pytest.mark.parametrize("op", [aten.mm.default, aten.addmm.default, aten.bmm.default], ids=lambda op: op.name())
def test_a_known_rounding_needs_no_product(op, products):
    known = learned(op)
    products.clear()
    case = case_of(op, seed=3)
    verdict, (diff,) = known.judge(7, case)
    full, (wanted,) = Judge()(case)
    assert (verdict.status, verdict.cause, verdict.explanation) == (full.status, full.cause, full.explanation)
    assert (diff.n_mismatched, diff.max_abs) == (diff.n_different, wanted.max_abs)
    assert products == []


def one_is_off(by):
    def change(out):
        out.view(-1, 128)[7, 11] += by * float(out.abs().max())
        return out

    return change


def a_row_is_off(out):
    out.view(-1, 128)[7] *= 1.02
    return out


# The distance by rounding to bf16 is about 1/500 of the greatest element here.
@pytest.mark.parametrize("change", [one_is_off(1e-3), one_is_off(0.3), a_row_is_off], ids=["slightly", "much", "row"])
def test_what_is_off_for_another_reason_too_is_not_passed_by_its_sketch(change, products):
    known = learned(aten.mm.default)
    products.clear()
    case = case_of(aten.mm.default, change=change, seed=3)
    assert known.judge(7, case) is None
    assert known.judge(7, case_of(aten.mm.default, IN_FLOAT32["tf32"], seed=3)) is None
