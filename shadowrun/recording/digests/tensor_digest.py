"""Digests of tensors: the ladder of `numerics.hash_ladder`, counts of classes, range, and sampled elements.

Tensors on the CPU are digested by `native/digest.c`, or in numpy where there is no C extension (`digest_memory`);
tensors on an accelerator by operators on integers, where they lie (`digest_operators`).
"""

from __future__ import annotations

import functools
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from shadowrun.intercept import torchapi
from shadowrun.native import core
from shadowrun.native import tensors as native
from shadowrun.numerics.hash_ladder import LANES, keys, rungs
from shadowrun.platforms.backends import FUNCTIONALIZING
from shadowrun.platforms.torchplatform import below_autograd
from shadowrun.recording.digests.digest_operators import SCALE, VANISHING, Packed, class_limits, classes, pack_digests
from shadowrun.recording.digests.number_formats import NUMBER_FORMATS, Encoding
from shadowrun.recording.digests.pending_digests import (
    MEMORY_BYTES,
    PendingDigest,
    PendingDigests,
    positions_of_samples,
)
from shadowrun.torch_private import is_zero_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.digests.number_formats import NumberFormat

    Ints = npt.NDArray[np.int64]
    Bits = npt.NDArray[np.unsignedinteger[Any]]

__all__ = ["Digest", "Packed", "digest", "digest_memory", "digest_rows", "pack", "unpack"]

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_COMPLEX: Final = frozenset({torch.complex32, torch.complex64, torch.complex128})
_STATISTICS: Final = struct.Struct("<6q3d")


class Digest(NamedTuple):
    """What a recording keeps of a tensor's values.

    Attributes:
        rungs: The ladder: (mantissa bits + 1,), of one rung for integers and bool.
        samples: Raw bits of the elements at `model.sample_positions`, zero-extended; two of each complex element.
        n_nan, n_pos_inf, n_neg_inf, n_zero, n_neg_zero, n_subnormal: Elements of each class; `n_zero` counts +0, and
            the parts of complex elements count one by one.
        min, max: Of the finite elements; NaN where there are none.
        norm: 2-norm of the finite elements, computed in float64; likewise. Its last digits depend on the order of the
            sum.
    """

    rungs: Hashes
    samples: Hashes
    n_nan: int
    n_pos_inf: int
    n_neg_inf: int
    n_zero: int
    n_neg_zero: int
    n_subnormal: int
    min: float
    max: float
    norm: float


def digest(tensor: torch.Tensor) -> Digest | None:
    """Digest a tensor, as if it were contiguous.

    Args:
        tensor: Of any dtype, layout and device. Lazy conjugation and negation count as carried out.

    Returns:
        None for what has no plain values: meta, fake, sparse, quantized, nested and opaque tensors, and dtypes of less
        than a byte.
    """
    packed = pack(tensor)
    return None if packed is None else unpack(packed)


def digest_rows(tensor: torch.Tensor, n_rows: int) -> Hashes | None:
    """Ladders of the first indices of the leading dimension: (at most n_rows, rungs); None as of `digest`."""
    packed = pack(tensor, n_rows)
    if packed is None:
        return None
    _, rungs, _, row_rungs = packed
    return np.frombuffer(row_rungs, np.uint64).reshape(-1, len(rungs) // 8)


def unpack(packed: Packed) -> Digest:
    """The digest in numbers."""
    statistics, rungs, samples, _ = packed
    return Digest(np.frombuffer(rungs, np.uint64), np.frombuffer(samples, np.uint64), *_STATISTICS.unpack(statistics))


def _in_numpy(t: torch.Tensor, n_rows: int) -> Packed | None:
    # By address: no operator is called, so that no mode has to be set aside.
    if type(t) not in _PLAIN or not t.is_cpu or t.layout is not torch.strided:
        return None
    form = NUMBER_FORMATS.get(t.dtype)
    if form is None or t.is_quantized or t.is_nested or not t.is_contiguous() or t.is_neg() or is_zero_tensor(t):
        return None
    n, n_leading, address = t.numel(), t.shape[0] if t.dim() else 0, t.data_ptr()
    if not address and n:
        return None
    return digest_memory(address, n, form, n_leading, min(n_rows, n_leading), positions_of_samples(n, 1))


def _of_plain() -> Callable[[torch.Tensor, int], Packed | None]:
    """`pack` for plain tensors on the CPU; it returns None for others."""
    if core is None:
        return _in_numpy
    # Without `place` and `ints`, which are Python's.
    core.setup_digests(tuple(form[1:-1] for form in NUMBER_FORMATS.values()))
    return core.digest if native.plainly_equal is not None else _in_numpy


_quickly = _of_plain()


def pack(tensor: torch.Tensor, n_rows: int = 0) -> Packed | None:
    """Digest a tensor into bytes of a recording, as `digest`.

    Args:
        tensor: See `digest`.
        n_rows: Indices of the leading dimension, at most, that get a ladder each.
    """
    found = _quickly(tensor, n_rows)
    if found is not None or not _has_values(tensor):
        return found
    return torchapi.hidden_from_program(_pack, tensor, n_rows)  # type: ignore[no-any-return]


def digest_when_settled(tensor: torch.Tensor, n_rows: int, waiting: PendingDigests) -> Packed | PendingDigest | None:
    """As `pack`, without a host sync: a tensor on an accelerator is digested later, with its present values.

    Args:
        tensor: See `pack`.
        n_rows: Likewise.
        waiting: Has the digests of accelerators.
    """
    if tensor.is_cpu or not _has_values(tensor):
        return pack(tensor, n_rows)
    # Inside a mode's handler there is nothing to hide from, mostly.
    if type(tensor) in _PLAIN and not (
        torchapi.n_modes_below() or torchapi.has_function_mode() or torchapi.profiling()
    ):
        with below_autograd():
            return _pack_later(tensor, n_rows, waiting)
    return torchapi.hidden_from_program(_pack_later, tensor, n_rows, waiting)  # type: ignore[no-any-return]


def _has_values(t: torch.Tensor) -> bool:
    if t.layout is not torch.strided or t.is_quantized or t.is_nested or t.is_meta:
        return False
    if t.dtype not in NUMBER_FORMATS and t.dtype not in _COMPLEX:
        return False
    if type(t) in _PLAIN:
        return True
    with torchapi.as_in_handler(), torchapi.without_modes():
        # Fake tensors and wrappers (DTensor) name a device, but their own storage has no memory.
        try:
            storage = t.untyped_storage()
            return storage.device.type != "meta" and (storage.data_ptr() != 0 or not t.numel())
        except (RuntimeError, NotImplementedError):
            return False


def _pack(tensor: torch.Tensor, n_rows: int) -> Packed:
    n_bytes = tensor.numel() * tensor.itemsize
    found = _pack_later(tensor, n_rows, PendingDigests(min(MEMORY_BYTES, 2 * n_bytes)))  # rows lie apart
    return found.get() if isinstance(found, PendingDigest) else found


def _pack_later(tensor: torch.Tensor, n_rows: int, waiting: PendingDigests) -> Packed | PendingDigest:
    """Of a tensor that is brought into the form of real values first."""
    t = tensor.detach()
    n_leading = t.shape[0] if t.dim() else 0
    if is_zero_tensor(t):
        t = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    n_parts = 2 if t.is_complex() else 1
    t = torch.view_as_real(t) if n_parts == 2 else t
    form, n_ladders, n = NUMBER_FORMATS[t.dtype], min(n_rows, n_leading), t.numel()
    if n and not t.is_cpu and t.device.type not in FUNCTIONALIZING:
        with suppress(RuntimeError):  # no memory, say
            return waiting.add(t, n_ladders, n_leading, n_parts)
    # As integers: any bit pattern is copied as it is.
    flat = t.view(form.ints).contiguous().view(-1).cpu()
    # A name for it: the tensor must live as long as its address is used.
    if core is None:
        return digest_memory(flat.data_ptr(), n, form, n_leading, n_ladders, positions_of_samples(n, n_parts))
    return core.digest_memory(flat.data_ptr(), n, n_leading, n_ladders, form.place, n_parts)  # type: ignore[no-any-return]


# -- in numpy, for memory of the host ----------------------------------------------------------------
# A call of numpy costs less than one of torch, and few of them are made: bit planes come from packed bits, and classes,
# range and sum of squares from one sorted copy.

# Elements: their bits, a byte each, stay in the cache.
_AT_ONCE: Final = 1 << 13


class _Memory:
    """Memory as numpy takes it."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, n: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (n,), "typestr": f"<u{size}", "version": 3}


def digest_memory(address: int, n: int, form: NumberFormat, n_rows: int, n_ladders: int, positions: Ints) -> Packed:
    """Digest contiguous numbers, which must stay where they are.

    Args:
        address: Of the first one.
        n: How many.
        form: Their format.
        n_rows: Rows that they consist of, all equally long.
        n_ladders: Of the first rows, which get a ladder each.
        positions: Of the sampled elements.

    Returns:
        Statistics, rungs, samples and the rungs of rows, as `digests.pack` has them.
    """
    bits: Bits = np.asarray(_Memory(address, n, form.width // 8)) if n else np.zeros(0, f"u{form.width // 8}")
    pieces = [bits[first : first + _AT_ONCE] for first in range(0, n, _AT_ONCE)]
    planes = np.zeros(form.width, np.uint64)
    for number, piece in enumerate(pieces):
        planes += _planes(piece.reshape(1, -1), number)[0]
    length = n // n_rows if n_rows else 0
    rows = _row_planes(bits[: n_ladders * length].reshape(n_ladders, length))
    if n:
        of_piece = _of_codes if form.encoding is Encoding.CODES else _of_floats if form.mantissa else _of_integers
        found = _joined([of_piece(piece, form) for piece in pieces])
    else:
        found = {"counts": np.zeros(256 if form.encoding is Encoding.CODES else 1, np.int64)}
    low, high = (np.array([found.get(end, 0)]) for end in ("low", "high"))
    squares = np.array([found.get("squares", np.zeros(3))])
    counts = found["counts"].reshape(1, -1)
    (statistics,), ladder = pack_digests(form, np.array([n]), planes.reshape(1, -1), counts, low, high, squares)
    samples = bits[positions].astype(np.uint64).tobytes()
    return statistics, ladder.tobytes(), samples, rungs(rows, length, form.mantissa).tobytes()


def _planes(bits: Bits, block: int) -> Hashes:
    """`plane(j)` of the ladder's definition: (rows, bits of the dtype).

    Args:
        bits: (rows, n), of elements that begin at a multiple of `_AT_ONCE`.
        block: That multiple.
    """
    rows, n = bits.shape
    n_blocks = -(-n // LANES)
    padded = np.zeros((rows, n_blocks * LANES), bits.dtype)
    # Zeros have no bits, so the padding adds nothing to any plane.
    padded[:, :n] = bits
    each = np.unpackbits(padded.view(np.uint8), axis=1, bitorder="little").reshape(rows, n_blocks * LANES, -1)
    # Bit j of 32 neighbours becomes one word of plane j, which is multiplied with the key once for all.
    words = np.packbits(np.ascontiguousarray(each.transpose(0, 2, 1)), axis=2, bitorder="little").view("<u4")
    found: Hashes = (words * _keys(block, n_blocks)).sum(axis=2, dtype=np.uint64)
    return found


def _row_planes(bits: Bits) -> Hashes:
    """`_planes` of rows of any length."""
    n_rows, n = bits.shape
    planes = np.zeros((n_rows, bits.itemsize * 8), np.uint64)
    at_once = max(1, _AT_ONCE // max(n, 1))
    for row in range(0, n_rows, at_once):
        for number, first in enumerate(range(0, n, _AT_ONCE)):
            planes[row : row + at_once] += _planes(bits[row : row + at_once, first : first + _AT_ONCE], number)
    return planes


@functools.lru_cache(maxsize=256)
def _keys(block: int, n: int) -> Hashes:
    return keys(block * (_AT_ONCE // LANES), n)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of all pieces: counts and sums add up, ends of the range are those of any."""
    found = {name: sum(part[name] for part in parts) for name in parts[0] if name not in ("low", "high")}
    for name, end in (("low", min), ("high", max)):
        values = [part[name] for part in parts if part.get(name) is not None]
        found[name] = end(values) if values else 0
    return found


def _of_codes(bits: Bits, _: NumberFormat) -> dict[str, Any]:
    return {"counts": np.bincount(bits, minlength=256)}


def _of_integers(bits: Bits, form: NumberFormat) -> dict[str, Any]:
    signed = bits.view(f"i{bits.itemsize}")
    values = bits if form.encoding is Encoding.UNSIGNED else signed
    offset = 1 << (form.width - 1) if form.encoding is Encoding.UNSIGNED else 0
    # float64 first: squares of integers overflow their own dtype.
    each = values.astype(np.float64)
    return {
        "counts": np.array([bits.size - np.count_nonzero(bits)]),
        "low": int(values.min()) - offset,
        "high": int(values.max()) - offset,
        "squares": np.array([0, each @ each, 0]),
    }


def _of_floats(bits: Bits, form: NumberFormat) -> dict[str, Any]:
    # As signed integers: -0 first, then ever greater negative numbers to NaN, then +0 and the positive ones.
    ordered = np.sort(bits.view(f"i{bits.itemsize}"))
    # One sort gives all classes and both ends of the range; as masks, each would read the memory again.
    below = np.searchsorted(ordered, _limits(form.width, form.mantissa))
    negative, positive = ordered[: below[2]], ordered[below[4] : below[7]]
    squares = _squares(_numbers(negative, form), form) + _squares(_numbers(positive, form), form)
    ends = [int(part[at]) for part in (negative, positive) if part.size for at in (0, -1)]
    size = (1 << (form.width - 1)) - 1
    ranks = [end if end >= 0 else end ^ size for end in ends]
    return {
        "counts": np.array(classes(below, bits.size)),
        "low": min(ranks, default=None),
        "high": max(ranks, default=None),
        "squares": squares,
    }


@functools.cache
def _limits(width: int, mantissa: int) -> npt.NDArray[Any]:
    return np.array(class_limits(width, mantissa), f"i{width // 8}")


def _numbers(ordered: npt.NDArray[Any], form: NumberFormat) -> npt.NDArray[np.float64]:
    if form.encoding is Encoding.BFLOAT:
        return (ordered.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return ordered.view(f"f{ordered.itemsize}").astype(np.float64)


def _squares(values: npt.NDArray[np.float64], form: NumberFormat) -> npt.NDArray[np.float64]:
    """Sums of the squares of small, other and large numbers; see `digest_operators.Found`."""
    if form.width < 64:
        return np.array([0, values @ values, 0])
    size = np.abs(values)
    small, large = size < VANISHING, size > 1 / VANISHING
    parts = values[small] * SCALE, values[~small & ~large], values[large] / SCALE
    return np.array([part @ part for part in parts])
