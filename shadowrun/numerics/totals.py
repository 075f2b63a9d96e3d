"""What the chunks of two tensors add up to while they are compared."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Totals"]


@dataclass(slots=True)
class Totals:
    """Statistics of the chunks seen so far; the names are those of `TensorDiff`.

    Attributes:
        squares: Sum of squared differences of the elements that are finite on both sides.
        n_finite: How many those are.
        greatest_xor: Of the bits of two elements, as unsigned numbers; only its bit length counts, and that only up
            to the size of the mantissa.
        worst: Flat index of the worst element, -1 as long as there is none.
        worst_is_class: It is NaN or infinite on one side only, which nothing finite can top.
    """

    n_different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    squares: float = 0.0
    n_finite: int = 0
    max_ulp: int = 0
    greatest_xor: int = 0
    n_nan: int = 0
    n_inf: int = 0
    n_zero_sign: int = 0
    n_subnormal: int = 0
    n_from_zero: int = 0
    worst: int = -1
    worst_is_class: bool = False

    def wants(self, gap: float) -> bool:
        """Whether a chunk with this greatest gap may have the worst element so far."""
        return gap > self.max_abs or self.worst < 0

    def offer(self, gap: float, index: int) -> None:
        """Take the element as the worst so far, unless a class difference or a greater gap is known."""
        if self.wants(gap):
            if not self.worst_is_class:
                self.worst = index
            self.max_abs = max(self.max_abs, gap)
