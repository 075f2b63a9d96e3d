"""Choices from a counter: the same on every machine and version of Python, in any order of the cases.

`random.Random` promises neither for its methods, and takes ten times as long to start.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CounterRng"]

T = TypeVar("T")
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


class CounterRng:
    """A stream of choices (SplitMix64 of Steele, Lea, Flood 2014).

    Args:
        *key: What the stream depends on.
    """

    __slots__ = ("_state",)

    def __init__(self, *key: int | str) -> None:
        text = ":".join(map(str, key)).encode()
        # Hashed, since neighbouring numbers would give neighbouring states.
        self._state = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def random_bits(self) -> int:
        """64 bits."""
        self._state = z = (self._state + _GOLDEN) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """A number from 0 to `n` - 1."""
        # Lemire's multiplication in place of a remainder; its bias is n / 2**64, which no campaign can see.
        return self.random_bits() * n >> 64

    def chance(self, p: float) -> bool:
        """True with the probability `p`."""
        # Exact: a power of two rounds nothing, and Python compares integers with floats as numbers.
        return self.random_bits() < p * 2.0**64

    def choice(self, values: Sequence[T]) -> T:
        """One of the values; there must be one."""
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """All of the values in another order."""
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in values]
