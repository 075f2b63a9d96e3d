"""The order in which a kernel adds, as a tree: built from sizes of subtrees, hashed, described, and evaluated.

A sum of n summands is a tree with n leaves. Its shape is known as soon as the number of leaves below the lowest common
ancestor of enough pairs of leaves is known (Xie et al., FPRev, arXiv 2411.00442): `build_tree` asks for these numbers.
A node with more than two children is a fused addition, whose inner order cannot be seen from outside.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.floating]
    Size = Callable[[int, int], int]
    Building = Generator[tuple[list[int], dict[int, int] | None], int, int]

__all__ = ["Contradiction", "SummationTree", "build_tree"]


class Contradiction(Exception):  # noqa: N818 - a result of the experiment, not a failure of the program
    """The sizes are those of no tree."""


@dataclass(frozen=True, slots=True)
class SummationTree:
    """The order of a sum.

    Attributes:
        n_leaves: Number of summands; leaf i is summand i.
        nodes: Children of each addition; ``nodes[k]`` is the number ``n_leaves + k``. Children come before their
            parents, so that the last node is the sum.
    """

    n_leaves: int
    nodes: tuple[tuple[int, ...], ...]

    @property
    def root(self) -> int:
        """Number of the node that is the sum."""
        return self.n_leaves + len(self.nodes) - 1

    @property
    def widest(self) -> int:
        """Most summands of one addition: 2, or more where additions are fused."""
        return max(map(len, self.nodes), default=1)

    @property
    def depth(self) -> int:
        """Most additions that a summand passes on its way to the sum."""
        depths = [0] * self.n_leaves
        for children in self.nodes:
            depths.append(1 + max(depths[child] for child in children))
        return depths[-1]

    @property
    def first_leaves(self) -> list[int]:
        """Lowest summand below each node; a leaf's own number."""
        lowest = list(range(self.n_leaves))
        for children in self.nodes:
            lowest.append(min(lowest[child] for child in children))
        return lowest

    @property
    def digest(self) -> str:
        """16 hexadecimal digits; equal exactly if the order is the same. a + b and b + a are the same order."""
        digests = [str(leaf).encode() for leaf in range(self.n_leaves)]
        for children in self.nodes:
            # Sorted, because floating-point addition is commutative: only the tree decides the rounding, not left and
            # right.
            digests.append(hashlib.sha256(b",".join(sorted(digests[child] for child in children))).digest())
        return hashlib.sha256(b"tree:" + digests[-1]).hexdigest()[:16]

    def evaluate(self, summands: Floats, round_to: Callable[[Floats], Floats]) -> Floats:
        """Add in this order, rounding after each addition.

        Args:
            summands: (trials, n_leaves).
            round_to: Rounds to the accumulator's values; the result's dtype is that of the additions.

        Returns:
            (trials,).

        Raises:
            ValueError: An addition is fused: how it rounds is unknown.
        """
        if self.widest > 2:
            raise ValueError("a fused addition has no known rounding")
        values = [round_to(summands[:, leaf]) for leaf in range(self.n_leaves)]
        for left, right in self.nodes:
            values.append(round_to(values[left] + values[right]))
        return values[-1]

    def shape(self) -> str:
        """The order in words: ``sequential``, ``pairwise``, ``8 lanes of stride 8, then pairwise``."""
        if self.n_leaves == 1:
            return "one summand"
        if not self.nodes[:-1] and len(self.nodes[-1]) == self.n_leaves:
            return "one fused addition" if self.n_leaves > 2 else "one addition"
        fused = f", up to {self.widest} summands at once" if self.widest > 2 else ""
        for word, other in (("sequential", _sequential), ("pairwise", _pairwise), ("reversed", _reversed)):
            # By digest: numbers of nodes depend on the order in which a tree was built.
            if self.digest == other(list(range(self.n_leaves))).digest:
                return word
        if self.depth == self.n_leaves - 1:
            return "one after another, in another order"
        return (self._lanes() or f"irregular, depth {self.depth}") + fused

    def _lanes(self) -> str:
        """Groups of summands that are added sequentially with a fixed stride, and what adds the groups."""
        chains = self.chains()
        members = [chain for chain in chains.values() if len(chain) > 1]
        covered = sorted(leaf for chain in members for leaf in chain)
        strides = {b - a for chain in members for a, b in itertools.pairwise(chain)}
        if covered != list(range(self.n_leaves)) or len(strides) != 1 or len(members) < 2:
            return ""
        stride = strides.pop()
        kind = "blocks" if stride == 1 else "lanes"
        length = {len(chain) for chain in members}
        each = f" of {length.pop()}" if len(length) == 1 else ""
        of_stride = f", stride {stride}" if stride != 1 else ""
        return f"{len(members)} {kind}{each}{of_stride}; depth {self.depth}"

    def chains(self) -> dict[int, tuple[int, ...]]:
        """Summands that are added one after another, by the node that ends the chain, in the order of addition."""
        running: dict[int, tuple[int, ...]] = {}
        for number, children in enumerate(self.nodes, self.n_leaves):
            leaves = tuple(sorted(child for child in children if child < self.n_leaves))
            inner = [child for child in children if child >= self.n_leaves]
            if not inner:
                running[number] = leaves
            elif len(inner) == 1 and inner[0] in running and leaves:
                running[number] = running.pop(inner[0]) + leaves
        return running

    def outline(self) -> list[tuple[int, str]]:
        """The tree as lines: level and text. Parts that are added to one sum one after another are one list."""
        lowest, chains = self.first_leaves, self.chains()
        lines: list[tuple[int, str]] = []
        open_nodes = [(self.root, 0)]
        while open_nodes:
            node, level = open_nodes.pop()
            if node < self.n_leaves or node in chains:
                lines.append((level, _run(chains.get(node, (node,)))))
                continue
            parts = sorted(self.nodes[node - self.n_leaves], key=lowest.__getitem__)
            if len(parts) > 2:
                lines.append((level, f"fused addition of {len(parts)}:"))
            else:
                parts = self._spine(node, lowest, chains)
                lines.append((level, f"{len(parts)} parts, one after another:"))
            open_nodes += [(part, level + 1) for part in reversed(parts)]
        return lines

    def _spine(self, node: int, lowest: list[int], chains: dict[int, tuple[int, ...]]) -> list[int]:
        """What is added one after another to the part that has the lowest summand, that part first."""
        added: list[int] = []
        while node >= self.n_leaves and node not in chains and len(self.nodes[node - self.n_leaves]) == 2:
            node, other = sorted(self.nodes[node - self.n_leaves], key=lowest.__getitem__)
            added.append(other)
        return [node, *reversed(added)]


def build_tree(n: int, size: Size) -> SummationTree:
    """The tree whose subtrees have these sizes.

    Args:
        n: Number of summands, 1 or more.
        size: Number of leaves below the lowest common ancestor of two different leaves; called with the lower one
            first. For a sum from the first to the last it is asked n - 1 times, at most n (n - 1) / 2 times.

    Raises:
        Contradiction: No tree has these sizes.
    """
    nodes: list[tuple[int, ...]] = []
    # A chain may be as deep as the sum is long: the stack is a list, not Python's own.
    stack = [_build(list(range(n)), None, n, size, nodes)]
    answer: int | None = None
    while stack:
        try:
            part, known = stack[-1].send(answer) if answer is not None else next(stack[-1])
        except StopIteration as end:
            stack.pop()
            answer = end.value
        else:
            stack.append(_build(part, known, n, size, nodes))
            answer = None
    return SummationTree(n, tuple(nodes))


def _build(part: list[int], known: dict[int, int] | None, n: int, size: Size, nodes: list[tuple[int, ...]]) -> Building:
    """Append the nodes of a complete subtree, and return the number of its root."""
    first, *others = part
    # Asked once for each pair: a question is a call of the platform's kernel.
    sizes = known if known is not None else {other: size(first, other) for other in others}
    groups = defaultdict(list)
    for other in others:
        groups[sizes[other]].append(other)
    current, count = first, 1
    for n_leaves in sorted(groups):
        group = groups[n_leaves]
        if count + len(group) != n_leaves:
            raise Contradiction(f"{count + len(group)} summands lie below a node of {n_leaves}")
        children = [current]
        rest = group
        while rest:
            lead = rest[0]
            inner = {other: size(lead, other) for other in rest[1:]}
            if any(s > n_leaves for s in inner.values()):
                raise Contradiction(f"a part of {n_leaves} summands has more of them")
            # A pair that meets only in this node lies below two different children of it: a fused addition.
            same = [other for other in rest[1:] if inner[other] < n_leaves]
            children.append((yield [lead, *same], inner) if same else lead)
            rest = [other for other in rest[1:] if inner[other] >= n_leaves]
        nodes.append(tuple(children))
        current, count = n + len(nodes) - 1, n_leaves
    return current


def _chain(leaves: Sequence[int]) -> SummationTree:
    n = len(leaves)
    nodes, current = [], leaves[0]
    for k, leaf in enumerate(leaves[1:]):
        nodes.append((current, leaf))
        current = n + k
    return SummationTree(n, tuple(nodes))


def _sequential(leaves: list[int]) -> SummationTree:
    return _chain(leaves)


def _reversed(leaves: list[int]) -> SummationTree:
    return _chain(leaves[::-1])


def _pairwise(leaves: list[int]) -> SummationTree:
    """Neighbours, then neighbours of these sums; an odd one out moves up."""
    n, nodes, level = len(leaves), [], list(leaves)
    while len(level) > 1:
        above = []
        for pair in (level[i : i + 2] for i in range(0, len(level), 2)):
            if len(pair) == 2:
                nodes.append((pair[0], pair[1]))
                above.append(n + len(nodes) - 1)
            else:
                above += pair
        level = above
    return SummationTree(n, tuple(nodes))


def _run(leaves: tuple[int, ...]) -> str:
    """``0 + 8 + … + 56`` of summands that are added one after another."""
    strides = {b - a for a, b in itertools.pairwise(leaves)}
    if len(leaves) > 3 and len(strides) == 1:
        return f"{leaves[0]} + {leaves[1]} + … + {leaves[-1]}"
    return " + ".join(map(str, leaves))
