"""Which elements of two sequences correspond, in their order. Linear where few of them are equal by chance."""

from __future__ import annotations

from bisect import bisect_left
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["common", "increasing", "kth_of_each"]

_MAX_PRODUCT: Final = 1 << 14
"""Product of two lengths up to which each element is compared with each."""


def common(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of a long common subsequence, in both.

    What both ends share first; then elements that are unique on both sides (patience diff); then, in short stretches,
    the longest equal blocks; in long ones the k-th of each kind.
    """
    pairs: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    waiting = [(0, len(a), 0, len(b))]
    while waiting:
        i, i_end, j, j_end = waiting.pop()
        n = _n_equal(a[i:i_end], b[j:j_end])
        pairs.append((np.arange(i, i + n), np.arange(j, j + n)))
        i, j = i + n, j + n
        n = _n_equal(a[i:i_end][::-1], b[j:j_end][::-1])
        i_end, j_end = i_end - n, j_end - n
        pairs.append((np.arange(i_end, i_end + n), np.arange(j_end, j_end + n)))
        if i == i_end or j == j_end:
            continue
        x, y = a[i:i_end], b[j:j_end]
        if len(x) * len(y) <= _MAX_PRODUCT:
            blocks = SequenceMatcher(None, x.tolist(), y.tolist(), autojunk=False).get_matching_blocks()
            pairs += [(np.arange(i + p, i + p + n), np.arange(j + q, j + q + n)) for p, q, n in blocks]
            continue
        p, q = _unique(x, y)
        if not len(p):
            p, q = kth_of_each(x, y)
            kept = increasing(q)
            pairs.append((i + p[kept], j + q[kept]))
            continue
        kept = increasing(q)
        p, q = i + p[kept], j + q[kept]
        pairs.append((p, q))
        edges_a, edges_b = np.concatenate([[i - 1], p, [i_end]]), np.concatenate([[j - 1], q, [j_end]])
        gap = (np.diff(edges_a) > 1) & (np.diff(edges_b) > 1)
        waiting += zip(
            *((edges_a[:-1][gap] + 1).tolist(), edges_a[1:][gap].tolist()),
            *((edges_b[:-1][gap] + 1).tolist(), edges_b[1:][gap].tolist()),
            strict=True,
        )
    found = np.concatenate([p for p, _ in pairs]), np.concatenate([q for _, q in pairs])
    order = np.argsort(found[0])
    return found[0][order], found[1][order]


def kth_of_each(
    a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], *, same_number: bool = False
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the k-th element of each kind in both, in the order of the first.

    Args:
        a: A sequence.
        b: Another.
        same_number: Only kinds that both have as often.
    """
    kinds, number = np.unique(np.concatenate([a, b]), return_inverse=True)
    x, y = number[: len(a)], number[len(a) :]
    n = [np.bincount(side, minlength=len(kinds)) for side in (x, y)]
    least = np.where(n[0] == n[1], n[0], 0) if same_number else np.minimum(*n)
    order = [np.argsort(side, kind="stable") for side in (x, y)]
    positions = []
    for side, counts in zip(order, n, strict=True):
        rank = np.arange(len(side)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions.append(side[rank < np.repeat(least, counts)])
    back = np.argsort(positions[0])
    return positions[0][back], positions[1][back]


def increasing(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions of a longest strictly increasing subsequence."""
    if len(values) < 2 or (np.diff(values) > 0).all():
        return np.arange(len(values))
    tails: list[int] = []
    ends: list[int] = []
    before = np.full(len(values), -1)
    for position, value in enumerate(values.tolist()):
        k = bisect_left(tails, value)
        if k == len(tails):
            tails.append(value)
            ends.append(position)
        else:
            tails[k], ends[k] = value, position
        before[position] = ends[k - 1] if k else -1
    kept, position = [], ends[-1]
    while position >= 0:
        kept.append(position)
        position = int(before[position])
    return np.array(kept[::-1])


def _n_equal(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    """Elements at the start that are equal."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def _unique(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the elements that each side has once, in the order of the first."""
    once = []
    for side in (a, b):
        kinds, first, n = np.unique(side, return_index=True, return_counts=True)
        once.append((kinds[n == 1], first[n == 1]))
    _, p, q = np.intersect1d(once[0][0], once[1][0], assume_unique=True, return_indices=True)
    p, q = once[0][1][p], once[1][1][q]
    order = np.argsort(p)
    return p[order], q[order]
