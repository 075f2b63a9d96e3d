"""Drawings of the studies, as figures of a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.document import Column, Figure, Limits, Section, Table

if TYPE_CHECKING:
    from shadowrun.report.document import Block
    from shadowrun.studies.published.summation_tree import SummationTree

__all__ = ["tree_section"]

_LEAF_PX = 15.0
_MARGIN_PX = 12.0
_LEVEL_PX = 18.0
_TALLEST_PX = 480.0
_PLAIN, _FUSED = "var(--accent, #0b6bcb)", "var(--red, #b3261e)"


def tree_section(title: str, tree: SummationTree, max_leaves: int) -> Section:
    """A summation tree as an outline, and drawn: summands at the bottom, the sum at the top.

    Args:
        title: What it is.
        tree: The tree.
        max_leaves: A larger one has an outline only.
    """
    rows = tuple(("· " * level + line,) for level, line in tree.outline())
    outline = Table((Column("sum"),), rows, noun="lines", limits=Limits(40, 100, 500))
    blocks: tuple[Block, ...] = (outline,)
    if tree.n_leaves <= max_leaves:
        fused = " Red: fused additions." if tree.widest > 2 else ""
        blocks = (Figure(_svg(tree), f"Summands below, their sum above.{fused}"), outline)
    return Section(title, blocks)


def _svg(tree: SummationTree) -> str:
    heights = [0] * tree.n_leaves
    for children in tree.nodes:
        heights.append(1 + max(heights[child] for child in children))
    level = min(_LEVEL_PX, _TALLEST_PX / max(1, heights[-1]))
    bottom = _MARGIN_PX + level * heights[-1]
    x = dict(zip(_leaves_in_order(tree), _positions(tree.n_leaves), strict=True))
    y = [round(bottom - level * height, 1) for height in heights]
    parts = []
    for number, children in enumerate(tree.nodes, tree.n_leaves):
        ends = sorted(x[child] for child in children)
        x[number] = round((ends[0] + ends[-1]) / 2, 1)
        path = f"M{ends[0]},{y[number]} H{ends[-1]}" + "".join(f" M{x[c]},{y[c]} V{y[number]}" for c in children)
        colour = _FUSED if len(children) > 2 else _PLAIN
        parts.append(f'<path d="{path}" style="fill: none; stroke: {colour}"/>')
    parts += [
        f'<text x="{x[leaf]}" y="{bottom + 12:.1f}" text-anchor="middle" font-size="10" '
        f'style="fill: var(--ink, #1d2126)">{leaf}</text>'
        for leaf in range(tree.n_leaves)
    ]
    width, height = 2 * _MARGIN_PX + _LEAF_PX * tree.n_leaves, bottom + 20
    return (
        f'<svg role="img" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><title>Summation tree</title>{"".join(parts)}</svg>'
    )


def _positions(n: int) -> list[float]:
    return [round(_MARGIN_PX + _LEAF_PX * (i + 0.5), 1) for i in range(n)]


def _leaves_in_order(tree: SummationTree) -> list[int]:
    """Leaves from left to right, so that no two lines cross."""
    lowest = tree.first_leaves
    leaves, open_nodes = [], [tree.root]
    while open_nodes:
        node = open_nodes.pop()
        if node < tree.n_leaves:
            leaves.append(node)
        else:
            # A stack, not recursion: a sequential sum of 4096 is 4095 levels deep, beyond Python's limit.
            open_nodes += sorted(tree.nodes[node - tree.n_leaves], key=lowest.__getitem__, reverse=True)
    return leaves
