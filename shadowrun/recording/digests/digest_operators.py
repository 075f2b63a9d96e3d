"""Parts of digests by torch's own operators on integers, where the tensors lie: only digests travel.

Numbers of many tensors lie in one memory (`pending_digests`), and one pass digests them all. Only operators that each
backend has: shifts, comparisons, sums. Sums of int64 wrap, as the ladder's definition wants.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.numerics.hash_ladder import LANES, rungs
from shadowrun.recording.digests.number_formats import Encoding

if TYPE_CHECKING:
    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.digests.number_formats import NumberFormat

__all__ = [
    "FIRST_FACTOR",
    "GAMMA",
    "GROUP",
    "N_CLASSES",
    "N_ENDS",
    "ROW",
    "SCALE",
    "SECOND_FACTOR",
    "STATISTICS_BYTES",
    "VANISHING",
    "Found",
    "Packed",
    "Parts",
    "class_limits",
    "classes",
    "digest_parts",
    "pack_digests",
    "pick_sums",
]

Ints = npt.NDArray[np.int64]
Packed = tuple[bytes, bytes, bytes, bytes]
"""Statistics as the last nine columns of `model.RESULT`, then rungs, samples and the rungs of rows, each uint64."""

ROW: Final = 256
"""Elements of a row of memory: a tensor begins with a row of its own."""
_ROWS_OF_GROUP: Final = 32
GROUP: Final = ROW * _ROWS_OF_GROUP
"""Elements whose range and squares are one number each."""
N_CLASSES: Final = 6
N_ENDS: Final = 5
"""Both ends of the range and three sums of squares."""
# Rows of a pass: each temporary tensor of int64 has 8 MiB at most.
_MOST_ROWS: Final = 4096
# Squares of float64 numbers below this one, and above its inverse, are summed after scaling: they may leave the range.
VANISHING: Final = 2.0**-450
SCALE: Final = 2.0**600
_STATISTICS: Final = struct.Struct("<6q3d")
STATISTICS_BYTES: Final = _STATISTICS.size
# Of splitmix64, as signed numbers.
GAMMA, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Parts(NamedTuple):
    """Pieces of tensors of one format in a memory: (n,) each, none of them empty.

    Attributes:
        starts: Where they begin, in elements; multiples of `ROW`.
        sizes: Elements.
        firsts: Which element of its tensor each begins with; a multiple of `ROW`.
    """

    starts: Ints
    sizes: Ints
    firsts: Ints

    def split(self, size: int) -> tuple[Parts, Ints]:
        """Split into pieces of at most `size` elements; also how many pieces each part became."""
        n_pieces = -(-self.sizes // size)
        before = np.cumsum(n_pieces) - n_pieces
        skipped = (np.arange(int(n_pieces.sum())) - np.repeat(before, n_pieces)) * size
        starts, sizes, firsts = (np.repeat(column, n_pieces) for column in self)
        return Parts(starts + skipped, np.minimum(sizes - skipped, size), firsts + skipped), n_pieces


class Found(NamedTuple):
    """What is found of parts.

    Attributes:
        sums: (parts, bits of the dtype + classes), up to the end of each part: `plane(j)` of the ladder's definition,
            then elements of each class in the order of `digests.Digest`, of each code, or that are 0.
        ends: (groups, N_ENDS): lowest and highest finite number in the order of the format, and sums of the squares of
            small, other and large ones, in float64.
        samples: Bits of the sampled elements.
    """

    sums: Any
    ends: Any
    samples: Any


def digest_parts(memory: torch.Tensor, dtype: torch.dtype, form: NumberFormat, parts: Parts, samples: Ints) -> Found:
    """Digest parts of a memory where it lies.

    Args:
        memory: Integers of the width of the format.
        dtype: Of the numbers.
        form: The format of the dtype.
        parts: Pieces of tensors.
        samples: Positions of sampled elements in the memory.

    Returns:
        Tensors of int64 on the device of the memory.
    """
    rows, n_rows = parts.split(ROW)
    groups, _ = parts.split(GROUP)
    # Rows of each group; the last row of all, which has no element, fills up groups of less.
    sizes = -(-groups.sizes // ROW)
    of_groups = (np.cumsum(sizes) - sizes)[:, None] + np.arange(_ROWS_OF_GROUP)
    of_groups[np.arange(_ROWS_OF_GROUP) >= sizes[:, None]] = len(rows.starts)
    # One transfer, which does not wait for the device.
    of_rows = rows.starts // ROW, rows.sizes, rows.firsts // LANES
    columns = (*of_rows, np.cumsum(n_rows) - 1, of_groups.reshape(-1), samples)
    tables = torch.from_numpy(np.concatenate(columns)).to(memory.device, non_blocking=True)
    at, valid, block, last, of_groups_there, positions = torch.split(tables, [len(column) for column in columns])
    found = [
        _of_rows(memory.view(-1, ROW).index_select(0, a), v.reshape(-1, 1), b.reshape(-1, 1), dtype, form)
        for a, v, b in zip(*(torch.split(t, _MOST_ROWS) for t in (at, valid, block)), strict=True)
    ]
    sums, ends = (torch.cat(each) for each in zip(*found, strict=True))
    none = torch.tensor([[*_no_ends(form), 0, 0, 0]], device="cpu").to(memory.device, non_blocking=True)
    each = torch.cat([ends, none]).index_select(0, of_groups_there).reshape(-1, _ROWS_OF_GROUP, N_ENDS)
    squares = each[:, :, 2:].contiguous().view(torch.float64).sum(1).view(torch.int64)
    ends = torch.cat([each[:, :, :1].amin(1), each[:, :, 1:2].amax(1), squares], 1)
    return Found(pick_sums(sums, last), ends, memory.index_select(0, positions).to(torch.int64))


def pick_sums(sums: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """`Found.sums` from those of pieces of parts, in order, and the last piece of each part."""
    return sums.cumsum(0).index_select(0, last)


def _of_rows(
    bits: torch.Tensor, valid: torch.Tensor, block: torch.Tensor, dtype: torch.dtype, form: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Found.sums` and `Found.ends` of each row of a (n, ROW) tensor, of which the first `valid` elements count."""
    there = torch.arange(ROW, device=bits.device) < valid
    bits = torch.where(there, bits, 0)
    planes = _planes(bits, block, form.width)
    if form.encoding is Encoding.CODES:
        codes = torch.arange(256, device=bits.device).to(torch.int8).reshape(256, 1)
        pieces = zip(torch.split(bits, 128), torch.split(there, 128), strict=True)
        counts = torch.cat([((piece[:, None] == codes) & t[:, None]).sum(2) for piece, t in pieces])
        return torch.cat([planes, counts], 1), torch.zeros((len(bits), N_ENDS), dtype=torch.int64, device=bits.device)
    of_values = _of_integers if form.mantissa == 0 else _of_floats
    counts, low, high, squares = of_values(bits, there, dtype, form)
    low, high = (end.to(torch.int64).reshape(-1, 1) for end in (low, high))
    return torch.cat([planes, counts], 1), torch.cat([low, high, squares.view(torch.int64)], 1)


def _planes(bits: torch.Tensor, block: torch.Tensor, width: int) -> torch.Tensor:
    """`plane(j)` of each row, without its factors: (n, width)."""
    n = len(bits)
    # Of int64, the lower half comes first in memory.
    if width == 64:
        parts = bits.view(torch.int32).reshape(n, -1, LANES, 2).transpose(2, 3)
    else:
        parts = bits.to(torch.int32).reshape(n, -1, 1, LANES)
    # 32 numbers of 32 bits are transposed in five steps, as in Warren's Hacker's Delight: number j has bit j of each.
    turned = parts.clone(memory_format=torch.contiguous_format)
    for step, mask in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        left, right = turned.view(-1, 2, step).unbind(1)
        # The shift is arithmetic, and the mask removes the copies of the sign.
        crossed = ((left >> step) ^ right).bitwise_and_(mask)
        right.bitwise_xor_(crossed)
        left.bitwise_xor_(crossed.bitwise_left_shift_(step))
    numbers = (turned.reshape(n, turned.shape[1], -1)[:, :, :width].to(torch.int64)).bitwise_and_(0xFFFFFFFF)
    blocks = block + torch.arange(ROW // LANES, device=bits.device)
    return numbers.mul_(_keys(blocks).unsqueeze(2)).sum(1)


def _keys(blocks: torch.Tensor) -> torch.Tensor:
    """`ladder.keys`: splitmix64, whose shifts are logical."""
    z = blocks * GAMMA + GAMMA
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * FIRST_FACTOR
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * SECOND_FACTOR
    return z ^ ((z >> 31) & ((1 << 33) - 1)) | 1


_OfValues = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _of_integers(bits: torch.Tensor, there: torch.Tensor, _: torch.dtype, form: NumberFormat) -> _OfValues:
    order, values = bits, bits.to(torch.float64)
    if form.encoding is Encoding.UNSIGNED:
        # torch has few operators on unsigned integers; with the top bit flipped, signed ones order as these do.
        order = bits ^ _least(form)
        values = values + (bits < 0) * 2.0**form.width
    low, high = (torch.where(there, order, end) for end in (-_least(form) - 1, _least(form)))
    squares = values.square().sum(1, keepdim=True)
    return ((bits == 0) & there).sum(1, keepdim=True), low.amin(1), high.amax(1), _middle(squares)


def _middle(squares: torch.Tensor) -> torch.Tensor:
    none = torch.zeros_like(squares)
    return torch.cat([none, squares, none], 1)


def _of_floats(bits: torch.Tensor, there: torch.Tensor, dtype: torch.dtype, form: NumberFormat) -> _OfValues:
    # By bits, not `isfinite`: a device that is wrong about NaN must not be asked about NaN.
    size, negative, infinite = bits & _size_mask(form), bits < 0, _infinite(form)
    zero, endless = size == 0, size == infinite
    classes = (
        *(size > infinite, endless & ~negative, endless & negative, zero & ~negative & there, zero & negative),
        (size < 1 << form.mantissa) & ~zero,
    )
    finite = (size < infinite) & there
    # Integers that order as the numbers do; -0 is -1.
    order = bits ^ ((bits >> (form.width - 1)) & _size_mask(form))
    values = torch.where(finite, bits.view(dtype), 0).to(torch.float64)
    if form.width == 64:
        small, large = size < _bits_of(VANISHING), size > _bits_of(1 / VANISHING)
        scaled = torch.where(small, values * SCALE, 0), torch.where(large, values / SCALE, 0)
        each = scaled[0], torch.where(small | large, 0, values), scaled[1]
        squares = torch.stack([part.square().sum(1) for part in each], 1)
    else:
        squares = _middle(values.square().sum(1, keepdim=True))
    return (
        torch.stack(classes, 1).sum(2),
        torch.where(finite, order, infinite).amin(1),
        torch.where(finite, order, -infinite - 1).amax(1),
        squares,
    )


def _bits_of(number: float) -> int:
    return int(np.float64(number).view(np.int64))


def _no_ends(form: NumberFormat) -> tuple[int, int]:
    """Ends of the range of no numbers."""
    end = -_least(form) - 1 if form.mantissa == 0 else _infinite(form)
    return end, -end - 1


def _least(form: NumberFormat) -> int:
    return -(1 << (form.width - 1))


def _size_mask(form: NumberFormat) -> int:
    return (1 << (form.width - 1)) - 1


def _infinite(form: NumberFormat) -> int:
    """Bits of the infinity."""
    return (1 << (form.width - 1)) - (1 << form.mantissa)


# -- on the host, from what was found -----------------------------------------------------------------


def pack_digests(
    form: NumberFormat,
    sizes: Ints,
    planes: Hashes,
    counts: Ints,
    low: Ints,
    high: Ints,
    squares: npt.NDArray[np.float64],
) -> tuple[list[bytes], Hashes]:
    """Digests of tensors from what was found of them: statistics, and (n, rungs) ladders.

    Args:
        form: The format of their dtype.
        sizes: Elements of each: (n,).
        planes: `plane(j)` of the ladder's definition: (n, bits of the dtype).
        counts: As in `Found.sums`.
        low: Lowest finite number of each, in the order of the format.
        high: Highest one.
        squares: (n, 3), see `Found.ends`.
    """
    ladders = rungs(planes, sizes, form.mantissa)
    if form.encoding is Encoding.CODES:
        return [_STATISTICS.pack(*_of_codes(of_one, form)) for of_one in counts], ladders
    table = np.zeros(len(sizes), _COLUMNS)
    classes, numbers = table["classes"], table["numbers"]
    if form.mantissa == 0:
        classes[:, 3:4] = counts
    else:
        classes[:] = counts
    numbers[:, 0], numbers[:, 1], numbers[:, 2] = _numbers(low, form), _numbers(high, form), _norms(squares)
    # Without a finite number there is no range and no norm.
    numbers[classes[:, :3].sum(1) == sizes] = math.nan
    packed, size = table.tobytes(), table.itemsize
    return [packed[at : at + size] for at in range(0, len(packed), size)], ladders


_COLUMNS: Final = np.dtype([("classes", "<i8", N_CLASSES), ("numbers", "<f8", 3)])


def _norms(squares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    small, middle, large = np.sqrt(squares).T
    with np.errstate(over="ignore"):
        norms = np.hypot(np.hypot(small / SCALE, middle), large * SCALE)
    # By the order of a sum, a norm at the end of the range would be infinite here and finite there.
    limited: npt.NDArray[np.float64] = np.minimum(norms, np.finfo(np.float64).max)
    return limited


def _numbers(order: Ints, form: NumberFormat) -> npt.NDArray[np.float64]:
    """The numbers at places in the order of a format."""
    if form.encoding is Encoding.SIGNED:
        return order.astype(np.float64)
    if form.encoding is Encoding.UNSIGNED:
        least = _least(form)
        # The greatest have 64 bits.
        unsigned = order.astype(np.int64) - least if form.width < 64 else (order ^ least).view(np.uint64)
        return unsigned.astype(np.float64)
    bits = np.where(order >= 0, order, order ^ _size_mask(form)).astype(f"i{form.width // 8}")
    if form.encoding is Encoding.BFLOAT:
        numbers = (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        numbers = bits.view(f"f{form.width // 8}")
    # -0 becomes +0: equal numbers shall be equal bytes.
    with np.errstate(invalid="ignore"):
        values: npt.NDArray[np.float64] = numbers.astype(np.float64) + 0.0
    return values


def class_limits(width: int, mantissa: int) -> list[int]:
    """Where classes of floats end, in the order of the bits as signed integers: nine; `classes` names them."""
    least, normal = -(1 << (width - 1)), 1 << mantissa
    ends = (1, normal, -least - normal, -least - normal + 1)
    return [*(least + end for end in ends), 0, *ends]


def classes(below: Ints, n: int) -> tuple[int, ...]:
    """Elements of each class, in the order of `digests.Digest`, from how many are below each limit."""
    negative_zero, negative_subnormal, _, negative_infinite, negative_nan, zero, subnormal, _, infinite, nan = np.diff(
        below, prepend=0, append=n
    ).tolist()
    return negative_nan + nan, infinite, negative_infinite, zero, negative_zero, negative_subnormal + subnormal


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
    found = [int(counts[mask].sum()) for mask in masks]
    there = numbers[finite & (counts > 0)]
    if not there.size:
        return (*found, math.nan, math.nan, math.nan)
    squares = (counts * np.where(finite, numbers, 0) ** 2).sum()
    return (*found, float(there.min()) + 0.0, float(there.max()) + 0.0, math.sqrt(squares))
