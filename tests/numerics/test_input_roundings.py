"""Products of rounded matrices: C rounds and adds up as torch does, but for the order of the sums."""

import pytest
import torch

from shadowrun.numerics import input_roundings
from shadowrun.numerics.input_roundings import IN_FLOAT32

# More than one block of rows and of lanes, and a rest of each.
SHAPES = [(1, 1), (7, 130), (1030, 67), (3, 33, 65), (2, 600, 40)]
IN_BITS = [name for name, rounding in IN_FLOAT32.items() if rounding.bits]
needs_c = pytest.mark.skipif(input_roundings.core is None, reason="without the C extension torch multiplies")


def matrices(shape, layout):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    # Ties of bf16 and of tf32, with both signs.
    bits = values.view(torch.int32)
    bits[..., ::3] = bits[..., ::3] & -(1 << 16) | 0x8000
    bits[..., 1::3] = bits[..., 1::3] & -(1 << 13) | 0x1000
    if layout == "columns":
        return values.mT.contiguous().mT
    return values if layout == "rows" else values.repeat_interleave(2, -2)[..., ::2, :]


@needs_c
@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("layout", ["rows", "columns", "rows with gaps"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", IN_BITS)
def test_c_rounds_as_torch_does(name, shape, layout, instructions):
    rounding, matrix = IN_FLOAT32[name], matrices(shape, layout)
    for vectors in (torch.randn(shape[-1]), torch.randn(*shape[:-2], shape[-1])):
        found = torch.zeros(shape[:-1])
        try:
            done = input_roundings.core.add_rounded_product(found, matrix, vectors, rounding.bits, instructions)
        except ValueError as error:
            pytest.skip(str(error))
        assert done is True
        factors = rounding(matrix.contiguous()).double(), vectors.double().unsqueeze(-1)
        # A value that is rounded another way is off by 2^-11 of it or more.
        limit = 1e-6 * (factors[0].abs() @ factors[1].abs()) + 1e-30
        assert ((found.unsqueeze(-1) - factors[0] @ factors[1]).abs() <= limit).all()


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_c), False])
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_both_ways_give_the_product(name, native, monkeypatch):
    if not native:
        monkeypatch.setattr(input_roundings, "core", None)
    matrix, vectors = matrices((3, 40, 70), "rows"), torch.randn(3, 70)
    found = IN_FLOAT32[name].times(matrix, vectors)
    factors = IN_FLOAT32[name](matrix).double(), vectors.double().unsqueeze(-1)
    assert torch.allclose(found.double(), (factors[0] @ factors[1]).squeeze(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_c), False])
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_a_nan_and_an_infinity_stay_what_they_are(name, native, monkeypatch):
    if not native:
        monkeypatch.setattr(input_roundings, "core", None)
    payloads = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    for value in [*payloads, torch.tensor(float("inf"))]:
        matrix = torch.ones(2, 70)
        matrix[1, 3] = value
        one, other = IN_FLOAT32[name].times(matrix, torch.ones(70))
        assert one == 70
        assert torch.isnan(other) if torch.isnan(value) else other == float("inf")


def test_what_is_not_plain_is_left_to_torch():
    found = IN_FLOAT32["bf16"].times(torch._neg_view(torch.ones(4, 8)), torch.ones(8))
    assert found.tolist() == [-8.0] * 4
    spread = torch.ones(4, 16)[:, ::2].t()[::2]
    assert IN_FLOAT32["bf16"].times(spread, torch.ones(4)).tolist() == [4.0] * 4
