from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowrun.numerics.bits import _plainly_equal, bits_equal

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex64, torch.complex128,
    torch.complex32, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64,
]  # fmt: skip


def of_bytes(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype)


def layouts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same (4, 6) values lying differently in memory."""
    ints = t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[t.itemsize])
    wide = ints.new_zeros(8, 12)
    wide[::2, ::2] = ints
    lying = {"contiguous": ints.clone(), "transposed": ints.t().contiguous().t(), "strided": wide[::2, ::2]}
    return {name: v.view(t.dtype) for name, v in lying.items()}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_flipped_bit_is_seen_in_every_layout(dtype):
    rng = np.random.default_rng(1)
    itemsize = torch.empty(0, dtype=dtype).element_size()
    data = rng.integers(0, 2 if dtype is torch.bool else 256, 24 * itemsize).astype(np.uint8)
    for left_name, left in layouts(of_bytes(data.copy(), dtype).reshape(4, 6)).items():
        for right_name, right in layouts(of_bytes(data.copy(), dtype).reshape(4, 6)).items():
            assert bits_equal(left, right), (left_name, right_name)
        for bit in (0, 8 * data.size - 8, 4 * data.size):
            flipped = data.copy()
            flipped[bit // 8] ^= 1
            for right in layouts(of_bytes(flipped, dtype).reshape(4, 6)).values():
                assert not bits_equal(left, right)


@given(st.binary(min_size=4, max_size=64).map(lambda b: b[: len(b) // 4 * 4]), st.integers(0, 511))
def test_agrees_with_bytes(data, where):
    a = np.frombuffer(data, np.uint8).copy()
    b = a.copy()
    b[(where // 8) % b.size] ^= 1 << (where % 8)
    a_t, b_t = of_bytes(a, torch.float32), of_bytes(b, torch.float32)
    assert bits_equal(a_t, of_bytes(a.copy(), torch.float32))
    assert not bits_equal(a_t, b_t)


def test_nan_payload_and_zero_sign_count():
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert bits_equal(nan, nan.clone())
    assert not bits_equal(nan[:1], nan[1:])
    assert not bits_equal(torch.tensor(0.0), torch.tensor(-0.0))
    assert not bits_equal(0.0, -0.0)
    assert bits_equal(math.nan, math.nan)


def test_type_dtype_and_shape_count():
    assert not bits_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not bits_equal(torch.zeros(2, 3), torch.zeros(3, 2))
    assert not bits_equal(1, True)
    assert not bits_equal(1, 1.0)
    assert not bits_equal(None, torch.zeros(0))
    assert bits_equal(None, None)
    assert bits_equal(torch.zeros(0, 3), torch.zeros(0, 3))
    assert not bits_equal(torch.zeros(0, 3), torch.zeros(3, 0))
    assert bits_equal(torch.tensor(3.0), torch.tensor(3.0))


def test_lazy_conjugates_and_negations_are_carried_out():
    z = torch.randn(3, 4, dtype=torch.complex64)
    assert bits_equal(z.conj(), z.conj().resolve_conj())
    assert not bits_equal(z.conj(), z)
    assert bits_equal(z.conj().imag, (-z.imag).contiguous())
    assert bits_equal(z.conj(), z.clone().conj())
    assert bits_equal(z.conj().t(), z.t().contiguous().conj())


def test_zero_tensors_have_no_memory_to_read():
    zero = torch._efficientzerotensor((3,))
    assert bits_equal(zero, torch.zeros(3))
    assert bits_equal(zero, torch._efficientzerotensor((3,)))
    assert not bits_equal(zero, torch.ones(3))


def test_tensors_without_values_have_no_memory_to_read():
    meta = torch.ones(3, device="meta")
    assert bits_equal(meta, torch.zeros(3, device="meta"))
    assert not bits_equal(meta, torch.ones(3))
    assert not bits_equal(torch.ones(3), meta)
    assert not bits_equal(meta, torch.ones(4, device="meta"))
    assert not _plainly_equal(meta, meta)


def test_gaps_between_elements_do_not_count():
    a, b = torch.zeros(4, 4), torch.zeros(4, 4)
    b[:, 3] = 1
    assert bits_equal(a[:, :3], b[:, :3])
    assert bits_equal(torch.zeros(1).expand(5), torch.zeros(5))
    assert not bits_equal(a[:, 1:], b[:, 1:])


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize", "ignore:.*quantiz")
def test_sparse_and_quantized():
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for convert in (torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc):
        assert bits_equal(convert(dense), convert(dense))
        assert not bits_equal(convert(dense), convert(dense * 2))
        assert not bits_equal(convert(dense), dense)
    q = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    assert bits_equal(q, q.clone())
    assert not bits_equal(q, torch.quantize_per_tensor(dense, 0.2, 0, torch.qint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128], ids=str)
@pytest.mark.parametrize("kind", ["rows", "columns", "planes", "channels last", "expanded", "one long row"])
def test_each_flipped_element_of_large_strided_tensors_is_seen(dtype, kind):
    """Large enough to be compared in several pieces."""
    base = torch.randn(64, 12, 640, generator=torch.Generator().manual_seed(0)).gt(0).to(dtype)

    def lying(t: torch.Tensor) -> torch.Tensor:
        return {
            "rows": t[:, :, :600],
            "columns": t[:, :, ::2],
            "planes": t[:, 1:7],
            "channels last": t.permute(2, 0, 1)[1:],
            "expanded": t[:, None].expand(64, 3, 12, 640)[:, :, :, 1:],
            "one long row": t.reshape(1, 2, -1)[:, :, 1:],
        }[kind]

    a, e = lying(base), lying(base.clone())
    assert bits_equal(a, e)
    assert bits_equal(a, e.contiguous())
    assert bits_equal(a.contiguous(), e)
    flat = [0, a.numel() // 3, a.numel() // 2, a.numel() - 1]
    for index in (np.unravel_index(i, a.shape) for i in flat):
        other = lying(base.clone())
        other[index] = 1 if other[index] == 0 else 0
        assert not bits_equal(a, other)
        assert not bits_equal(a, other.contiguous())
