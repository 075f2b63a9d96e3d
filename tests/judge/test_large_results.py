"""Large results: judged by slices, with the farthest among them; and gross errors, for which no oracle is needed."""

import dataclasses

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status, sim
from shadowrun.intercept.plan import make_plan
from shadowrun.judge import large_results
from shadowrun.judge.decision_trace import Rung, Trace
from shadowrun.judge.judge import Judge
from shadowrun.judge.remembered_bounds import RememberedBounds
from shadowrun.numerics.diff import native_diff
from shadowrun.operators.case import Case, flat_results
from shadowrun.operators.vendor_ops import evaluate
from shadowrun.replay.comparator import bytes_for_oracle

aten = torch.ops.aten


def r(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


IMAGE, FILTER = (16, 3, 20, 20), (24, 3, 3, 3)
CALLS = {
    "mm": (aten.mm.default, (r(300, 40), r(40, 280, seed=1))),
    "square mm": (aten.mm.default, (r(200, 200), r(200, 200, seed=1))),
    "mm of bf16": (aten.mm.default, (r(300, 40, dtype=torch.bfloat16), r(40, 280, dtype=torch.bfloat16, seed=1))),
    "transposed": (aten.mm.default, (r(40, 300).t(), r(40, 280, seed=1))),
    "addmm": (aten.addmm.default, (r(280), r(300, 40), r(40, 280, seed=1))),
    "bmm": (aten.bmm.default, (r(64, 20, 10), r(64, 10, 30))),
    "exp": (aten.exp.default, (r(200, 100),)),
    "exp of a transposed matrix": (aten.exp.default, (r(200, 100).t(),)),
    "one long row": (aten.exp.default, (r(60_000),)),
    "addcmul": (aten.addcmul.default, (r(200, 100), r(100), r(200, 1))),
    "in place": (aten.addcmul_.default, (r(200, 100), r(100), r(200, 1))),
    "softmax": (aten._softmax.default, (r(200, 100), 1, False)),
    "softmax of columns": (aten._softmax.default, (r(200, 100), 0, False)),
    "softmax backward": (
        aten._softmax_backward_data.default,
        (r(200, 100), r(200, 100, seed=1).softmax(1), 1, torch.float32),
    ),
    "sum": (aten.sum.dim_IntList, (r(3000, 50), [1])),
    "cumsum": (aten.cumsum.default, (r(200, 100), 1)),
    "layer norm": (aten.native_layer_norm.default, (r(300, 60), [60], r(60), r(60, seed=1), 1e-5)),
    "group norm": (aten.native_group_norm.default, (r(32, 6, 10, 10), r(6), r(6, seed=1), 32, 6, 100, 3, 1e-5)),
    "convolution": (aten.convolution.default, (r(*IMAGE), r(*FILTER), r(24), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "one image": (
        aten.convolution.default,
        (r(1, 3, 40, 40), r(96, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (r(64, 2, 24, 8), r(64, 2, 24, 8, seed=1), r(64, 2, 24, 8, seed=2)),
    ),
    "complex": (aten.mul.Tensor, (torch.complex(r(100, 100), r(100, 100, seed=1)), torch.complex(r(100), r(100)))),
}
"""Calls that can be sliced."""

WHOLE = {
    "batch norm": (aten.native_batch_norm.default, (r(64, 4, 9, 9), r(4), r(4), None, None, True, 0.1, 1e-5)),
    "fft": (aten._fft_r2c.default, (r(40_000), [0], 0, True)),
}
"""Calls of which at least one result cannot be."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """What is large is small here."""
    monkeypatch.setattr(large_results, "LARGE_BYTES", 400_000)
    monkeypatch.setattr(large_results, "WANTED_BYTES", 200_000)


def run(func, mutated, args, kwargs, change=None):
    out = func(*args, **kwargs)
    values = flat_results(func, mutated, args, kwargs, out)[1]
    return tuple(values) if change is None else change(values)


def case_of(call, change):
    """A case whose target does what the reference does, and then changes the results."""
    func, args = call
    plan = make_plan(func, 0)
    bare = Case(func, args, {}, plan.mutated_names, (), (), (), None, None)

    def on(target):
        return lambda a, k: run(func, plan.mutated_names, a, k, change if target else None)

    names, expected = flat_results(func, plan.mutated_names, *(i := bare.fresh_inputs()), func(*i[0], **i[1]))
    actual = on(True)(*bare.fresh_inputs())
    return dataclasses.replace(
        bare, names=names, actual=actual, expected=expected, run_target=on(True), run_reference=on(False)
    )


def first_result(change):
    return lambda values: (change(values[0].clone()), *values[1:])


def rounded(value):
    """Two units in the last place more; in 16 bits, one at some elements: more would be no rounding."""
    if value.is_complex():
        return value
    if value.dtype is torch.bfloat16:
        value.view(torch.int16).view(-1)[::7] += 1
        return value
    return value.add(value.abs(), alpha=2 * torch.finfo(value.dtype).eps)


def one_wrong(value):
    value.as_strided((value.numel(),), (1,))[value.numel() * 2 // 3] += 0.125 + value.abs().max()
    return value


WRONG = {
    "doubled": lambda v: v * 2,
    "zeros": torch.zeros_like,
    "noise": lambda v: v.copy_(torch.randn(v.shape, generator=torch.Generator().manual_seed(9)) * v.abs().max()),
    "one element": one_wrong,
}


@pytest.mark.parametrize("name", CALLS)
def test_slices_show_what_is_wrong_and_pass_what_is_right(name, monkeypatch):
    judge = Judge()
    monkeypatch.setattr(Judge, "_within_bounds", lambda *_: None)
    case = case_of(CALLS[name], first_result(rounded))
    assert large_results.is_large(case)
    verdict, diffs = judge(case)
    assert verdict.status is Status.MATCH
    if any(d.n_different for d in diffs):
        assert "by slices, the farthest among them" in verdict.evidence
    for change in WRONG.values():
        verdict, diffs = judge(case_of(CALLS[name], first_result(change)))
        assert verdict.status is Status.MISMATCH
        assert verdict.cause is not Cause.REFERENCE
        assert "by slices, the farthest among them" in verdict.evidence
        assert diffs[0].n_elements in (case.expected[0].numel(), 2 * case.expected[0].numel())  # complex: by parts
        assert diffs[0].n_mismatched >= 1


@pytest.mark.skipif(native_diff is None, reason="the distances are counted in C")
@pytest.mark.parametrize(
    ("name", "rung"),
    [("mm", Rung.CLOSENESS), ("addcmul", Rung.CLOSENESS), ("in place", Rung.CLOSENESS), ("add", Rung.BOUND)],
)
def test_a_result_that_is_close_at_each_element_needs_no_slices(name, rung):
    call = CALLS.get(name) or (aten.add.Tensor, (r(200, 100), r(200, 100, seed=1)))
    case = case_of(call, first_result(lambda v: v.view(torch.int32).bitwise_xor_(1).view(torch.float32)))
    assert large_results.is_large(case)
    judge = Judge()
    judge.trace = Trace()
    verdict, (d,) = judge(case)
    assert (verdict.status, verdict.cause, judge.sampled) == (Status.MATCH, Cause.ROUNDING, False)
    assert (d.n_different, d.max_ulp) == (d.n_elements, 1)
    assert [step.rung for step in judge.trace] == [rung]
    # So does the next call of its context, in C.
    known = RememberedBounds(None)
    known.learn(1, case, verdict, (d,))
    assert known.by_context[1].judge(case.actual, case.expected) is not None


@pytest.mark.parametrize("name", CALLS)
def test_slices_of_a_right_kernel_that_rounds_differently_match(name):
    """The operator in float64, rounded once."""
    func, args = CALLS[name]
    if torch.bfloat16 in {a.dtype for a in args if isinstance(a, torch.Tensor)}:
        pytest.skip("its float32 sum is the right kernel")
    wide = [
        a.to(torch.complex128 if a.is_complex() else torch.float64) if isinstance(a, torch.Tensor) else a for a in args
    ]
    wide = [torch.float64 if a is torch.float32 else a for a in wide]
    truth = run(func, make_plan(func, 0).mutated_names, wide, {})

    def change(values):
        return tuple(t.to(v.dtype) for t, v in zip(truth, values, strict=True))

    assert Judge()(case_of((func, args), change))[0].status is Status.MATCH


@pytest.mark.parametrize("kept", [5, 100, 9_000, 40_000])
def test_of_many_slices_the_farthest_are_taken_and_none_twice(monkeypatch, kept):
    monkeypatch.setattr(large_results, "MANY", 1000)
    monkeypatch.setattr(large_results, "FARTHEST", 500)
    case = case_of(CALLS["one long row"], first_result(lambda v: v * (1 + 1e-3 * r(v.numel(), seed=3))))
    where = large_results._farthest_slices(case, 0, 0, kept)
    assert where.tolist() == sorted(set(where.tolist()))
    assert where.numel() == kept
    few = min(kept // 4, large_results.FARTHEST)
    distance = (case.actual[0] - case.expected[0]).abs()
    for farthest in (distance, distance / case.expected[0]):
        assert set(farthest.topk(few).indices.tolist()) <= set(where.tolist())


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_sliced_is_held_against_moved_inputs(name):
    small = Judge(max_bytes=1000)  # no oracle at all
    for wrong in ("doubled", "zeros", "noise"):
        verdict, _ = small(case_of(WHOLE[name], first_result(WRONG[wrong])))
        assert verdict.status is Status.MISMATCH
    verdict, _ = small(case_of(WHOLE[name], first_result(rounded)))
    assert verdict.status is not Status.MISMATCH
    assert Judge()(case_of(WHOLE[name], first_result(rounded)))[0].status is Status.MATCH  # its memory is enough


def test_an_optimizer_s_step_is_judged_by_its_farthest_items():
    weights, grads = [r(40, 40, seed=i) for i in range(20)], [r(40, 40, seed=50 + i) for i in range(20)]
    call = (aten._foreach_addcdiv_.Scalar, (weights, grads, [g.abs() + 1 for g in grads], 0.1))
    case = case_of(call, lambda values: tuple(map(rounded, values)))
    assert large_results.is_large(case)
    verdict, diffs = Judge()(case)
    assert verdict.status is Status.MATCH
    assert len(diffs) == 20
    wrong = case_of(call, lambda values: tuple(v * 1.01 if i == 13 else v for i, v in enumerate(values)))
    verdict, diffs = Judge()(wrong)
    assert verdict.status is Status.MISMATCH
    assert "1 of 20 items, the farthest among them" in verdict.evidence
    assert [d.name for d in diffs] == ["self[13]"]


def test_an_item_that_is_large_by_itself_is_judged_by_slices():
    given = [[r(200, 100, seed=k), r(20, seed=k)] for k in range(3)]
    call = (aten._foreach_lerp.List, tuple(given))
    wide = [[t.double() for t in ts] for ts in given]

    def right(_values):
        return tuple(t.float() for t in call[0](*wide))

    case = case_of(call, right)
    assert large_results.is_large(case)
    verdict, _ = Judge()(case)
    assert verdict.status is Status.MATCH
    verdict, diffs = Judge()(case_of(call, first_result(one_wrong)))
    assert verdict.status is Status.MISMATCH
    assert "by slices, the farthest among them" in verdict.evidence
    assert "1 of 2 items, the farthest among them" in verdict.evidence
    assert [d.name for d in diffs] == ["output 0[0]"]


def test_a_result_that_cancels_is_no_gross_error():
    x = r(20_000) * 1e-6 + 1000
    call = (aten.var.correction, (x.view(10, -1), [1]))
    case = case_of(call, lambda values: (values[0] + 0.3 * values[0].abs(),))
    assert large_results.gross_error(case, 0) is None


def test_gradients_of_a_layer_norm_are_judged_each_by_its_own_slices():
    x, g, w, b = r(400, 60), r(400, 60, seed=1), r(60), r(60)
    _, mean, rstd = aten.native_layer_norm(x, [60], w, b, 1e-5)
    call = (aten.native_layer_norm_backward.default, (g, x, [60], mean, rstd, w, b, [True, True, True]))
    assert Judge()(case_of(call, lambda v: (rounded(v[0]), v[1], v[2])))[0].status is Status.MATCH
    for k in range(3):
        verdict, _ = Judge()(case_of(call, lambda v, k=k: tuple(t * 2 if i == k else t for i, t in enumerate(v))))
        assert verdict.status is Status.MISMATCH


def test_the_user_s_tolerances_see_all_of_a_large_result():
    judge = Judge(rtol=1e-3, atol=1e-3)
    verdict, _ = judge(case_of(CALLS["mm"], first_result(WRONG["one element"])))
    assert verdict.status is Status.MISMATCH
    assert "1 elements of output 0 beyond rtol" in verdict.evidence
    assert "slices" not in verdict.evidence


def test_the_bound_of_memory_is_honoured_upwards():
    assert [bytes_for_oracle(n) for n in (1 << 20, 4 << 30, 16 << 30)] == [1 << 20, 1 << 30, 4 << 30]


def test_inputs_and_results_stay_as_they_are():
    case = case_of(CALLS["square mm"], first_result(WRONG["noise"]))
    before = [t.clone() for t in (*case.args, *case.actual, *case.expected)]
    Judge()(case)
    assert all(torch.equal(a, b) for a, b in zip(before, (*case.args, *case.actual, *case.expected), strict=True))


def test_a_comparison_says_what_was_judged_by_slices():
    sim.enable("sim")
    x = r(300, 280)
    with sim.flaws("softmax-error"), shadowrun.compare("sim") as run:
        x.softmax(1)
    (found,) = run.findings()
    assert (found.kind, found.op) == ("mismatch", "aten::_softmax")
    assert "by slices, the farthest among them" in found.evidence


SQUARES = {
    "mm": (aten.mm.default, (r(200, 200), r(200, 200, seed=1))),
    "layer norm": (aten.native_layer_norm.default, (r(150, 150), [150], r(150), r(150, seed=1), 1e-5)),
    "RMS norm": (aten._fused_rms_norm.default, (r(1, 150, 150), [150], r(150), None)),
    "softmax backward": (
        aten._log_softmax_backward_data.default,
        (r(150, 150), r(150, 150, seed=1).log_softmax(1), 1, torch.float32),
    ),
    "loss": (
        aten.nll_loss_backward.default,
        (torch.tensor(1.0), r(150, 150), ints(150, 150), None, 1, -100, torch.tensor(150.0)),
    ),
}
"""Calls of which several dimensions have one size, so that wrong ways to slice them suggest themselves."""


@pytest.mark.parametrize("name", SQUARES)
def test_the_reference_runs_on_no_slices_that_do_not_fit(name, monkeypatch):
    """On an accelerator such a call may end the use of the device by the whole process."""
    case, ran, sliced, original = case_of(SQUARES[name], first_result(rounded)), [], [], large_results._case

    def reference(args, kwargs):
        ran.append(args)
        return case.run_reference(args, kwargs)

    monkeypatch.setattr(large_results, "_case", lambda *args: sliced.append(args) or original(*args))
    verdict, *_ = large_results.by_slices(dataclasses.replace(case, run_reference=reference), Judge().examine)
    assert verdict.status is Status.MATCH
    # Each run is that of slices which were accepted.
    assert len(ran) == len(sliced) > 0, [[getattr(a, "shape", a) for a in args] for args in ran]


def test_slices_that_a_kernel_would_read_outside_of_are_not_tried():
    with pytest.raises(ValueError, match="normalized_shape"):
        evaluate(case_of(SQUARES["RMS norm"], first_result(rounded)), (r(1, 150, 20), [150], r(20), None), {})


@pytest.mark.parametrize("op", [aten._cudnn_rnn.default, aten.lstm.input, aten.mkldnn_rnn_layer.default], ids=str)
def test_slices_of_recurrent_networks_are_not_tried(op):
    """Rows of weights that are shorter than the state: LSTM on the CPU reads behind them."""
    x = torch.empty(10**9, device="meta")
    case = Case(op, (x,), {}, (), ("output 0",), (x,), (x,), None, None)
    assert large_results._sample(case, 0) is None
