from __future__ import annotations

import numpy as np
import pytest
import torch

from shadowrun.numerics.tolerance import absolute_error, accumulates, base_name, keeps_zero_sign, ulp_bound


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
    assert accumulates("aten::convolution_backward")
    assert accumulates("aten::_softmax")
    assert not accumulates("aten::gelu")
    assert keeps_zero_sign("aten::neg")
    assert keeps_zero_sign("aten::mul.Tensor")
    assert not keeps_zero_sign("aten::relu")
    assert not keeps_zero_sign("aten::mm")
    assert np.all(absolute_error("aten::gelu", 0.5, 9.0, np.array([2.0, 4.0]), 1) == [1.0, 2.0])
    assert absolute_error("aten::mm", 0.5, 9.0, np.array([2.0]), 1) == 0.0
