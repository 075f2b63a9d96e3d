"""Bitwise equality: the first rung of the verdict, and for most calls the last.

One ``memcmp`` over both memories as they lie. Measured on 2 shared cores, torch 2.13: about 1.5 µs for a small
call; at 64 MB the speed of memory (`tests/numerics/test_bits.py` prints it next to memcpy).
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.native import tensors as native
from shadowrun.numerics.form import Value  # noqa: TC001 (numerics is imported whole anyway)
from shadowrun.torch_private import is_zero_tensor, negated_view

__all__ = [
    "FEW",
    "Bools",
    "Floats",
    "Uncomparable",
    "bits_equal",
    "dense_order",
    "memcmp",
    "memcmp_with_gil",
    "memmove",
    "memmove_with_gil",
    "plainly_equal",
    "resolved",
    "same_memory",
]


Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]


FEW = 64 << 10
"""Bytes that take some 2 µs. For fewer, memcmp and memmove keep the GIL: releasing and taking it back takes longer, and
much longer where other threads wait for it."""

_free = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
# CDLL releases the GIL around each call, PyDLL holds it.
_held = ctypes.PyDLL(_free._name, handle=_free._handle)
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

memcmp, memcmp_with_gil = _free.memcmp, _held.memcmp
"""``memcmp(actual, expected, n)``: 0 where all bytes are the same."""
memmove, memmove_with_gil = _free.memmove, _held.memmove
"""``memmove(to, from, n)``."""

memcmp.argtypes = memcmp_with_gil.argtypes = memmove.argtypes = memmove_with_gil.argtypes = _ARGUMENTS
memcmp.restype = memcmp_with_gil.restype = ctypes.c_int
memmove.restype = memmove_with_gil.restype = None


class Uncomparable(ValueError):  # noqa: N818 (it is caught and becomes a status, not an error)
    """A kind of value that cannot be compared bit by bit; the message names it."""


_STRIDED = torch.strided
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_NOT_PLAIN = _QUANTIZED | {torch.complex32, torch.complex64, torch.complex128}
_PIECE = 1 << 17  # bytes
_native_plainly_equal = native.plainly_equal  # a third of the time; False after few bytes are read
# torch has no 16-byte integer; a copy of complex128 moves the bits unchanged too.
_SAME_SIZE_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits_equal(actual: Value, expected: Value) -> bool:
    """Whether two results have the same type, dtype, shape and bits.

    NaN payloads count, and -0 differs from +0. Strides do not count: only where each element lies in the index
    space. Sparse tensors are compared coalesced, quantized ones by codes and parameters.

    Args:
        actual: Tensor of any dtype and layout, Python scalar, or None.
        expected: Another.

    Raises:
        Uncomparable: For a layout or dtype whose bits cannot be reached.
    """
    if _native_plainly_equal is not None and _native_plainly_equal(actual, expected):
        return True
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return type(actual) is type(expected) and _scalar_bits(actual) == _scalar_bits(expected)
    if (
        actual.dtype is expected.dtype
        and actual.layout is expected.layout is _STRIDED
        and not (actual.is_nested or expected.is_nested)
        and actual.dtype not in _QUANTIZED
    ):
        if actual.shape != expected.shape:
            return False
        if not (actual.is_cpu and expected.is_cpu):
            return _elsewhere_equal(actual, expected)
        actual_ptr, expected_ptr = actual.data_ptr(), expected.data_ptr()
        if (
            actual.is_contiguous()
            and expected.is_contiguous()
            # A null pointer is an empty tensor or a ZeroTensor, which has no memory.
            and actual_ptr
            and expected_ptr
            and actual.is_neg() is expected.is_neg()
            and actual.is_conj() is expected.is_conj()
        ):
            return same_memory(actual_ptr, expected_ptr, actual.nbytes)
        return _strided_equal(actual, expected)
    return _other_equal(actual, expected)


def _plainly_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    # "Whether two plain tensors have the same dtype, shape, strides and bits; False also if that takes a longer
    # look.""" For real, strided, contiguous tensors, which nearly all are: two thirds of the checks of `bits_equal`.
    try:
        actual_ptr, expected_ptr = actual.data_ptr(), expected.data_ptr()
    except RuntimeError:  # sparse or opaque: cheaper than to ask each tensor for its layout
        return False
    dtype = actual.dtype
    if (
        # A null pointer is an empty tensor or a ZeroTensor, which has no memory.
        not actual_ptr
        or not expected_ptr
        or dtype is not expected.dtype
        or dtype in _NOT_PLAIN
        or not actual.is_cpu
        or not expected.is_cpu
        or actual.is_nested
        or not actual.is_contiguous()
        or not expected.is_contiguous()
        or actual.shape != expected.shape
        or actual.is_neg() is not expected.is_neg()
    ):
        return False
    # `same_memory` inline: without C, this is the hot path.
    n_bytes = actual.nbytes
    return not (memcmp_with_gil if n_bytes <= FEW else memcmp)(actual_ptr, expected_ptr, n_bytes)


plainly_equal = native.plainly_equal or _plainly_equal


def same_memory(actual: int, expected: int, n_bytes: int) -> bool:
    """Whether two places in memory hold the same bytes."""
    return not (memcmp_with_gil if n_bytes <= FEW else memcmp)(actual, expected, n_bytes)


def resolved(t: torch.Tensor) -> torch.Tensor:
    """Give a strided tensor real memory: ZeroTensors become zeros, lazy conjugation and negation are carried out.

    Nothing may read the memory of a ZeroTensor: it has none, and numpy or `torch.equal` crash the process on it.
    """
    if is_zero_tensor(t):
        return torch.zeros(t.shape, dtype=t.dtype)
    if t.is_conj() or t.is_neg():
        return t.resolve_conj().resolve_neg()
    return t


def dense_order(t: torch.Tensor) -> tuple[int, ...]:
    """Order of the dimensions in which a strided tensor lies in memory, outermost first."""
    strides = t.stride()
    return tuple(sorted(range(t.dim()), key=lambda d: -strides[d]))


def _elsewhere_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare what does not lie where it can be read: a call on the CPU may put its result on another device."""
    if actual.device != expected.device:
        return False
    # Meta tensors have no values that could differ.
    return actual.is_meta or bits_equal(actual.cpu(), expected.cpu())


def _strided_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.numel() == 0:
        return True
    if actual.is_conj() is not expected.is_conj() or actual.is_neg() is not expected.is_neg():
        actual, expected = resolved(actual), resolved(expected)
    try:
        # Integer views: copying then moves any bit pattern of any dtype, and needs no kernel for it.
        actual_ints, expected_ints = _as_ints(actual), _as_ints(expected)
        # Reading in the order of memory: a transposed tensor read row by row costs a cache line for each element.
        order = dense_order(actual)
        if order == dense_order(expected):
            return _by_pieces(actual_ints.permute(order), expected_ints.permute(order))
        return _copies_equal(actual_ints, expected_ints)
    except RuntimeError as error:
        raise Uncomparable(f"cannot read the memory of a {actual.dtype} tensor: {error}") from error


def _by_pieces(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare two tensors that lie in memory in the same order, piece by piece: what is copied stays in the cache."""
    pair = actual.stride(), expected.stride()
    for d, strides in enumerate(zip(*pair, strict=True)):
        if strides == (0, 0):  # expanded on both sides: the same element again and again
            actual, expected = actual.narrow(d, 0, 1), expected.narrow(d, 0, 1)
    if actual.nbytes <= _PIECE or (actual.is_contiguous() and expected.is_contiguous()):
        return _copies_equal(actual, expected)
    if actual.shape[0] == 1:
        return _by_pieces(actual[0], expected[0])
    if (
        actual.nbytes > actual.shape[0] * _PIECE
        or actual.stride(-1) != 1
        or expected.stride(-1) != 1
        or actual.is_complex()
    ):
        size = max(1, _PIECE * actual.shape[0] // actual.nbytes)
        pieces = zip(torch.split(actual, size), torch.split(expected, size), strict=True)
        return all(_by_pieces(x, y) for x, y in pieces)
    # Rows that lie in one piece, with gaps between them: numpy compares them where they lie.
    rows = max(1, _PIECE * actual.shape[0] // actual.nbytes)
    a, e = actual.numpy(), expected.numpy()
    return all(bool((a[i : i + rows] == e[i : i + rows]).all()) for i in range(0, len(a), rows))


def _copies_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    actual, expected = actual.contiguous(), expected.contiguous()
    return same_memory(actual.data_ptr(), expected.data_ptr(), actual.nbytes)


def _as_ints(t: torch.Tensor) -> torch.Tensor:
    if is_zero_tensor(t):
        t = torch.zeros(t.shape, dtype=t.dtype)
    if t.is_conj():  # here both tensors are conjugated: the same flag over the same bits
        t = t.conj()
    if t.is_neg():
        t = negated_view(t)
    return t.view(_SAME_SIZE_INT[t.element_size()])


def _other_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.dtype is not expected.dtype or actual.layout is not expected.layout:
        return False
    if actual.is_nested is not expected.is_nested:
        return False
    try:
        actual_parts, expected_parts = _parts(actual), _parts(expected)
    except (RuntimeError, NotImplementedError) as error:
        raise Uncomparable(f"cannot take a {actual.layout} {actual.dtype} tensor apart: {error}") from error
    return len(actual_parts) == len(expected_parts) and all(
        bits_equal(a, e) for a, e in zip(actual_parts, expected_parts, strict=True)
    )


def _parts(t: torch.Tensor) -> list[Value]:
    """Plain values that together determine a nested, sparse, opaque or quantized tensor."""
    if t.is_nested:
        return list(t.unbind())
    if t.layout is torch.sparse_coo:
        # The order and the repetition of indices are the kernel's choice.
        t = t.coalesce()
        return [*t.shape, t.indices(), t.values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [*t.shape, t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [*t.shape, t.ccol_indices(), t.row_indices(), t.values()]
    if t.layout is _STRIDED:
        codes = t.int_repr()
        # The same codes under another scale are other numbers.
        if t.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [codes, t.q_scale(), t.q_zero_point()]
        return [codes, t.q_per_channel_scales(), t.q_per_channel_zero_points(), t.q_per_channel_axis()]
    return [t.to_dense()]


def _scalar_bits(value: Value) -> object:
    if isinstance(value, float):
        # Packed: as numbers, NaN differs from itself and -0.0 equals 0.0.
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("2d", value.real, value.imag)
    return value
