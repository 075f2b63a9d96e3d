from __future__ import annotations

import numpy as np
import pytest
import torch

from shadowrun.intercept import torch_operators
from shadowrun.judge.factorizations import EQUATIONS
from shadowrun.operators.fact_table import ROWS
from shadowrun.operators.facts import absolute_error, base_name, facts, ulp_bound


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten::add.Tensor", "add"), ("aten::add_.Scalar", "add"), ("aten::add.out", "add"),
        ("aten::_foreach_add_.List", "add"), ("aten::_to_copy", "_to_copy"), ("aten::__and__.Tensor", "__and__"),
    ],
)  # fmt: skip
def test_variants_share_a_name(op, name):
    assert base_name(op) == name


def test_bounds():
    f = [torch.float32]
    assert ulp_bound("aten::copy_", f) == 0
    assert ulp_bound("aten::mul_.Tensor", f) == 1
    assert ulp_bound("aten::add.Tensor", f, {"alpha": 1}) == 1
    assert ulp_bound("aten::add.Tensor", f, {"alpha": 0.5}) is None
    assert ulp_bound("aten::exp", f) == 3
    assert ulp_bound("aten::mm", f) is None
    assert ulp_bound("aten::mm", [torch.int64]) == 0
    assert ulp_bound("aten::mul.Tensor", [torch.complex64]) is None
    assert ulp_bound("aten::index_put_", f, {"accumulate": True}) is None
    assert ulp_bound("aten::index_put_", f, {"accumulate": False}) == 0
    assert ulp_bound("aten::div.Tensor_mode", f, {"rounding_mode": "floor"}) is None


def test_kinds():
    assert facts("aten::convolution_backward").accumulates
    assert facts("aten::_softmax").accumulates
    assert not facts("aten::gelu").accumulates
    assert facts("aten::neg").keeps_zero_sign
    assert facts("aten::mul.Tensor").keeps_zero_sign
    assert not facts("aten::relu").keeps_zero_sign
    assert not facts("aten::mm").keeps_zero_sign
    assert np.all(absolute_error("aten::gelu", 0.5, 9.0, np.array([2.0, 4.0]), 1) == [1.0, 2.0])
    assert absolute_error("aten::mm", 0.5, 9.0, np.array([2.0]), 1) == 0.0


# -- the table -----------------------------------------------------------------------------------------

GONE = {"prim::device", "prim::layout"}
"""Rows that the dispatcher does not list: TorchScript's, which ask subclasses with `dispatch_device=True`."""


def test_each_row_is_that_of_an_operator():
    names = torch_operators.operator_names()
    variants = {name.rpartition("::")[2].partition(".")[0] for name in names}
    known = {base_name(name) for name in names} | variants
    assert set(ROWS) - known == GONE


def test_rows_are_sorted():
    assert list(ROWS) == sorted(ROWS, key=lambda name: (name.lstrip("_"), name))


def test_a_row_does_not_contradict_itself():
    for name, row in ROWS.items():
        assert bool(row.skip) + row.view + row.uninitialised <= 1, name
        assert bool(row.source) == (row.ulp_bound is not None), name
        assert row.ulp_bound == 0 or not (row.exact_unless or row.only_moves or row.depends_on_dtype), name
        assert bool(row.unique_up_to) == bool(row.by_equation or row.any_order), name
        assert not row.adds_self or row.factors, name
        assert not set(row.not_unique) & set(row.by_equation), name


def test_each_result_that_is_not_unique_has_its_equation():
    assert {name for name, row in ROWS.items() if row.by_equation} == EQUATIONS.keys()


def test_a_row_is_found_by_any_variant():
    assert facts("aten::add_.Tensor") is facts("aten::add_.Tensor")
    assert facts("add") == facts("aten::add.out")
    assert facts("aten::_foreach_add_.List").ulp_bound == 1
    assert facts("aten::_foreach_add_.List").lists
    assert facts("aten::set_.source_Tensor").skip
    assert not facts("aten::set.source_Tensor").skip


def test_an_operator_of_another_library_shares_the_numerics_only():
    ours, torchs = facts("mylib::native_batch_norm"), facts("aten::native_batch_norm")
    assert ours.norm == torchs.norm == "channel"
    assert torchs.hidden_writes == ("running_mean", "running_var")
    assert ours.hidden_writes == ()
    assert facts("c10d::add_").skip.startswith("collective")


def test_an_unknown_operator_has_a_row_of_defaults():
    row = facts("mylib::frobnicate.out")
    assert (row.name, row.ulp_bound, row.accumulates, row.skip) == ("frobnicate", None, False, "")
    assert facts("mylib::frobnicate_backward").backward
