"""16-bit calls computed in other right ways are not called wrong, and the true bugs that this met are bugs."""

import pytest
import torch

from tests.ground_truth import short_dtypes
from tests.ground_truth.short_dtypes import NAMES, Judging, judge_larger, judge_samples


@pytest.mark.parametrize("dtype", NAMES)
def test_right_ways_match(dtype):
    mode = Judging(list(short_dtypes.WAYS))
    names = [
        n for n in short_dtypes.operators("op", dtype) if n in ("addcmul", "nn.functional.linear", "softmax", "var")
    ]
    assert list(judge_samples(mode, dtype, names, 1)) == names
    list(judge_larger(mode, dtype, ["attention", "product of 63", "layer_norm of 64 x 64", "softmax"]))
    assert sum(mode.judged.values()) > 0
    assert mode.wrong == []


def test_a_wrong_way_is_called_wrong(monkeypatch):
    monkeypatch.setitem(short_dtypes.WAYS, "twice", lambda func: lambda *a, **k: func(*a, **k) * 2)
    mode = Judging(["twice"])
    list(judge_larger(mode, "bfloat16", ["product of 63"]))
    assert mode.judged["twice"] == len(mode.wrong) == 3  # the product and both gradients


def test_matrix_exp_of_16_bits_is_nan_on_the_cpu():
    torch.manual_seed(0)
    x = torch.randn(5, 5)
    assert torch.linalg.matrix_exp(x).isfinite().all()
    for dtype in NAMES.values():
        assert torch.linalg.matrix_exp(x.to(dtype)).isnan().any()


def test_soft_margin_loss_overflows_in_float16_on_the_cpu():
    x, y = torch.tensor([-12.0]), torch.tensor([1.0])
    assert torch.nn.functional.soft_margin_loss(x, y).isclose(torch.tensor(12.0))
    assert torch.nn.functional.soft_margin_loss(x.half(), y.half()).isinf()
