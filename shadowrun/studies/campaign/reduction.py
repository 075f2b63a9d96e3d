"""Minimises a recipe: the fewest mutations with which a variant still shows the same root cause.

The operator's inputs are made smaller afterwards, by `shadowrun.repro.minimise`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ddmin"]

T = TypeVar("T")


def ddmin(items: Sequence[T], holds: Callable[[tuple[T, ...]], bool], max_tries: int = 200) -> tuple[T, ...]:
    """A subset from which no single item can be left out (Zeller and Hildebrandt, 2002), the order kept.

    Args:
        items: All items; `holds` is true for them.
        holds: Whether a subset still has the property.
        max_tries: Calls of `holds` after which the smallest subset so far is the answer.
    """
    left = tuple(items)
    if not left or holds(()):
        return ()
    n_parts, tries = 2, 1
    while len(left) > 1 and tries < max_tries:
        parts = _parts(left, n_parts)
        smaller = None
        for k in range(len(parts)):
            rest = tuple(item for j, part in enumerate(parts) if j != k for item in part)
            tries += 1
            if holds(rest):
                smaller = rest
                break
        if smaller is not None:
            left, n_parts = smaller, max(n_parts - 1, 2)
        elif n_parts >= len(left):
            break
        else:
            n_parts = min(2 * n_parts, len(left))
    return left


def _parts(items: tuple[T, ...], n: int) -> list[tuple[T, ...]]:
    """The items in `n` parts of nearly equal length."""
    edges = [len(items) * k // n for k in range(n + 1)]
    return [items[a:b] for a, b in itertools.pairwise(edges)]
