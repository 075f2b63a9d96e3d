from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shadowrun import Status
from shadowrun.judge.judge import Judge
from shadowrun.judge.oracle import MANY_RUNS, NoOracle, Oracle, _Steps, bytes_needed, n_terms, widen

aten = torch.ops.aten


def test_widening_keeps_layout_and_values():
    base = torch.arange(24.0).reshape(4, 6)
    for t in (base, base.t(), base[::2, ::3], base[:1].expand(5, 6), torch.tensor(3.0), base[:0], base[1:, 2:]):
        wide = widen(t, None)
        assert (wide.dtype, wide.shape, wide.stride()) == (torch.float64, t.shape, t.stride())
        assert torch.equal(wide, t.double())
    z = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(widen(z.conj(), None), z.conj().to(torch.complex128))
    assert torch.equal(widen(torch._efficientzerotensor((2,)), None), torch.zeros(2, dtype=torch.float64))
    assert widen(torch.arange(3), None).dtype is torch.int64


def test_changes_reach_each_element_of_complex_and_sparse_inputs():
    double = lambda x: x * 2  # noqa: E731
    z = torch.randn(3, 2, dtype=torch.complex64)
    assert torch.equal(widen(z, double), z.to(torch.complex128) * 2)
    s = torch.eye(3).to_sparse()
    assert torch.equal(widen(s, double).to_dense(), torch.eye(3, dtype=torch.float64) * 2)


def test_value_and_spread_of_a_known_function(make_case):
    x = torch.tensor([1.0, 10.0, 100.0])
    case = make_case(aten.exp.default, torch.exp, x / 2)
    oracle = Oracle(case, 1 << 20)
    oracle.perturb(MANY_RUNS)
    truth = oracle.truths[0]
    assert np.allclose(truth.value, np.exp(x.double().numpy() / 2), rtol=1e-15)
    # A step of 0.5 to 1 unit roundoff of the input moves exp by x times as much.
    steps = truth.spread / (2.0**-24 * x.numpy() / 2 * truth.value)
    assert np.all((steps > 0.5) & (steps <= 1.001))


def test_perturbation_is_reproducible_and_private(make_case):
    case = make_case(aten.exp.default, torch.exp, torch.randn(10))
    state = torch.get_rng_state()
    spreads = []
    for _ in range(2):
        oracle = Oracle(case, 1 << 20)
        oracle.perturb(4)
        spreads.append(oracle.truths[0].spread)
    assert np.array_equal(*spreads)
    assert torch.equal(torch.get_rng_state(), state)


def test_dtype_arguments_are_widened(make_case):
    case = make_case(aten.sum.dim_IntList, aten.sum.dim_IntList, torch.ones(2, 3).half(), [1], dtype=torch.float32)
    assert Oracle(case, 1 << 20).truths[0].value.dtype == np.float64
    grads = make_case(
        aten._softmax_backward_data.default,
        aten._softmax_backward_data.default,
        torch.ones(2, 3),
        torch.ones(2, 3),
        1,
        torch.float32,
    )
    assert Oracle(grads, 1 << 20).truths[0].value.dtype == np.float64


def test_mutated_arguments_are_results_and_inputs_stay(make_case):
    x = torch.ones(3)
    case = make_case(aten.add_.Tensor, lambda a, b: a.add_(b), x, x)
    assert case.names == ("self",)
    oracle = Oracle(case, 1 << 20)
    oracle.perturb(2)
    assert np.array_equal(oracle.truths[0].value, [2.0, 2.0, 2.0])
    assert torch.equal(x, torch.ones(3))


def test_equal_inputs_part_under_perturbation(make_case):
    case = make_case(aten.argmax.default, aten.argmax.default, torch.tensor([[2.0, 2.0], [1.0, 2.0]]), 1)
    oracle = Oracle(case, 1 << 20)
    oracle.perturb(MANY_RUNS)
    assert oracle.truths[0].flips.tolist() == [True, False]


def test_terms(make_case):
    assert n_terms(make_case(aten.mm.default, torch.mm, torch.ones(4, 100), torch.ones(100, 6)), 0) == pytest.approx(
        100
    )
    assert n_terms(make_case(aten.sum.default, torch.sum, torch.ones(4, 100)), 0) == pytest.approx(400)


def test_terms_of_an_item_of_a_list_are_its_own(make_case):
    many = [torch.ones(4), *(torch.ones(100, 100) for _ in range(5))]
    single = make_case(aten.add.Tensor, aten.add.Tensor, many[0], many[0])
    assert n_terms(make_case(aten._foreach_add.List, aten._foreach_add.List, many, many), 0) == n_terms(single, 0)
    assert n_terms(make_case(aten._foreach_norm.Scalar, aten._foreach_norm.Scalar, many), 0) == pytest.approx(4)
    assert n_terms(make_case(aten._foreach_norm.Scalar, aten._foreach_norm.Scalar, many), 1) == pytest.approx(10_000)
    of_one = make_case(aten._foreach_mul.Tensor, aten._foreach_mul.Tensor, many, torch.tensor(2.0))
    assert n_terms(of_one, 0) == 1


def test_refusals(make_case):
    case = make_case(aten.exp.default, torch.exp, torch.ones(1000))
    with pytest.raises(NoOracle, match="it needs"):
        Oracle(case, 1000)


def test_float64_moves_by_steps_that_it_can_make(make_case):
    """Half a step is rounded away, and where a sum cancels, its own rounding would count as hundreds of units."""
    grad = torch.tensor(
        [1.33086979389190674, -1.85032117366790771, 1.82849454879760742, 0.78400707244873047, 1.12347900867462158],
        dtype=torch.float64,
    )
    out = torch.tensor([2.1, 1.3, 1.6, 5.1, 10.8], dtype=torch.float64).softmax(0)
    backward = aten._softmax_backward_data.default
    oracle = Oracle(make_case(backward, backward, grad, out, 0, torch.float64), 1 << 20)
    oracle.perturb(MANY_RUNS)
    assert oracle.truths[0].spread[-1] > 1e-16


@pytest.mark.parametrize("most", [0, 1000, 1 << 21])
def test_steps_are_one_stream_however_much_of_it_is_kept(monkeypatch, most):
    monkeypatch.setattr(_Steps, "_most", most)
    monkeypatch.setattr(_Steps, "_first", torch.empty(0, dtype=torch.float64))
    for _ in range(2):
        steps, stream = _Steps(), np.random.default_rng(0x5EED)
        for n in (3, 500, 1, 497, 0, 5000, 2):
            drawn = stream.random(n)
            assert torch.equal(steps.take(n), torch.from_numpy(np.where(drawn < 0.5, drawn - 1.0, drawn)))
            assert steps.uniform() == stream.uniform(-1, 1)
    assert _Steps._first.numel() <= most


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support|The PyTorch API of nested")
def test_memory_is_that_of_stored_values_and_of_tensors_without_strides(make_case):
    """Of a compressed matrix, what it stores; of nested tensors, which have no strides, all elements."""
    dense = torch.zeros(1000, 1000)
    dense[range(10), range(10)] = 1.0
    case = make_case(aten.relu.default, aten.relu.default, torch.ones(4))
    results = 40 * 4
    assert bytes_needed(replace(case, args=(dense.to_sparse_csr(),))) == 16 * 10 + results
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    assert bytes_needed(replace(case, args=(nested,))) == 16 * 18 + results
    # The gap between two columns is copied too.
    assert bytes_needed(replace(case, args=(torch.ones(3, 4)[:, :2],))) == 16 * 10 + results


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (-1.0, 2.0)])
def test_a_range_of_numbers_may_be_off_by_a_roundoff_of_its_ends(make_case, start, end):
    """`linspace(-1, 2, 10)` passes 0: what cancels there is 0 or half a roundoff, by the instructions."""

    def off_by(distance):
        def on_target(*args, **kwargs):
            out = torch.linspace(*args, **kwargs)
            out[3] += distance
            return out

        return make_case(torch.ops.aten.linspace.default, on_target, start, end, 10)

    right = float(torch.linspace(start, end, 10, dtype=torch.float64)[3] - torch.linspace(start, end, 10)[3])
    for distance in (right, right + 2.0**-25, right - 2.0**-25):
        if distance:
            assert Judge()(off_by(distance))[0].status is Status.MATCH
    assert Judge()(off_by(1e-5))[0].status is Status.MISMATCH
    assert Judge()(off_by(-0.25))[0].status is Status.MISMATCH
