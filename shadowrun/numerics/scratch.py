"""Scratch memory of one thread, so that comparing a chunk allocates nothing."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import torch

__all__ = ["BYTES", "scratch"]

BYTES: Final = 1 << 17
"""Of a chunk as float32 or float64. Both sides, their difference and one more such array fill half of 1 MB.
`native/stats_float.h` has chunks of the same length: a few figures are rounded as suits the chunk."""


class _Scratch(threading.local):
    """Raw memory; who uses it views it as what it needs.

    Attributes:
        gap: Differences.
        ratio: Relative differences, and afterwards differences of bits.
        bits: Bits that differ.
        actual, expected: Widened or altered copies of both sides.
        wide_actual, wide_expected: The same memory as float32 tensors.
        flags: A mask.
    """

    def __init__(self) -> None:
        self.gap = np.empty(BYTES, np.uint8)
        self.ratio = np.empty(BYTES, np.uint8)
        self.bits = np.empty(BYTES, np.uint8)
        self.actual = np.empty(BYTES, np.uint8)
        self.expected = np.empty(BYTES, np.uint8)
        self.wide_actual = torch.from_numpy(self.actual).view(torch.float32)
        self.wide_expected = torch.from_numpy(self.expected).view(torch.float32)
        self.flags = np.empty(BYTES // 4, np.bool_)


scratch = _Scratch()
