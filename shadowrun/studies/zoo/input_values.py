"""Values of inputs from a counter-based generator: the same bits on every machine, ISA and version of torch.

Torch's own random numbers differ by instruction set. Here the word of element ``i`` is a mix of its number and of the
input's name (SplitMix64 of Steele, Lea, Flood 2014, as a function of the counter), and becomes a float by additions
and multiplications of float64 alone, which IEEE 754 rounds alike everywhere: no logarithm, no cosine.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from shadowrun.strided import span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from shadowrun.studies.zoo.graph import Fill, Input

    Words = npt.NDArray[np.uint64]
    Floats = npt.NDArray[np.float64]

__all__ = ["EXCEPTIONAL", "KINDS", "make_input", "make_inputs"]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS: Final = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = np.uint64(30), np.uint64(27), np.uint64(31)
_TO_53_BITS: Final = np.uint64(11)
_UNIT: Final = 2.0**-53
# Of exceptional values, one element in so many is exceptional.
_RARE: Final = 8


def make_input(described: Input, seed: int = 0) -> torch.Tensor:
    """The values of an input, on the CPU.

    Args:
        described: Name, shape, dtype, fill and layout.
        seed: Other values for another seed.

    Returns:
        A tensor with its strides and offset, whose storage has zeros between the elements.

    Raises:
        ValueError: Its fill has an unknown kind.
    """
    n = torch.Size(described.shape).numel()
    # By name: an input keeps its values when calls are put in front of it.
    key = hashlib.blake2b(f"{seed}:{described.name}".encode(), digest_size=8).digest()
    words = _words(int.from_bytes(key, "little"), n)
    fill = described.fill
    maker = _MAKERS.get(fill.kind)
    if maker is None:
        raise ValueError(f"values of the unknown kind {fill.kind[:40]!r}: known are {', '.join(KINDS)}")
    # Without elements, one size may still be large: a triangle of it would be made.
    values = torch.from_numpy(maker(words, fill, described)) if n else torch.zeros(0, dtype=torch.float64)
    values = values.reshape(described.shape)
    if values.is_floating_point() and not (described.dtype.is_floating_point or described.dtype.is_complex):
        # Torch leaves open what a cast of a value out of range gives.
        values = values.clamp(*_range_of(described.dtype)) if described.dtype is not torch.bool else values
    flat = values.to(described.dtype)
    if fill.kind == "nan" and flat.is_floating_point():
        # Vectorised and plain conversions to bfloat16 write different bits for the same NaN.
        flat.masked_fill_(flat.isnan(), np.nan)
    if not described.strides and not described.offset:
        return flat.contiguous()
    strides = described.strides or flat.contiguous().stride()
    out = torch.zeros(described.offset + span(described.shape, strides), dtype=described.dtype).as_strided(
        described.shape, strides, described.offset
    )
    # An expanded input has one element in several places: the last of equal writes wins nowhere, so write one.
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)
    out[once].copy_(flat[once])
    return out


def make_inputs(inputs: Sequence[Input], seed: int = 0) -> list[torch.Tensor]:
    """The values of several inputs."""
    return [make_input(described, seed) for described in inputs]


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    # Of 64 bits, the largest value that float64 and int64 both have.
    return limits.min, min(limits.max, 2**63 - 1024)


def _words(key: int, n: int) -> Words:
    """Words of the elements 0 to n - 1."""
    with np.errstate(over="ignore"):
        z = np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN + np.uint64(key)
        return _mixed(z)


def _mixed(z: Words) -> Words:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> _SHIFTS[0])) * _MULTIPLIERS[0]
        z = (z ^ (z >> _SHIFTS[1])) * _MULTIPLIERS[1]
        return z ^ (z >> _SHIFTS[2])


def _uniform(words: Words) -> Floats:
    """Floats in [0, 1) with 53 bits."""
    return (words >> _TO_53_BITS).astype(np.float64) * _UNIT


def _normal(words: Words) -> Floats:
    """Mean 0, variance 1: a sum of four uniform numbers (Irwin-Hall), within 3.47 of zero."""
    total = _uniform(words)
    for _ in range(3):
        words = _mixed(words)
        total += _uniform(words)
    return (total - 2.0) * np.float64(1.7320508075688772)


def _uniform_between(words: Words, fill: Fill, _: Input) -> Floats:
    return fill.a + (fill.b - fill.a) * _uniform(words)


def _integers(words: Words, fill: Fill, _: Input) -> Floats | npt.NDArray[np.int64]:
    low, high = int(fill.a), int(fill.b)
    if high < low:
        raise ValueError(f"integers from {low} to {high}: there are none")
    return (words % np.uint64(high - low + 1)).astype(np.int64) + low


def _arange(words: Words, fill: Fill, described: Input) -> Floats:
    last = described.shape[-1] if described.shape else 1
    return fill.a + fill.b * (np.arange(len(words), dtype=np.float64) % max(last, 1))


def _triangle(words: Words, fill: Fill, described: Input) -> Floats:
    rows, columns = (1, 1, *described.shape)[-2:]
    below = np.tri(max(rows, 1), max(columns, 1), columns - rows, dtype=np.bool_).reshape(-1)
    return np.where(np.resize(below, len(words)), fill.a, fill.b)


def _permutation(words: Words, _: Fill, described: Input) -> npt.NDArray[np.int64]:
    last = described.shape[-1] if described.shape else 1
    return np.argsort(words.reshape(-1, max(last, 1)), axis=-1, kind="stable").astype(np.int64).reshape(-1)


def _exceptional(*values: float) -> Callable[[Words, Fill, Input], Floats]:
    """Normal values, of which one in `_RARE` is replaced by one of these."""

    def maker(words: Words, fill: Fill, described: Input) -> Floats:
        out = fill.a + fill.b * _normal(words)
        chosen = _mixed(words ^ _GOLDEN)
        rare = chosen % np.uint64(_RARE) == 0
        scaled = [v if not np.isfinite(v) or v == 0 else v * _limit(described.dtype, v) for v in values]
        which = (chosen // np.uint64(_RARE) % np.uint64(len(values))).astype(np.int64)
        out[rare] = np.asarray(scaled, np.float64)[which[rare]]
        return out

    return maker


def _limit(dtype: torch.dtype, v: float) -> float:
    """Unit of an edge: the largest number of the dtype for |v| >= 0.5, else the smallest normal one."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1.0
    info = torch.finfo(dtype)
    return info.max if abs(v) >= 0.5 else info.smallest_normal


_MAKERS: dict[str, Callable[[Words, Fill, Input], npt.NDArray[np.float64] | npt.NDArray[np.int64]]] = {
    "normal": lambda w, f, _: f.a + f.b * _normal(w),
    "uniform": _uniform_between,
    "integers": _integers,
    "constant": lambda w, f, _: np.full(len(w), f.a),
    "arange": _arange,
    "choice": lambda w, f, _: np.where(w >> np.uint64(63) == 0, f.a, f.b),
    "bools": lambda w, f, _: (_uniform(w) < f.a).astype(np.float64),
    "permutation": _permutation,
    "triangle": _triangle,
    "nan": _exceptional(np.nan),
    "infinities": _exceptional(np.inf, -np.inf),
    "zeros": _exceptional(0.0, -0.0),
    "subnormals": _exceptional(0.25, -0.25, 0.01),
    "largest": _exceptional(1.0, -1.0, 0.5),
}
EXCEPTIONAL: Final = ("nan", "infinities", "zeros", "subnormals", "largest")
"""Kinds of fills with exceptional values among normal ones."""
KINDS: Final = tuple(_MAKERS)
