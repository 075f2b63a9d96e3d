"""Digests in numpy, of memory of the host: what digests tensors on the CPU where there is no C.

A call of numpy costs less than one of torch, and few of them are made: bit planes come from packed bits, and classes,
range and sum of squares from one sorted copy.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.numerics.ladder import LANES, keys
from shadowrun.recording.digest_operators import class_limits, pack_digest
from shadowrun.recording.number_formats import Encoding

if TYPE_CHECKING:
    import numpy.typing as npt

    from shadowrun.numerics.ladder import Hashes
    from shadowrun.recording.digest_operators import Packed
    from shadowrun.recording.number_formats import NumberFormat

    Ints = npt.NDArray[np.int64]
    Bits = npt.NDArray[np.unsignedinteger[Any]]

__all__ = ["digest_memory"]

_AT_ONCE: Final = 1 << 13
"""Elements: their bits, a byte each, stay in the cache."""


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
    found: dict[str, Any] = {"planes": planes, "samples": bits[positions].astype(np.uint64)}
    length = n // n_rows if n_rows else 0
    if n_ladders:
        found["rows"] = _row_planes(bits[: n_ladders * length].reshape(n_ladders, length))
    if n:
        of_piece = _of_codes if form.encoding is Encoding.CODES else _of_floats if form.mantissa else _of_integers
        with np.errstate(all="ignore"):  # squares may leave the range: `pack_digest` asks for scaled ones then
            found |= _joined([of_piece(piece, form) for piece in pieces])
    return pack_digest(form, n, length, found, functools.partial(_scaled_squares, pieces, form))


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


# -- statistics ------------------------------------------------------------------------------------


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
        "squares": float(each @ each),
    }


def _of_floats(bits: Bits, form: NumberFormat) -> dict[str, Any]:
    # As signed integers: -0 first, then ever greater negative numbers to NaN, then +0 and the positive ones.
    ordered = np.sort(bits.view(f"i{bits.itemsize}"))
    # One sort gives all classes and both ends of the range; as masks, each would read the memory again.
    below = np.searchsorted(ordered, _limits(form.width, form.mantissa))
    negative, positive = ordered[: below[2]], ordered[below[4] : below[7]]
    squares = sum(float(v @ v) for v in (_numbers(negative, form), _numbers(positive, form)))
    ends = [int(part[at]) for part in (negative, positive) if part.size for at in (0, -1)]
    size = (1 << (form.width - 1)) - 1
    ranks = [end if end >= 0 else end ^ size for end in ends]
    return {
        "counts": below,
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


def _scaled_squares(pieces: list[Bits], form: NumberFormat, scale: float) -> float:
    """Sum of the squares of all finite numbers, each divided by `scale` first."""
    total = 0.0
    for bits in pieces:
        values = _numbers(bits.view(f"i{bits.itemsize}"), form)
        values = values[np.isfinite(values)] / scale
        total += float(values @ values)
    return total
