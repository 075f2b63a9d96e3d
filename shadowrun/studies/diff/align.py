"""Which call of one recording is which call of another. Calls that only one of them has are rows, and no error.

Calls are matched by key (rank, step, phase, module, operator, and the order among these) where both recordings have as
many of them. Of the others, those between the same matched calls are compared: by the digests of their inputs, then by
operator and form in their order, and last with counterparts, which are operators of different devices, or of different
versions of torch, for the same computation, such as the kernels of attention.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.numerics.hash_ladder import mix
from shadowrun.recording.model import NONE, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    import numpy.typing as npt

    from shadowrun.recording.model import Context
    from shadowrun.studies.diff.values import Values

__all__ = [
    "FAMILIES",
    "Alignment",
    "align",
    "common_subsequence",
    "family",
    "kth_of_each",
    "longest_increasing",
    "matches",
    "renamed",
]

Calls = Any  # npt.NDArray[np.int64], (n,)

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
    "log_softmax": ("log_softmax",),
    "softmax": ("softmax",),
}
"""Operators that devices use for the same computation, by parts of their names; a backward is never a forward."""

# Operators of which versions of torch use now one, now the other: `linear` does.
_RESHAPES: Final = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy"})


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


def align(first: Values, second: Values, modules: Mapping[str, str] | None = None) -> Alignment:
    """Match the calls of two recordings.

    Args:
        first: Of one platform.
        second: Of another.
        modules: Glob patterns of module paths of the second recording to paths of the first; see `renamed`.
    """
    return _Matching(_Labels(first, second, modules or {})).run()


def family(op: str) -> str:
    """Family of an operator with counterparts on other devices, or its own name without the overload."""
    name = op.rpartition("::")[2].partition(".")[0]
    if name in _RESHAPES:
        return "reshape"
    # `_scaled_dot_product_flash_attention_backward` has all words of the forward in its name.
    backward = "backward" in name
    # In this order: `_scaled_dot_product_attention_math` has the "dot" of products in its name too.
    for title, parts in FAMILIES.items():
        if any(part in name for part in parts):
            return f"{title} backward" if backward else title
    return name


def renamed(module: str, modules: Mapping[str, str]) -> str:
    """A module path under the names of the other recording.

    A pattern's stars stand for parts of the path, in order: ``{"layers.*.attn": "h.*.attention"}``. What lies below a
    module is renamed with it.
    """
    for pattern, name in modules.items():
        if (found := _stars(pattern, module)) is not None:
            parts, below = found
            # A name may have fewer stars than its pattern.
            first, *pieces = name.split("*")
            return first + "".join(part + piece for part, piece in zip(parts, pieces, strict=False)) + below
    return module


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of `renamed` is that of a module, or of one that it lies in."""
    return _stars(pattern, module) is not None


def _stars(pattern: str, module: str) -> tuple[list[str], str] | None:
    """What the stars of a pattern stand for, each for as little as it can, and what lies below; None if it differs."""
    # No regular expression: with twenty stars, that of a path that nearly fits would take hours.
    first, *pieces = pattern.split("*")
    if not module.startswith(first):
        return None
    at, parts = len(first), []
    for number, piece in enumerate(pieces, 1):
        found = module.find(piece, at)
        # The last piece ends the path, or the name of a module in it.
        while number == len(pieces) and found >= 0 and not _is_end(module, found + len(piece)):
            found = module.find(piece, found + 1)
        if found < 0:
            return None
        parts.append(module[at:found])
        at = found + len(piece)
    return (parts, module[at:]) if _is_end(module, at) else None


def _is_end(module: str, at: int) -> bool:
    """Whether the path, or the name of one of its modules, ends there."""
    return module[at : at + 1] in ("", ".")


class _Labels:
    """Numbers of calls: two calls that have a label in common have the same number, in both recordings."""

    def __init__(self, first: Values, second: Values, modules: Mapping[str, str]) -> None:
        self.sides = first, second
        self._modules = modules
        ranks = [
            np.repeat([p.rank for p in v.recording.processes], [p.n_calls for p in v.recording.processes])
            for v in self.sides
        ]
        steps = [v.recording.calls["step"].astype(np.int64) for v in self.sides]
        phases = self.of_context(lambda _, c: c.phase)
        # Never matched across these: a call of step 3 is not a late call of step 2, whatever its inputs are.
        self.segment = _joined(_joined(ranks, steps), phases)
        self.module = self.of_context(self._module)
        self.op = self.of_context(lambda _, c: c.op)

    def _module(self, side: int, context: Context) -> str:
        return renamed(context.module, self._modules) if side else context.module

    def of_context(self, of: Callable[[int, Context], Hashable]) -> list[Calls]:
        """Numbers of something that the context of a call says, for all calls of both sides."""
        numbers: dict[Hashable, int] = {}
        found = []
        for side, values in enumerate(self.sides):
            recording = values.recording
            # One label for each context, not for each call: contexts are few, and calls may be a million.
            by_context = [numbers.setdefault(of(side, c), len(numbers)) for c in recording.contexts]
            found.append(np.array(by_context, np.int64)[recording.calls["context"]])
        return found

    def keys(self) -> list[Calls]:
        """Segment, module and operator."""
        return _joined(_joined(self.segment, self.module), self.op)

    def inputs(self) -> list[Calls]:
        """The values of the inputs."""
        return [v.inputs_identity().view(np.int64) for v in self.sides]

    def results(self) -> list[Calls]:
        """The values of the results and written arguments; of a call without digests, a number of its own."""
        found = []
        for side, values in enumerate(self.sides):
            made = values.results_identity()
            # Even for one side, odd for the other: calls without digests match none.
            alone = mix(2 * np.arange(len(made), dtype=np.uint64) + np.uint64(side))
            found.append(np.where(made == 0, alone, made).view(np.int64))
        return found

    def forms(self) -> list[Calls]:
        """The form of the last result or written argument."""
        found = []
        for values in self.sides:
            recording = values.recording
            rows = np.flatnonzero(recording.results["kind"] != Kind.OVERWRITTEN)
            forms = np.full(len(recording.calls), NONE, np.int64)
            forms[values.call[rows]] = values.form[rows]  # in their order: the last one stays
            found.append(forms)
        return found


class _Matching:
    """Matches what is unmatched, in ever weaker ways."""

    def __init__(self, labels: _Labels) -> None:
        self._labels = labels
        self._partner = np.full(len(labels.op[0]), NONE, np.int64)
        self._taken = np.zeros(len(labels.op[1]), bool)
        self._by: dict[str, int] = {}
        self._anchors = np.zeros((0, 2), np.int64)

    def run(self) -> Alignment:
        labels = self._labels
        keys = labels.keys()
        # As many calls of this operator in this module, phase and step: their order is their identity.
        self._take(*kth_of_each(*keys, same_number=True), "key")
        if self._is_left():
            pairs = self._pairs()
            # Calls that changed their order on the other side separate no gaps: without them the anchors rise on both
            # sides.
            self._anchors = pairs[longest_increasing(pairs[:, 1])]
            self._between_anchors(keys)
        if self._is_left():
            a, b = (np.flatnonzero(free) for free in self._free())
            # What is left has no place between matched calls: the k-th of one operator in a module is the best that
            # can be said.
            p, q = kth_of_each(keys[0][a], keys[1][b])
            self._take(a[p], b[q], "order")
        a, b = (np.flatnonzero(free) for free in self._free())
        return Alignment(self._pairs(), a, b, {by: n for by, n in self._by.items() if n})

    def _between_anchors(self, keys: list[Calls]) -> None:
        """Match calls that lie between the same calls on both sides."""
        labels = self._labels
        inputs, forms = labels.inputs(), labels.forms()
        in_any_module = _joined(labels.segment, labels.op)
        in_module = _joined(labels.segment, labels.module)
        families = _joined(labels.segment, labels.of_context(lambda _, c: family(c.op)))
        # From what says most to what says least: a pair that an earlier label has found is not looked at again.
        for by, label in (
            ("inputs", _joined(keys, inputs)),
            ("order", _joined(keys, forms)),
            ("order", keys),
            # Modules may have other names, and operators other ones on this device.
            ("inputs", _joined(in_any_module, inputs)),
            ("order", _joined(in_any_module, forms)),
            # An operator that has another name in another version of torch.
            ("counterpart", _joined(_joined(in_module, inputs), labels.results())),
            ("counterpart", _joined(families, labels.module)),
            ("counterpart", _joined(families, forms)),
        ):
            self._in_gaps(label, by)

    def _in_gaps(self, label: list[Calls], by: str) -> None:
        free = [np.flatnonzero(free) for free in self._free()]
        if not len(free[0]) or not len(free[1]):
            return
        # The number of a gap is the number of anchors in front of it, the same on both sides.
        gaps = [np.searchsorted(self._anchors[:, side], free[side]) for side in (0, 1)]
        # A gap that is empty on one side has nothing to match.
        both = np.intersect1d(gaps[0], gaps[1])
        edges = [[np.searchsorted(gaps[side], both, where) for where in ("left", "right")] for side in (0, 1)]
        found = []
        for n in range(len(both)):
            a, b = (free[side][edges[side][0][n] : edges[side][1][n]] for side in (0, 1))
            p, q = common_subsequence(label[0][a], label[1][b])
            found.append((a[p], b[q]))
        if found:
            self._take(np.concatenate([p for p, _ in found]), np.concatenate([q for _, q in found]), by)
            # Within a gap the new pairs are in order, and so are the gaps.
            added = np.stack([np.concatenate([side[k] for side in found]) for k in (0, 1)], axis=1)
            anchors = np.concatenate([self._anchors, added])
            self._anchors = anchors[np.argsort(anchors[:, 0], kind="stable")]

    def _free(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        return self._partner == NONE, ~self._taken

    def _is_left(self) -> bool:
        return all(free.any() for free in self._free())

    def _pairs(self) -> npt.NDArray[np.int64]:
        matched = np.flatnonzero(self._partner != NONE)
        return np.stack([matched, self._partner[matched]], axis=1)

    def _take(self, ours: Calls, theirs: Calls, by: str) -> None:
        self._partner[ours] = theirs
        self._taken[theirs] = True
        self._by[by] = self._by.get(by, 0) + len(ours)


def _joined(a: list[Calls], b: list[Calls]) -> list[Calls]:
    """Numbers of pairs of labels: hashes of 64 bits, of which two are equal by chance once in 10^7 recordings."""
    with np.errstate(over="ignore"):
        return [mix(mix(p.astype(np.uint64)) + q.astype(np.uint64)).view(np.int64) for p, q in zip(a, b, strict=True)]


# -- sequences: linear where few elements are equal by chance -------------------------------------------

# Product of two lengths up to which each element is compared with each.
_MAX_PRODUCT: Final = 1 << 14


def common_subsequence(
    a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of a long common subsequence, in both.

    What both ends share first; then elements that are unique on both sides (patience diff); then, in short stretches,
    the longest equal blocks; in long ones the k-th of each kind.
    """
    pairs: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    # A stack of our own: two long recordings may part in thousands of places.
    waiting = [(0, len(a), 0, len(b))]
    while waiting:
        i, i_end, j, j_end = waiting.pop()
        # Most of two recordings is equal: this leaves short stretches for what is slower.
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
            kept = longest_increasing(q)
            pairs.append((i + p[kept], j + q[kept]))
            continue
        kept = longest_increasing(q)
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


def longest_increasing(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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
