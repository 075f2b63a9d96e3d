"""Rates of comparing two tensors and of digesting one, against a C function on the same memory.

Equal tensors against memcmp; different ones with all statistics, and the digest of a recording, against memcpy.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.numerics.bits import bits_equal, plainly_equal
from shadowrun.numerics.diff import diff
from shadowrun.recording.digests.tensor_digest import pack

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["measure_rates"]

SIZES = {"4 KB": 4 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
_BLOCK_S = 0.01

_libc = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
for _name in ("memcmp", "memcpy"):
    getattr(_libc, _name).argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p


def measure_rates(rounds: int) -> list[dict[str, Any]]:
    """A row for each size and function, with GB/s of one tensor and the ratio to the C function."""
    torch.manual_seed(0)
    rows = []
    for size, n_bytes in SIZES.items():
        a = torch.randn(n_bytes // 4)
        same = a.clone()
        other = a * (1 + 1e-6 * torch.randn_like(a))
        left, right, room = a.data_ptr(), same.data_ptr(), torch.empty_like(a)
        to = room.data_ptr()

        def memcmp(left: int = left, right: int = right, n: int = n_bytes) -> None:
            _libc.memcmp(left, right, n)

        def memcpy(to: int = to, left: int = left, n: int = n_bytes) -> None:
            _libc.memcpy(to, left, n)

        memcpy()
        pairs: dict[tuple[str, str, str], tuple[Callable[[], object], Callable[[], object]]] = {
            ("equal, plain", "plainly_equal", "memcmp"): (lambda a=a, b=same: plainly_equal(a, b), memcmp),
            ("equal, any kind", "bits_equal", "memcmp"): (lambda a=a, b=same: bits_equal(a, b), memcmp),
            ("different, all statistics", "diff", "memcpy"): (lambda a=a, b=other: diff("output 0", a, b), memcpy),
            ("whole ladder, all statistics", "pack", "memcpy"): (lambda a=a: pack(a), memcpy),
        }
        for (name, function, against), (ours, theirs) in pairs.items():
            rows.append(
                {"name": name, "function": function, "against": against, "size": size}
                | _compare(ours, theirs, n_bytes, rounds)
            )
    return rows


def _compare(ours: Callable[[], object], theirs: Callable[[], object], n_bytes: int, rounds: int) -> dict[str, float]:
    n_ours, n_theirs = _enough(ours), _enough(theirs)
    pairs = [(_seconds(theirs, n_theirs), _seconds(ours, n_ours)) for _ in range(rounds)]
    return {
        "gb_s": n_bytes / 1e9 / statistics.median(b for _, b in pairs),
        "gb_s_against": n_bytes / 1e9 / statistics.median(a for a, _ in pairs),
        "us": 1e6 * statistics.median(b for _, b in pairs),
        "us_against": 1e6 * statistics.median(a for a, _ in pairs),
        "rate": statistics.median(a / b for a, b in pairs),
    }


def _enough(function: Callable[[], object]) -> int:
    """Calls that take long enough for the clock."""
    function()
    return max(1, int(_BLOCK_S / max(_seconds(function, 3), 1e-9)))


def _seconds(function: Callable[[], object], n: int) -> float:
    cpu = time.process_time()
    for _ in range(n):
        function()
    return (time.process_time() - cpu) / n
