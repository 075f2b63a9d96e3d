"""A rounding of inputs that was found is recognised again; whatever fits less well goes to the ladder."""

import pytest
import torch

from shadowrun.judge.cause import known_roundings
from shadowrun.judge.cause.known_roundings import KnownRoundings
from shadowrun.judge.judge import Judge
from shadowrun.types import Cause, Status
from tests.case_kit import make_case
from tests.ground_truth.bulk import ROUNDINGS, compare

aten = torch.ops.aten


def product(rounding="bf16", change=lambda out: out, seed=0, share_far=0.0):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(16, 48, generator=generator), torch.randn(48, 16, generator=generator)

    def far(t):  # that share of the elements is nearly as far from the numbers of bfloat16 as can be
        rounded_most = ((t.view(torch.int32) & -65536) | 0x7F00).view(torch.float32)
        return torch.where(torch.rand(t.shape, generator=generator) < share_far, rounded_most, t)

    a, b = far(a), far(b)
    return make_case(aten.mm.default, lambda x, y: change(ROUNDINGS[rounding](x) @ ROUNDINGS[rounding](y)), a, b)


@pytest.fixture
def known():
    known, case = KnownRoundings(), product(seed=100)
    verdict, diffs = Judge()(case)
    assert verdict.explanation == "inputs rounded to bf16"
    known.learn(7, case, verdict, diffs)
    assert known.judge(7, product(seed=101)) is None, "the second call climbs the ladder"
    return known


def distance(case):
    (actual,), (expected,) = case.actual, case.expected
    return float((actual - expected).norm() / expected.norm())


def test_the_next_calls_get_the_verdict_of_the_ladder(known):
    n_known = 0
    for seed in range(12):
        case = product(seed=seed)
        found, full = known.judge(7, case), Judge()(case)
        if seed in (1, 5):
            assert found is None, "the fourth and the eighth call"
            continue
        n_known += 1
        verdict, (diff,) = found
        assert (verdict.status, verdict.cause, verdict.explanation, verdict.confidence) == (
            Status.MISMATCH,
            Cause.REDUCED_PRECISION,
            "inputs rounded to bf16",
            full[0].confidence,
        )
        assert diff.max_abs == full[1][0].max_abs
        assert 0 < diff.n_mismatched <= diff.n_different
    assert n_known == 10


def test_a_call_that_is_clearly_worse_than_all_before_climbs_the_ladder_once(known):
    case = product(seed=1, share_far=0.5)
    assert 1.25 * distance(product(seed=100)) < distance(case) < 2 * distance(product(seed=100))
    assert known.judge(7, product(seed=2)) is not None
    assert known.judge(7, product(seed=2)) is None, "the fourth call"
    assert [known.judge(7, case) for _ in range(3)] == [None] * 3
    known.learn(7, case, *Judge()(case))
    assert known.judge(7, product(seed=3)) is None, "the eighth call"
    assert known.judge(7, product(seed=3, share_far=0.4)) is not None


def shifted(by, n):
    """A product of matrices whose mean is not 0: its result is far greater than its error."""
    generator = torch.Generator().manual_seed(by)
    a, b = (torch.randn(n, n, generator=generator) + by for _ in range(2))
    return make_case(aten.mm.default, lambda x, y: ROUNDINGS["bf16"](x) @ ROUNDINGS["bf16"](y), a, b)


@pytest.mark.parametrize("n", [40, 64], ids=["by the product", "by its sketch"])
def test_layers_that_take_turns_in_a_context_do_not_climb_the_ladder_each_time(n, monkeypatch):
    known, near, far = KnownRoundings(), shifted(3, n), shifted(0, n)
    assert distance(far) > 2.5 * distance(near)
    for case in (far, near, far):
        known.learn(7, case, *Judge()(case))
    products, evaluate = [], known_roundings.evaluate
    monkeypatch.setattr(known_roundings, "evaluate", lambda *args: (products.append(args), evaluate(*args))[1])
    found = [known.judge(7, case) for case in (far, near) * 4]
    assert [k for k, verdict in enumerate(found, 2) if verdict is None] == [2, 4, 8]
    assert len(products) == (0 if n == 64 else 5)


def cancelling(left, n):
    """A product whose terms cancel, as those of a gradient do late in a training, but for a share of them."""
    generator = torch.Generator().manual_seed(n)
    x, y, z = (torch.randn(n, n, generator=generator) for _ in range(3))
    a, b = torch.cat([x, x + left * z], 1), torch.cat([y, -y])
    return make_case(aten.mm.default, lambda x, y: ROUNDINGS["bf16"](x) @ ROUNDINGS["bf16"](y), a, b)


@pytest.mark.parametrize("n", [40, 64], ids=["by the product", "by its sketch"])
def test_terms_that_cancel_make_no_call_worse(n):
    """The distance is relative to a smaller result: in units of rounding, the call is as bad as before."""
    known, before, later = KnownRoundings(), cancelling(2.0, n), cancelling(0.4, n)
    assert distance(later) > 2 * distance(before)
    for case in (before, before):
        verdict, diffs = Judge()(case)
        known.learn(7, case, verdict, diffs)
    assert known.judge(7, later) is None, "the second call"
    assert known.judge(7, later) is not None
    assert Judge()(later)[1][0].excess_actual < 1.25 * diffs[0].excess_actual


def test_the_schedule_is_that_of_the_operator_and_each_context_begins_with_the_ladder(known):
    n_full = 0
    for context in range(20, 40):
        assert known.judge(context, product(seed=context)) is None
        case = product(seed=context)
        known.learn(context, case, *Judge()(case))
        n_full += known.judge(context, product(seed=context + 1)) is None
    assert n_full <= 4


def one_wrong(out):
    out[3, 3] += 40
    return out


def one_nan(out):
    out[3, 3] = float("nan")
    return out


@pytest.mark.parametrize(
    "case",
    [
        product(change=one_wrong),
        product(change=one_nan),
        product("tf32"),
        product(change=lambda out: out * 1.01),
        product(change=lambda out: out * 100),
        make_case(aten.mm.default, lambda x, y: (x @ y) * (1 + 1e-6), torch.rand(16, 48), torch.rand(48, 16)),
    ],
    ids=["one element", "NaN", "another rounding", "a factor", "a great factor", "nearly right"],
)
def test_what_fits_less_well_climbs_the_ladder(known, case):
    assert known.judge(7, case) is None


def test_another_verdict_forgets_the_rounding(known):
    right = make_case(aten.mm.default, lambda x, y: x @ y + 1e-7, torch.rand(16, 48), torch.rand(48, 16))
    known.learn(7, right, *Judge()(right))
    assert known.judge(7, product()) is None
    assert known.judge(8, product()) is None, "a context that was never judged"


def test_both_ways_give_the_same_verdicts():
    counts, wrong = compare(300, seed=3, op="bmm")
    assert wrong == []
    assert counts["by a known rounding"] > 30


def test_a_product_without_terms_is_no_failure():
    bias, left, right = torch.rand(64), torch.empty(64, 0), torch.empty(0, 64)
    case = make_case(aten.addmm.default, lambda x, y, z: torch.addmm(ROUNDINGS["bf16"](x), y, z), bias, left, right)
    verdict, diffs = Judge()(case)
    assert verdict.explanation == "inputs rounded to bf16"
    known = KnownRoundings()
    known.learn(7, case, verdict, diffs)
    assert known.judge(7, case) is None, "the second call"
    assert known.judge(7, case) is not None
