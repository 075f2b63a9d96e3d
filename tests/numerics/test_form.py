from __future__ import annotations

import pytest
import torch

from shadowrun.numerics.form import dtype_name, form_difference, meta


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "f8e4m3fn"), (torch.int64, "i64"),
        (torch.uint8, "u8"), (torch.bool, "b8"), (torch.complex64, "c64"), (torch.float4_e2m1fn_x2, "f4e2m1fn_x2"),
        (torch.uint16, "u16"), (torch.qint8, "qint8"),
    ],
)  # fmt: skip
def test_names(dtype, name):
    assert dtype_name(dtype) == name
    assert dtype_name(dtype) == name  # also from the table


def test_meta_of_every_kind():
    assert str(meta(torch.zeros(8, 16))) == "f32[8, 16]"
    assert meta(torch.zeros(2, 3).t()).stride == (1, 3)
    sparse = meta(torch.eye(3).to_sparse())
    assert (sparse.layout, sparse.stride) == ("sparse_coo", ())
    assert str(meta(1.5)) == "f64[]"
    assert str(meta(True)) == "b8[]"


def test_strides_that_place_no_element_do_not_count():
    one = torch.empty_strided((1, 3), (7, 1))
    assert form_difference(one, torch.empty(1, 3)) == ""
    assert form_difference(torch.empty_strided((0, 3), (9, 9)), torch.empty(0, 3)) == ""
    assert form_difference(torch.empty(3, 2).t(), torch.empty(2, 3)) == "stride (1, 2) against (3, 1)"


def test_differences_are_named():
    assert form_difference(torch.zeros(2).half(), torch.zeros(3)) == "dtype f16 against f32, shape (2,) against (3,)"
    assert form_difference(torch.eye(2).to_sparse(), torch.eye(2)) == "layout sparse_coo against strided"
    assert form_difference(None, torch.zeros(2)) == "type None against tensor"
    assert form_difference(1, 1.0) == "type int against float"
    assert form_difference(2, 3) == ""
