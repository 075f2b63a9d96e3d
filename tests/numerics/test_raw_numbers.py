"""Raw bits of all dtypes, decoded as torch decodes them."""

import numpy as np
import pytest
import torch

from shadowrun.numerics.raw_numbers import decoded, ulps_apart

DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("error")
def test_numbers_are_those_of_torch(name):
    dtype = getattr(torch, name)
    size = dtype.itemsize
    bits = np.random.default_rng(0).integers(0, 2 if name == "bool" else 2 ** (8 * size), 500, f"u{size}")
    t = torch.from_numpy(bits.view(f"i{size}" if size > 1 else "u1").copy()).to(INTS[size]).view(dtype)
    found = decoded(bits.astype(np.uint64), name)
    assert np.array_equal(found, t.double().numpy(), equal_nan=True)
    assert found.dtype == np.float64


def test_complex_numbers_are_two_floats():
    z = torch.randn(20, dtype=torch.complex64)
    bits = torch.view_as_real(z).reshape(-1).view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
    assert decoded(bits, "complex64").tolist() == torch.view_as_real(z).reshape(-1).double().tolist()


def test_floats_of_8_bits_are_not_decoded():
    assert decoded(np.zeros(3, np.uint64), "float8_e5m2") is None


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_distances(name):
    width = 64 if name == "float64" else 32
    one = np.array([1.0, -1.0, 0.0, -0.0, np.finfo(name).max, -np.finfo(name).max], name)
    bits = one.view(f"u{width // 8}").astype(np.uint64)
    with np.errstate(over="ignore"):
        above = np.nextafter(one, np.array(np.inf, name))
    above = above.view(f"u{width // 8}").astype(np.uint64)
    assert ulps_apart(bits, above, width).tolist() == [1] * 6
    assert ulps_apart(bits[2:3], bits[3:4], width).tolist() == [0]
    most = int(bits[4]) * 2
    assert [int(d) for d in ulps_apart(bits[4:5], bits[5:6], width)] == [most]
