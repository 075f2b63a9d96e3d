"""Calls that a file describes: what they are when they run, and while their inputs are made smaller."""

from __future__ import annotations

import pytest
import torch

from shadowrun.intercept.op_allowlist import (
    Refused,
    check_arguments,
    depends_on_values,
    operator_named,
    trusts_its_arguments,
)
from shadowrun.repro.minimise import minimised
from shadowrun.studies.sweep.recorded import UnreadableCall, sample

aten = torch.ops.aten


@pytest.mark.parametrize("seed", range(3))
def test_indices_are_looked_at_after_they_are_drawn(monkeypatch, seed):
    """Before that they are what memory held: often zeros, which are inside of a table of one row."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).zero_())
    with pytest.raises(UnreadableCall, match="not below num_weights"):
        sample("aten::embedding_dense_backward", "f32[64, 3], i64[64], 1, -1, False", seed)
    given = sample("aten::embedding_dense_backward", "f32[64, 3], i64[64], 2, -1, False", seed)
    assert int(given.args[1].max()) == 1


def _smaller(func, *args):
    """The calls that are tried to make inputs smaller, where each shows the fault."""
    tried = []

    def judge(args, kwargs):
        tried.append(args)
        return "fault"

    notes = []
    _, (smallest, _) = minimised(func, "fault", (args, {}), judge, lambda kind: kind, 20.0, notes)
    return tried, smallest, notes


def test_sizes_are_not_made_smaller_than_indices():
    """The number of rows is a size of the gradient, too: with both smaller, the kernel wrote 16 MB further on."""
    gradient, indices = torch.ones(64, 3), torch.full((64,), 63)
    tried, smallest, _ = _smaller(aten.embedding_dense_backward.default, gradient, indices, 64, -1, False)
    assert tried
    for args in tried:
        assert not args[1].numel() or int(args[1].max()) < args[2]
    assert smallest[0].numel() < gradient.numel()


def test_inputs_of_a_kernel_that_looks_at_nothing_stay():
    x = torch.ones(1, 1, 8, 8)
    indices = torch.full((1, 1, 8, 8), 63)
    args = (x, x, [3, 3], [1, 1], [1, 1], [1, 1], False, indices)
    tried, smallest, notes = _smaller(aten.max_pool2d_with_indices_backward.default, *args)
    assert not tried
    assert smallest == args
    assert "not made smaller" in notes[0]


def test_other_inputs_are_made_smaller():
    _, smallest, notes = _smaller(aten.add.Tensor, torch.ones(64, 3), torch.ones(64, 3))
    assert smallest[0].numel() == 1
    assert not notes


@pytest.mark.parametrize(
    "name",
    [
        *("_ctc_loss", "_ctc_loss.Tensor", "_embedding_bag", "max_pool2d_with_indices_backward"),
        *("max_unpool2d", "_fused_adam_.tensor_lr", "native_group_norm_backward", "lu_unpack"),
    ],
)
def test_kernels_that_believe_their_arguments(name):
    assert trusts_its_arguments(operator_named(f"aten::{name}"))
    assert not trusts_its_arguments(aten.mm.default)
    assert not trusts_its_arguments(torch.relu)


ATTENTION = ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu")


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_has_a_key_for_each_value(name):
    """The kernel for the CPU reads as many keys as there are values."""
    func = operator_named(f"aten::{name}")
    query, value = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4000, 8)
    assert depends_on_values(func)
    with pytest.raises(Refused, match="key and value"):
        check_arguments(func, (query, query, value), {})
    check_arguments(func, (query, value, value), {})
    check_arguments(func, (query, None, value), {})  # of a graph: computed later
