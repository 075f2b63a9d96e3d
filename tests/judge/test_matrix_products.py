"""Short products in 16 bits, and operators that return uninitialised memory."""

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.types import Cause, Status

aten = torch.ops.aten


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def in_half_blocks(a, b, step=8):
    """A product whose partial sums are rounded to 16 bits."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for start in range(0, a.shape[1], step):
        total = (total.float() + a[:, start : start + step].float() @ b[start : start + step].float()).to(a.dtype)
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [17, 24, 40, 63])
def test_short_products_in_16_bits_are_rounded_once(dtype, terms, make_case):
    a, b, c = normal(30, terms, dtype=dtype), normal(terms, 40, dtype=dtype), normal(40, dtype=dtype)
    wide = a.double() @ b.double()
    right = {
        "other order": (aten.mm.default, lambda a, b: (a.flip(1).float() @ b.flip(0).float()).to(dtype), (a, b)),
        "product rounded first": (aten.addmm.default, lambda c, a, b: wide.to(dtype) + c, (c, a, b)),
    }
    for name, (op, other, args) in right.items():
        verdict, _ = Judge()(make_case(op, other, *args))
        assert verdict.status is Status.MATCH, (name, verdict)
    verdict, _ = Judge()(make_case(aten.mm.default, in_half_blocks, a, b))
    assert (verdict.status, verdict.cause) == (Status.MISMATCH, Cause.REDUCED_PRECISION), verdict
    verdict, _ = Judge()(make_case(aten.addmm.default, lambda c, a, b: in_half_blocks(a, b) + c, c, a, b))
    assert verdict.status is Status.MISMATCH, verdict


def test_an_operator_that_moves_values_and_returns_others_has_uninitialised_memory(make_case):
    generator = torch.Generator().manual_seed(5)

    def garbage(x, _factor):
        return torch.rand(aten.pixel_shuffle.default(x, 2).shape, generator=generator)

    verdict, _ = Judge()(make_case(aten.pixel_shuffle.default, garbage, normal(1, 8, 3, 3), 2))
    assert (verdict.cause, verdict.explanation) == (Cause.IMPLEMENTATION, "uninitialised memory")

    def other_places(x, factor):
        flat = aten.pixel_shuffle.default(x, factor).reshape(-1)
        return flat[torch.randperm(flat.numel(), generator=generator)].reshape(1, 2, 6, 6)

    verdict, _ = Judge()(make_case(aten.pixel_shuffle.default, other_places, normal(1, 8, 3, 3), 2))
    assert verdict.cause is Cause.NON_DETERMINISM
