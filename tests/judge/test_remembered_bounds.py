"""What was remembered of a context gives the full ladder's verdicts, and leaves to the ladder what is not certain."""

import itertools

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.judge.remembered_bounds import RememberedBounds, bounds_of
from shadowrun.numerics.diff import native_diff
from shadowrun.types import Cause, Status
from tests.case_kit import make_case
from tests.ground_truth.bulk import compare

aten = torch.ops.aten
needs_native = pytest.mark.skipif(native_diff is None, reason="without native code, each call climbs the ladder")


def ulps(n):
    return lambda *args: (aten.add.Tensor(*args).view(torch.int32) + n).view(torch.float32)


def no_tolerance(_op, _dtype):
    return None


@pytest.mark.parametrize("op", ["mm", "softmax", "add", "embedding", "norm", "foreach"])
def test_both_ways_give_the_same_verdicts(op):
    counts, wrong = compare(150, seed=1, op=op)
    assert wrong == []
    assert counts["match"] > 40
    assert counts["mismatch"] > 5
    if native_diff is not None and op != "embedding":  # whose order of additions may vary: two runs are compared
        assert counts["by remembered bounds"] > 5


@needs_native
def test_a_match_is_remembered_and_a_mismatch_is_not():
    a, b = torch.rand(8), torch.rand(8)
    judge, remembered = Judge(), RememberedBounds(None)
    wrong = make_case(aten.add.Tensor, ulps(400), a, b)
    remembered.learn(0, wrong, *judge(wrong))
    assert 0 not in remembered.by_context
    right = make_case(aten.add.Tensor, ulps(1), a, b)
    remembered.learn(0, right, *judge(right))
    verdict, diffs = remembered.by_context[0].judge(right.actual, right.expected)
    assert verdict == judge(right)[0]
    assert diffs == judge(right)[1]
    assert remembered.by_context[0].judge(wrong.actual, wrong.expected) is None


@needs_native
def test_zeros_against_subnormal_numbers_pass_once_the_oracle_passed_such():
    a, b = torch.rand(4, 4), torch.eye(4)
    b[0, 0] = 0.0
    case = make_case(aten.mm.default, lambda x, y: (x.mm(y).view(torch.int32) ^ 1).view(torch.float32), a, b)
    judge, remembered = Judge(), RememberedBounds(None)
    bounds = bounds_of(case, no_tolerance)
    assert bounds.close(0, judge(case)[1][0]) is None
    remembered.learn(0, case, *judge(case))
    assert remembered.by_context[0].close(0, judge(case)[1][0]).status is Status.MATCH


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (torch.rand(4), torch.rand(4))),
        (aten.mm.default, (torch.rand(2, 2), torch.rand(2, 2))),
    ],
)
def test_where_the_user_gave_a_tolerance_nothing_is_remembered(op, args):
    case = make_case(op, op, *args)
    assert bounds_of(case, lambda _op, _dtype: (0.0, 1e-3)) is None
    assert bounds_of(case, no_tolerance) is not None


@pytest.mark.parametrize(
    "case",
    [
        make_case(aten.native_dropout.default, aten.native_dropout.default, torch.rand(4), 0.0, False),
        make_case(
            aten._foreach_add.List, aten._foreach_add.List, [torch.rand(4)] * 2, [torch.rand(4), torch.rand(4).half()]
        ),
        make_case(aten.add.Tensor, aten.add.Tensor, torch.rand(4), torch.rand(4), alpha=0.5),
        make_case(aten.argmax.default, aten.argmax.default, torch.rand(4)),
        make_case(aten.clone.default, aten.clone.default, torch.rand(4)),
    ],
    ids=["random", "dtypes of a list", "a float scale", "ties", "exact"],
)
def test_calls_that_a_context_does_not_describe_climb_the_ladder(case):
    assert bounds_of(case, no_tolerance) is None


@needs_native
def test_items_of_a_list_are_remembered_with_their_forms():
    def off(*args):
        return [(t.view(torch.int32) ^ 1).view(torch.float32) for t in aten._foreach_add.List(*args)]

    def case_of(*sizes, target=off, dtype=torch.float32):
        lists = [[torch.rand(n, dtype=dtype) + 1 for n in sizes] for _ in range(2)]
        return make_case(aten._foreach_add.List, target, *lists)

    judge, remembered = Judge(), RememberedBounds(None, lambda *_: pytest.fail("C compares no lists"))
    first = case_of(100, 200)
    remembered.learn(0, first, *judge(first))
    known = remembered.by_context[0]
    again = case_of(100, 200)
    assert known.judge(again.actual, again.expected) == judge(again)
    # A context has the forms of four items: the others may differ.
    for other in (case_of(100, 201), case_of(100, 200, 200)):
        assert known.judge(other.actual, other.expected) is None
    coarse = case_of(100, 200, target=aten._foreach_add.List, dtype=torch.bfloat16)
    far = [t.view(torch.int16).add(3).view(torch.bfloat16) for t in coarse.actual]
    assert known.judge(far, coarse.expected) is None


def test_small_sums_are_counted_in_any_case():
    small = make_case(aten.mm.default, aten.mm.default, torch.rand(2, 8), torch.rand(8, 2))
    large = make_case(aten.mm.default, aten.mm.default, torch.rand(16, 8), torch.rand(8, 16))
    assert not bounds_of(small, no_tolerance).is_enough
    assert bounds_of(large, no_tolerance).is_enough


def _index_add(target):
    return make_case(aten.index_add.default, target, torch.zeros(100), 0, torch.arange(1000) % 100, torch.rand(1000))


@needs_native
def test_additions_in_an_order_that_does_not_vary_are_not_run_again():
    runs = []

    def off(*args):
        runs.append(1)
        return (aten.index_add.default(*args).view(torch.int32) ^ 1).view(torch.float32)

    judge, remembered = Judge(), RememberedBounds(None)
    first = _index_add(off)
    assert not bounds_of(first, no_tolerance).is_steady
    remembered.learn(0, first, *judge(first))
    known = remembered.by_context[0]
    again = _index_add(off)
    runs.clear()
    assert known.judge(again.actual, again.expected) is not None
    assert judge(again, known)[0].status is Status.MATCH
    assert not runs
    assert judge(again)[0].status is Status.MATCH
    assert runs


@needs_native
def test_additions_in_another_order_each_time_are_run_again_each_time():
    count = itertools.count(1)

    def shuffled(self, dim, index, source):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(next(count)))
        return aten.index_add.default(self, dim, index[order], source[order])

    judge, remembered = Judge(), RememberedBounds(None, lambda *_: pytest.fail("C compares with no other run"))
    first = _index_add(shuffled)
    verdict, diffs = judge(first)
    assert verdict.cause is Cause.NON_DETERMINISM
    remembered.learn(0, first, verdict, diffs)
    known = remembered.by_context[0]
    again = _index_add(shuffled)
    assert known.judge(again.actual, again.expected) is None
    assert judge(again, known)[0].cause is Cause.NON_DETERMINISM
