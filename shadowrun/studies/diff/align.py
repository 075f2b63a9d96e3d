"""Which call of one recording is which call of another. Calls that only one of them has are rows, and no error.

Calls are matched by key (rank, step, phase, module, operator, how often it was called there before). Where the two
recordings do not have the same number of such calls, the digests of their inputs decide, then their order: a call that
was inserted shifts all counts after it. What is left is matched with counterparts: operators of different devices that
compute the same, such as the kernels of attention.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shadowrun.recording.model import NONE, Key

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from shadowrun.recording.model import Recording

__all__ = ["FAMILIES", "Alignment", "align", "family"]

FAMILIES: Final = {
    "attention": ("attention",),
    "batch norm": ("batch_norm",),
    "layer norm": ("layer_norm",),
    "group norm": ("group_norm",),
    "convolution": ("conv",),
    "recurrent": ("lstm", "gru", "rnn"),
    "product": ("addmm", "linear", "baddbmm", "bmm", "mm", "mv", "matmul", "dot"),
    "dropout": ("dropout",),
    "copy": ("_to_copy", "clone", "contiguous", "copy_"),
}
"""Operators that devices use for the same computation, by parts of their names; a backward is never a forward."""

_MAX_SEQUENCE: Final = 20_000
"""Calls of one phase of one step above which sequences are matched by operator only: the time is quadratic."""


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Which calls correspond.

    Attributes:
        pairs: Call numbers in the first and the second recording, in the order of the first: (n, 2).
        only_first: Calls that the second recording lacks.
        only_second: Calls that the first recording lacks.
        by: How many pairs each way of matching found: ``key``, ``inputs``, ``order``, ``counterpart``.
    """

    pairs: npt.NDArray[np.int64]
    only_first: npt.NDArray[np.int64]
    only_second: npt.NDArray[np.int64]
    by: Mapping[str, int]


def align(first: Recording, second: Recording, modules: Mapping[str, str] | None = None) -> Alignment:
    """Match the calls of two recordings.

    Args:
        first: Of one platform.
        second: Of another.
        modules: Glob patterns of module paths of the second recording to paths of the first; see `renamed`.
    """
    keys = [_key(key) for key in first.call_keys()]
    others = [_key(key, modules or {}) for key in second.call_keys()]
    if keys == others:
        n = np.arange(len(keys), dtype=np.int64)
        return Alignment(np.stack([n, n], axis=1), n[:0], n[:0], {"key": len(keys)})
    return _Matching(first, second, keys, others).run()


def family(op: str) -> str:
    """Family of an operator with counterparts on other devices, or its own name without the overload."""
    name = op.partition("::")[2].partition(".")[0]
    backward = "backward" in name
    for title, parts in FAMILIES.items():
        if any(part in name for part in parts):
            return f"{title} backward" if backward else title
    return name


def renamed(module: str, modules: Mapping[str, str]) -> str:
    """A module path under the names of the other recording.

    A pattern's stars stand for parts of the path, in order: ``{"layers.*.attn": "h.*.attention"}``. Without a star, the
    pattern also stands for what lies below.
    """
    for pattern, name in modules.items():
        if "*" not in pattern:
            if module == pattern or module.startswith(pattern + "."):
                return name + module[len(pattern) :]
        elif fnmatchcase(module, pattern) and (parts := _stars(module, pattern)) is not None:
            for part in parts:
                name = name.replace("*", part, 1)
            return name
    return module


def _stars(module: str, pattern: str) -> list[str] | None:
    import re

    found = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), module)
    return None if found is None else list(found.groups())


def _key(key: Key, modules: Mapping[str, str] = {}) -> tuple[Any, ...]:
    return (key.rank, key.step, key.phase, renamed(key.module, modules) if modules else key.module, key.op,
            key.occurrence)  # fmt: skip


class _Matching:
    """Matches what is unmatched, in ever weaker ways."""

    def __init__(
        self, first: Recording, second: Recording, keys: Sequence[tuple[Any, ...]], others: Sequence[tuple[Any, ...]]
    ) -> None:
        self._recordings = first, second
        self._keys = keys, others
        self._partner = np.full(len(keys), NONE, np.int64)
        self._taken = np.zeros(len(others), bool)
        self._by: dict[str, int] = defaultdict(int)

    def run(self) -> Alignment:
        groups = self._grouped(lambda key, _: key[:5])
        for ours, theirs in groups:
            # As many calls of this operator in this module and phase: their order is their identity.
            if len(ours) == len(theirs):
                self._take(ours, theirs, "key")
        for ours, theirs in self._grouped(lambda key, _: key[:5]):
            a, b = ([self._inputs(side, c) for c in calls] for side, calls in enumerate((ours, theirs)))
            self._sequence(ours, theirs, a, b, "inputs")
        for ours, theirs in self._grouped(lambda key, _: key[:5]):
            n = min(len(ours), len(theirs))
            self._take(ours[:n], theirs[:n], "order")
        # Modules may have other names, and operators other ones on this device.
        for by, place in (("inputs", 3), ("counterpart", 4), ("counterpart", 3)):
            for ours, theirs in self._grouped(lambda key, _, n=place: key[:n]):
                if by == "inputs":
                    names = ([(self._keys[s][c][4], self._inputs(s, c)) for c in calls]
                             for s, calls in enumerate((ours, theirs)))  # fmt: skip
                else:
                    names = ([family(self._keys[s][c][4]) for c in calls] for s, calls in enumerate((ours, theirs)))
                self._sequence(ours, theirs, *names, by)
        pairs = np.stack([np.arange(len(self._partner)), self._partner], axis=1)
        matched = self._partner != NONE
        return Alignment(pairs[matched], np.flatnonzero(~matched), np.flatnonzero(~self._taken), dict(self._by))

    def _grouped(self, of: Any) -> Iterator[tuple[list[int], list[int]]]:
        """Unmatched calls of both recordings that have a part of their keys in common."""
        sides: tuple[dict[Hashable, list[int]], ...] = (defaultdict(list), defaultdict(list))
        free = np.flatnonzero(self._partner == NONE), np.flatnonzero(~self._taken)
        for side in (0, 1):
            for call in free[side].tolist():
                sides[side][of(self._keys[side][call], call)].append(call)
        for group, ours in sides[0].items():
            if theirs := sides[1].get(group):
                yield ours, theirs

    def _inputs(self, side: int, call: int) -> tuple[int, ...]:
        """Digests of the inputs of a call."""
        recording = self._recordings[side]
        found = []
        for row in recording.inputs_of(call).tolist():
            ladder = recording.ladder(row) if row != NONE else ()
            found.append(int(ladder[0]) if len(ladder) else NONE)
        return tuple(found)

    def _sequence(self, ours: list[int], theirs: list[int], a: list[Any], b: list[Any], by: str) -> None:
        """Match the longest common subsequences."""
        if max(len(ours), len(theirs)) > _MAX_SEQUENCE:
            return
        for i, j, n in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
            self._take(ours[i : i + n], theirs[j : j + n], by)

    def _take(self, ours: list[int], theirs: list[int], by: str) -> None:
        if ours:
            self._partner[ours] = theirs
            self._taken[theirs] = True
            self._by[by] += len(ours)
