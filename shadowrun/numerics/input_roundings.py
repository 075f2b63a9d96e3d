"""Roundings of float32 inputs to fewer bits, as units for matrix products do, by the names in explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from shadowrun.native import core

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IN_FLOAT32", "InputRounding", "to_tf32"]


class InputRounding(NamedTuple):
    """A rounding of float32 values, which is called with them.

    Attributes:
        change: Of a tensor of float32: a new tensor.
        bits: The same in C, of the bits of a value: ``(bits + half + ((bits >> dropped) & to_even)) & kept``, as
            (half, dropped, to_even, kept). None where bits are not enough.
    """

    change: Callable[[torch.Tensor], torch.Tensor]
    bits: tuple[int, int, int, int] | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """The rounded values."""
        return self.change(values)

    def times(self, matrices: torch.Tensor, vectors: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """The rounded matrices times vectors that are not rounded, all of float32.

        Args:
            matrices: (…, m, k).
            vectors: (k,) or (…, k).
            added: (…, m), to which the product is added in place; contiguous.

        Returns:
            (…, m).
        """
        if core is not None and self.bits is not None:
            out = torch.zeros(matrices.shape[:-1], dtype=torch.float32, device="cpu") if added is None else added
            if core.add_rounded_product(out, matrices, vectors, self.bits):
                return out
        rounded = self.change(matrices)
        found = rounded @ vectors if vectors.dim() == 1 else (rounded @ vectors.unsqueeze(-1)).squeeze(-1)
        return found if added is None else added.add_(found)

    def distance(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        actual: torch.Tensor,
        vector: torch.Tensor,
        factor: float,
        added: torch.Tensor | None,
    ) -> tuple[float, float]:
        """How far ``actual @ vector + factor * rounded(left) @ (rounded(right) @ vector) + added`` is from 0.

        Args:
            left: (…, m, k).
            right: (…, k, n).
            actual: (…, m, n).
            vector: (n,).
            factor: Of the product.
            added: (…, m), contiguous.

        Returns:
            2-norm, and greatest size of an element.
        """
        if core is not None and self.bits is not None:
            # One pass, where a dozen operators of torch take as long for their overhead.
            found = core.product_sketch(left, right, actual, vector, added, factor, self.bits)
            if found is not None:
                return float(found[0]) ** 0.5, float(found[1])
        inner = self.times(right, vector).mul_(factor)
        rest = self.times(left, inner, torch.matmul(actual, vector))
        rest = (rest if added is None else rest.add_(added)).reshape(-1)
        return float(torch.dot(rest, rest)) ** 0.5, float(rest.abs_().max())


def _to_bits(x: torch.Tensor, dropped: int, half: int) -> torch.Tensor:
    """Clear the last `dropped` mantissa bits of float32 values, after adding `half`."""
    # Half a unit before the cut rounds to nearest, ties away from zero, as tf32 units do; 0 truncates.
    rounded = (x.view(torch.int32) + half).bitwise_and_(-(1 << dropped)).view(torch.float32)
    # The addition carries some NaN into the sign. The sum shows whether there is one, and reads x once.
    return torch.where(x.isnan(), x, rounded) if half and bool(x.sum().isnan()) else rounded


def _cut(dropped: int, half: int) -> InputRounding:
    return InputRounding(lambda x: _to_bits(x, dropped, half), (half, 0, 0, 0xFFFFFFFF & -(1 << dropped)))


def _to_even(x: torch.Tensor, dropped: int) -> torch.Tensor:
    """Round float32 values to nearest, ties to even, by their last `dropped` mantissa bits."""
    bits = x.view(torch.int32)
    half = (1 << (dropped - 1)) - 1
    rounded = ((bits >> dropped).bitwise_and_(1).add_(bits).add_(half)).bitwise_and_(-(1 << dropped))
    return torch.where(x.isnan(), x, rounded.view(torch.float32))


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round float64 values to the 10 bits of mantissa that tf32 keeps of float32."""
    return _to_bits(x.to(torch.float32), 13, 1 << 12).to(torch.float64)


IN_FLOAT32: Final[dict[str, InputRounding]] = {
    "tf32": _cut(13, 1 << 12),
    # As cuBLAS does on an H200.
    "tf32 (ties to even)": InputRounding(lambda x: _to_even(x, 13), (0xFFF, 13, 1, 0xFFFFE000)),
    "tf32 (truncated)": _cut(13, 0),
    # Its subnormal numbers have fewer bits, and it ends at 65504.
    "fp16": InputRounding(lambda x: x.to(torch.float16).to(torch.float32)),
    # To nearest, ties to even.
    "bf16": InputRounding(lambda x: x.to(torch.bfloat16).to(torch.float32), (0x7FFF, 16, 1, 0xFFFF0000)),
    "bf16 (truncated)": _cut(16, 0),
    "fp32": InputRounding(torch.clone),
}
"""By the name that an explanation gives to the rounding."""
