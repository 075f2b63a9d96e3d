"""Digests by torch's own operators on integers, on accelerators: only digests travel.

Only operators that each backend has: shifts, comparisons, sums. Sums of int64 wrap, as the ladder's definition wants.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.numerics.ladder import LANES, keys, rungs
from shadowrun.recording.number_formats import Encoding

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shadowrun.recording.number_formats import NumberFormat

    Ints = npt.NDArray[np.int64]

__all__ = ["Packed", "class_limits", "digest_by_operators", "pack_digest"]

Packed = tuple[bytes, bytes, bytes, bytes]
"""Statistics as the last nine columns of `model.RESULT`, then rungs, samples and the rungs of rows, each uint64."""

# Elements of a temporary tensor: of int64, they take 16 MiB.
_MOST_AT_ONCE: Final = 1 << 21
_KEPT_KEYS: Final = 64
# Squares of smaller float64 numbers, and of greater ones than its inverse, may leave the range of float64.
_VANISHING: Final = 2.0**-450
_STATISTICS: Final = struct.Struct("<6q3d")


def digest_by_operators(flat: torch.Tensor, form: NumberFormat, n_rows: int, n_ladders: int, positions: Ints) -> Packed:
    """Digest a tensor where it lies.

    Args:
        flat: (n,), contiguous, of real numbers.
        form: The format of its dtype.
        n_rows: Rows that it consists of, all equally long.
        n_ladders: Of its first rows, which get a ladder each.
        positions: Of the sampled elements.

    Returns:
        Statistics, rungs, samples and the rungs of rows, as `digests.pack` has them.
    """
    # Integers of the same width: their arithmetic is exact on every device, so digests of two devices can be equal.
    bits, n = flat.view(form.ints), flat.numel()
    length = n // n_rows if n_rows else 0
    samples = bits.index_select(0, torch.from_numpy(positions).to(bits.device))
    parts = {
        "planes": _planes(bits.reshape(1, n), form.width),
        "samples": samples.to(torch.int64),
        **(_statistics(flat, bits, form) if n else {}),
    }
    if n_ladders:
        parts["rows"] = _planes(bits[: n_ladders * length].reshape(n_ladders, length), form.width)
    # One transfer: each would wait for all that the device has to do.
    fetched = torch.cat([part.reshape(-1) for part in parts.values()]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts.values()])
    found: dict[str, Any] = dict(zip(parts, np.split(fetched, ends[:-1]), strict=True))
    found |= {name: found[name].view(np.uint64) for name in ("planes", "samples")}
    if n_ladders:
        found["rows"] = found["rows"].view(np.uint64).reshape(n_ladders, -1)
    if "squares" in found:
        found |= {"low": int(found["low"][0]), "high": int(found["high"][0])}
        found["squares"] = float(found["squares"].view(np.float64)[0])
    return pack_digest(form, n, length, found, functools.partial(_scaled_squares, flat, form))


def pack_digest(
    form: NumberFormat, n: int, length: int, found: dict[str, Any], scaled_squares: Callable[[float], float]
) -> Packed:
    """A digest from what was found of a tensor.

    Args:
        form: The format of its dtype.
        n: Its elements.
        length: Elements of a row.
        found: ``planes`` (bits of the dtype,) and ``samples``, uint64; ``rows`` (n_ladders, bits of the dtype) where
            rows get ladders; if it is not empty, ``counts`` of codes, zeros, or elements below each of `class_limits`;
            but for codes ``low`` and ``high``, finite ends of the range in the order of the format, and ``squares``.
        scaled_squares: Sum of the squares of all finite elements, each divided by a number first.
    """
    by_row = rungs(found["rows"], length, form.mantissa) if "rows" in found else np.zeros(0, np.uint64)
    return (
        _pack_statistics(n, form, found, scaled_squares),
        rungs(found["planes"], n, form.mantissa).tobytes(),
        (found["samples"] & np.uint64((1 << form.width) - 1)).tobytes(),
        by_row.tobytes(),
    )


@functools.lru_cache(maxsize=_KEPT_KEYS)
def _keys(device: torch.device, first: int, n: int) -> torch.Tensor:
    """Keys of blocks: (n, 1)."""
    return torch.from_numpy(keys(first, n).view(np.int64)).to(device).reshape(n, 1)


def _planes(bits: torch.Tensor, width: int) -> torch.Tensor:
    """`plane(j)` of the ladder's definition for each row of an (r, n) tensor: (r, width), int64."""
    n_rows, n = bits.shape
    shifts = torch.arange(width, device=bits.device).reshape(width, 1)
    lanes = torch.arange(LANES, device=bits.device)
    total = torch.zeros((n_rows, width), dtype=torch.int64, device=bits.device)
    # Each element becomes `width` numbers of int64 below.
    step = _MOST_AT_ONCE // width
    rows_at_once = max(1, step // max(n, 1))
    for first in range(0, n, step):
        part = bits[:, first : first + step]
        # As many keys for tensors of similar sizes: they are kept on the device.
        n_blocks = min(step // LANES, 1 << (n // LANES).bit_length())
        weights = (_keys(bits.device, first // LANES, n_blocks) << lanes).reshape(-1)[: part.shape[1]]
        for row in range(0, n_rows, rows_at_once):
            # The shift is arithmetic, and copies the sign: one bit is left of each.
            planes = (part[row : row + rows_at_once, None, :] >> shifts) & 1
            total[row : row + rows_at_once] += planes.mul_(weights).sum(-1)
    return total


def _statistics(flat: torch.Tensor, bits: torch.Tensor, form: NumberFormat) -> dict[str, torch.Tensor]:
    """Counts, ends of the range and sum of squares, all as int64, of a tensor that is not empty."""
    if form.encoding is Encoding.CODES:
        codes = torch.arange(256, device=bits.device).to(torch.int8).reshape(256, 1)
        each = [(piece == codes).sum(1) for piece in torch.split(bits, _MOST_AT_ONCE // 32)]
        return {"counts": torch.stack(each).sum(0)}
    pairs = zip(torch.split(flat, _MOST_AT_ONCE // 8), torch.split(bits, _MOST_AT_ONCE // 8), strict=True)
    of_piece = _of_integers if form.mantissa == 0 else _of_floats
    counts, low, high, squares = (torch.stack(c) for c in zip(*(of_piece(*p, form) for p in pairs), strict=True))
    return {
        "counts": counts.sum(0),
        "low": low.amin().to(torch.int64),
        "high": high.amax().to(torch.int64),
        "squares": squares.sum().view(torch.int64),
    }


_OfPiece = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _of_integers(_: torch.Tensor, bits: torch.Tensor, form: NumberFormat) -> _OfPiece:
    order, values = bits, bits.to(torch.float64)
    if form.encoding is Encoding.UNSIGNED:
        # torch has few operators on unsigned integers; with the top bit flipped, signed ones order as these do.
        order = bits ^ -(1 << (form.width - 1))
        values = values + (bits < 0) * 2.0**form.width
    return (bits == 0).sum().reshape(1), order.amin(), order.amax(), values.square().sum()


def _of_floats(flat: torch.Tensor, bits: torch.Tensor, form: NumberFormat) -> _OfPiece:
    # By bits, not `isfinite`: a device that is wrong about NaN must not be asked about NaN.
    size, infinite = _size_mask(form), _infinite(form)
    finite = (bits & size) < infinite
    # Integers that order as the numbers do; -0 is -1.
    order = bits ^ ((bits >> (form.width - 1)) & size)
    return (
        (bits < _class_limits(bits.device, form.width, form.mantissa)).sum(1),
        torch.where(finite, order, infinite).amin(),
        torch.where(finite, order, -infinite - 1).amax(),
        torch.where(finite, flat, 0).to(torch.float64).square().sum(),
    )


def _size_mask(form: NumberFormat) -> int:
    return (1 << (form.width - 1)) - 1


def _infinite(form: NumberFormat) -> int:
    """Bits of the infinity."""
    return (1 << (form.width - 1)) - (1 << form.mantissa)


def class_limits(width: int, mantissa: int) -> list[int]:
    """Where classes of floats end, in the order of the bits as signed integers: nine; `_classes` names them."""
    least, normal = -(1 << (width - 1)), 1 << mantissa
    ends = (1, normal, -least - normal, -least - normal + 1)
    return [*(least + end for end in ends), 0, *ends]


@functools.cache
def _class_limits(device: torch.device, width: int, mantissa: int) -> torch.Tensor:
    limits = torch.tensor(class_limits(width, mantissa))
    return limits.to({16: torch.int16, 32: torch.int32, 64: torch.int64}[width]).to(device).reshape(9, 1)


def _classes(below: Ints, n: int) -> tuple[int, ...]:
    """Elements of each class, in the order of `digests.Digest`, from how many are below each limit."""
    negative_zero, negative_subnormal, _, negative_infinite, negative_nan, zero, subnormal, _, infinite, nan = np.diff(
        below, prepend=0, append=n
    ).tolist()
    return negative_nan + nan, infinite, negative_infinite, zero, negative_zero, negative_subnormal + subnormal


def _pack_statistics(
    n: int, form: NumberFormat, found: dict[str, Any], scaled_squares: Callable[[float], float]
) -> bytes:
    nan = float("nan")
    if "counts" not in found:
        return _STATISTICS.pack(*(0,) * 6, nan, nan, nan)
    counts = found["counts"]
    if form.encoding is Encoding.CODES:
        return _STATISTICS.pack(*_of_codes(counts, form))
    classes = (0, 0, 0, int(counts[0]), 0, 0) if form.mantissa == 0 else _classes(counts, n)
    # Without a finite number there is no range and no norm.
    if sum(classes[:3]) == n:
        return _STATISTICS.pack(*classes, nan, nan, nan)
    least, greatest = _number(found["low"], form), _number(found["high"], form)
    scale = max(abs(least), abs(greatest))
    if form.width == 64 and form.mantissa and scale and not _VANISHING <= scale <= 1 / _VANISHING:
        norm = scale * math.sqrt(scaled_squares(scale))
    else:
        norm = math.sqrt(found["squares"])
    return _STATISTICS.pack(*classes, least, greatest, norm)


def _number(order: int, form: NumberFormat) -> float:
    """The number at a place in the order of a format."""
    if form.encoding is Encoding.SIGNED:
        return float(order)
    if form.encoding is Encoding.UNSIGNED:
        return float(order + (1 << (form.width - 1)))
    bits = order if order >= 0 else (order ^ _size_mask(form)) & ((1 << form.width) - 1)
    dtype = "f4" if form.encoding is Encoding.BFLOAT else f"f{form.width // 8}"
    raw = bits << 16 if form.encoding is Encoding.BFLOAT else bits
    # -0 becomes +0: equal numbers shall be equal bytes.
    return float(np.array(raw, f"u{dtype[1]}").view(dtype)) + 0.0


def _scaled_squares(flat: torch.Tensor, form: NumberFormat, scale: float) -> float:
    pieces = torch.split(flat, _MOST_AT_ONCE // 8)
    finite = ((piece.view(form.ints) & _size_mask(form)) < _infinite(form) for piece in pieces)
    sums = [torch.where(f, piece / scale, 0).square().sum() for piece, f in zip(pieces, finite, strict=True)]
    return float(torch.stack(sums).sum())


def _of_codes(counts: Ints, form: NumberFormat) -> tuple[float, ...]:
    """Statistics of an 8-bit float format, from how often each of its numbers is there."""
    assert form.numbers is not None
    numbers = np.frombuffer(form.numbers, np.float64)
    negative, zero, size = np.signbit(numbers), numbers == 0, np.abs(numbers)
    finite = np.isfinite(numbers)
    masks = (
        *(np.isnan(numbers), np.isposinf(numbers), np.isneginf(numbers)),
        *(zero & ~negative, zero & negative, (size > 0) & (size < form.normal)),
    )
    classes = [int(counts[mask].sum()) for mask in masks]
    there = numbers[finite & (counts > 0)]
    if not there.size:
        return (*classes, float("nan"), float("nan"), float("nan"))
    squares = (counts * np.where(finite, numbers, 0) ** 2).sum()
    return (*classes, float(there.min()) + 0.0, float(there.max()) + 0.0, math.sqrt(squares))
