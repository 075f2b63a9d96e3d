"""Memory of strided tensors, by their sizes and strides: integers only, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["contiguous_strides", "span"]


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from the first element of a tensor to its last, gaps between them included.

    Args:
        sizes: Of each dimension.
        strides: Of each dimension, in elements; none is negative.

    Returns:
        1 for a tensor without dimensions, 0 for one without elements.

    Raises:
        ValueError: There are not as many strides as sizes.
    """
    last = 0
    for n, stride in zip(sizes, strides, strict=True):
        if not n:
            return 0
        last += (n - 1) * stride
    return last + 1


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    """Strides that leave no gap, the last dimension the innermost."""
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= n
    return strides[::-1]
