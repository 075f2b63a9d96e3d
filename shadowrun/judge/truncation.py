"""Results of 16 bits that are the truth truncated to their dtype, not rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.numerics.excess import Truth

__all__ = ["count_truncated", "is_truncated"]

TELLING: Final = 8
SHARE_TRUNCATED: Final = 0.95
"""Of the elements on which truncation and rounding differ: sums in float32 lie on the other side of a number once in
some thousand times."""


def count_truncated(actual: torch.Tensor, truth: Truth) -> tuple[int, int, int] | None:
    """On how many elements truncation and rounding differ, how many of these are truncated, how many others are right.

    None for another dtype than those of 16 bits, and for an oracle that is no float64.
    """
    o = torch.from_numpy(truth.value) if truth.value.dtype == np.float64 else None
    if o is None or o.numel() != actual.numel() or actual.dtype not in (torch.float16, torch.bfloat16):
        return None
    # Where rounding to nearest goes towards zero, truncation gives the same number: those elements show nothing.
    nearest = o.to(actual.dtype)
    away = nearest.to(torch.float64).abs() > o.abs()
    # Magnitude and sign are apart: one less is one nearer to zero.
    truncated = (nearest.view(torch.int16) - away.to(torch.int16)).view(actual.dtype)
    telling = away & torch.isfinite(nearest)
    return int(telling.sum()), int((telling & (actual == truncated)).sum()), int((~away & (actual == nearest)).sum())


def is_truncated(result_diff: ResultDiff, truth: Truth) -> bool:
    """Whether the target's result is truncated where that shows."""
    counts = count_truncated(result_diff.actual, truth)
    return counts is not None and counts[0] >= TELLING and counts[1] >= SHARE_TRUNCATED * counts[0]
