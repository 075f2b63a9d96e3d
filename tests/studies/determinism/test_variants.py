"""Calls run again in one process: what is found is what torch does, and the program gets its own results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from shadowrun.intercept.plan import make_plan
from shadowrun.intercept.untrusted.op_allowlist import Refused
from shadowrun.studies.determinism.stability import Outcome
from shadowrun.studies.determinism.variants import Dimension, Variants, _Call


def varied(program, n_repeats=2, slices=(), *, layouts=False):
    variants = Variants(n_repeats, slices, layouts)
    with variants:
        program()
    return variants


def outcome(variants, dimension, op):
    return variants.found[dimension][op].outcome


@pytest.mark.parametrize(("rows", "inner"), [(2048, 1024), (64, 512)])
def test_mm_breaks_on_the_slices_on_which_torch_does(rows, inner):
    torch.manual_seed(0)
    a, b = torch.randn(rows, inner), torch.randn(inner, 256)
    expected = {f"k={k}" for k in (1, 2, 8) if not torch.equal(torch.mm(a[:k], b), torch.mm(a, b)[:k])}
    variants = varied(lambda: torch.mm(a, b), slices=(1, 2, 8))
    assert {b.variant for b in variants.broken} == expected
    breaks = outcome(variants, Dimension.SLICES, "aten::mm") is Outcome.BREAKS
    assert breaks == bool(expected)
    assert all(0 <= agree < bits == 23 for agree, bits in (b.bits for b in variants.broken))


def test_layer_norm_and_softmax_hold_on_slices():
    x = torch.randn(512, 256)

    def program():
        F.layer_norm(x, (256,))
        torch.softmax(x, -1)

    variants = varied(program, slices=(1, 2, 8))
    assert outcome(variants, Dimension.SLICES, "aten::native_layer_norm") is Outcome.HOLDS
    assert outcome(variants, Dimension.SLICES, "aten::_softmax") is Outcome.HOLDS


def test_a_reduction_over_the_batch_has_no_slices():
    x = torch.randn(64, 8)
    variants = varied(lambda: x.sum(0), slices=(1,))
    assert "aten::sum.dim_IntList" not in variants.found.get(Dimension.SLICES, {})


@pytest.fixture
def two_threads():
    n = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(n)
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("deterministic", [True, False])
def test_index_put_with_accumulate_repeats_itself_only_if_told_to(deterministic):
    torch.manual_seed(0)
    where, values = torch.randint(0, 100, (2_000_000,)), torch.randn(2_000_000)
    torch.use_deterministic_algorithms(mode=deterministic)
    variants = varied(lambda: torch.zeros(100).index_put_((where,), values, accumulate=True), 33, layouts=True)
    found = variants.found[Dimension.REPEATS]["aten::index_put_"]
    assert (found.outcome is Outcome.HOLDS) == deterministic
    assert (found.n_distinct == 1) == deterministic
    assert found.n_runs == 33
    # What does not repeat itself is not blamed on a layout.
    assert ("aten::index_put_" in variants.found.get(Dimension.LAYOUTS, {})) == deterministic


def test_layouts_are_compared_by_value():
    x = torch.randn(2, 8, 6, 6)
    variants = varied(lambda: torch.relu(x) + 1, layouts=True)
    assert outcome(variants, Dimension.LAYOUTS, "aten::relu") is Outcome.HOLDS
    assert variants.found[Dimension.LAYOUTS]["aten::relu"].n_holds == 3


def test_attention_gets_no_layout_that_its_kernel_does_not_take():
    q = torch.randn(2, 4, 16, 8)
    variants = varied(lambda: F.scaled_dot_product_attention(q, q, q), slices=(1,), layouts=True)
    op = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert outcome(variants, Dimension.LAYOUTS, op) is Outcome.HOLDS
    assert outcome(variants, Dimension.SLICES, op) is Outcome.HOLDS


def test_random_operators_are_named_and_not_run_again():
    variants = varied(lambda: torch.rand(3))
    assert variants.random == {"aten::rand"}
    assert not variants.found


def test_the_program_gets_its_own_results_and_random_numbers():
    def program():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().sum().backward()
            optimizer.step()
        return [*model.parameters(), *model.buffers(), torch.get_rng_state()]

    plain = program()
    kept = []
    variants = varied(lambda: kept.extend(program()), 3, (1, 2), layouts=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    assert outcome(variants, Dimension.REPEATS, "aten::addmm") is Outcome.HOLDS


def test_a_signature_is_varied_once():
    x = torch.randn(4)
    variants = varied(lambda: [torch.exp(x) for _ in range(5)])
    assert variants.found[Dimension.REPEATS]["aten::exp"].n_holds == 1


def test_a_kernel_that_would_read_outside_of_a_slice_is_not_called():
    """It could end the program."""
    x, weight = torch.ones(4, 8), torch.ones(8)
    call = _Call(make_plan(torch.ops.aten._fused_rms_norm.default, 0), (x, [8], weight, None), {})
    assert call.run_changed()
    with pytest.raises(Refused, match="normalized_shape"):
        replace(call, args=(x[:, :2], [8], weight, None)).run_changed()
