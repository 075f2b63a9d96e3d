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
            # Without `autojunk`, which leaves out elements that make up more than 1 % of 200 or more.
            blocks = SequenceMatcher(None, x.tolist(), y.tolist(), autojunk=False).get_matching_blocks()
            pairs += [(np.arange(i + p, i + p + n), np.arange(j + q, j + q + n)) for p, q, n in blocks]
            continue
        p, q = kth_of_each(x, y, once=True)
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
    return _in_order(len(a), np.concatenate([p for p, _ in pairs]), np.concatenate([q for _, q in pairs]))


def kth_of_each(
    a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], *, same_number: bool = False, once: bool = False
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the k-th element of each kind in both, in the order of the first.

    Args:
        a: A sequence.
        b: Another.
        same_number: Only kinds that both have as often.
        once: Only kinds that both have once.
    """
    values = np.concatenate([a, b])
    # Stable: within a kind, elements stay in their order, those of the first sequence before those of the second.
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    kind = np.concatenate([np.zeros(min(1, len(values)), np.int64), np.cumsum(ordered[1:] != ordered[:-1])])
    n_kinds = int(kind[-1]) + 1 if len(kind) else 0
    in_second = order >= len(a)
    kinds = kind[~in_second], kind[in_second]
    n = [np.bincount(side, minlength=n_kinds) for side in kinds]
    taken = np.minimum(*n)
    taken[(n[0] != n[1]) & (same_number or once)] = 0
    taken[(taken != 1) & once] = 0
    positions = []
    for side, counts in zip((order[~in_second], order[in_second] - len(a)), n, strict=True):
        rank = np.arange(len(side)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions.append(side[rank < np.repeat(taken, counts)])
    return _in_order(len(a), positions[0], positions[1])


def increasing(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions of a longest strictly increasing subsequence."""
    if len(values) < 2 or (np.diff(values) > 0).all():
        return np.arange(len(values))
    tails: list[int] = []
    ends: list[int] = []
    before = np.full(len(values), -1)
    for position, value in enumerate(values.tolist()):
        # Patience sorting, n log n: `tails[k]` is the least end of a subsequence of length k + 1.
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


def _in_order(
    n: int, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs of positions, sorted by the first, of which there are `n`."""
    partner = np.full(n, -1)
    partner[a] = b
    p = np.flatnonzero(partner >= 0)
    return p, partner[p]
