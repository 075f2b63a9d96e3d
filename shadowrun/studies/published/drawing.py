"""Drawings of the studies, as figures of a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.document import Figure, Label, Stroke

if TYPE_CHECKING:
    from shadowrun.studies.published.summation_tree import SummationTree

__all__ = ["tree_figure"]

_LEAF_PX = 15.0
_MARGIN_PX = 12.0
_LEVEL_PX = 18.0
_TALLEST_PX = 480.0


def tree_figure(title: str, tree: SummationTree, max_leaves: int) -> Figure:
    """A summation tree: summands at the bottom, the sum at the top.

    Args:
        title: What it is.
        tree: The tree.
        max_leaves: A larger one has an outline only.
    """
    outline = tuple(tree.outline())
    if tree.n_leaves > max_leaves:
        return Figure(title, 0.0, 0.0, (), (), outline)
    heights = [0] * tree.n_leaves
    for children in tree.nodes:
        heights.append(1 + max(heights[child] for child in children))
    level = min(_LEVEL_PX, _TALLEST_PX / max(1, heights[-1]))
    bottom = _MARGIN_PX + level * heights[-1]
    x = dict(zip(_leaves_in_order(tree), _positions(tree.n_leaves), strict=True))
    y = [round(bottom - level * height, 1) for height in heights]
    strokes = []
    for number, children in enumerate(tree.nodes, tree.n_leaves):
        ends = sorted(x[child] for child in children)
        x[number] = round((ends[0] + ends[-1]) / 2, 1)
        # A fused addition is marked: it has more than two children.
        tone = "warn" if len(children) > 2 else ""
        strokes += [Stroke((x[c], y[c], x[c], y[number]), tone) for c in children]
        strokes.append(Stroke((ends[0], y[number], ends[-1], y[number]), tone))
    strokes.append(Stroke((x[tree.root], y[tree.root], x[tree.root], y[tree.root] - _MARGIN_PX / 2)))
    labels = tuple(Label(x[leaf], round(bottom + 12, 1), str(leaf), "middle") for leaf in range(tree.n_leaves))
    width = round(2 * _MARGIN_PX + _LEAF_PX * tree.n_leaves, 1)
    return Figure(title, width, round(bottom + 20, 1), tuple(strokes), labels, outline)


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
            open_nodes += sorted(tree.nodes[node - tree.n_leaves], key=lowest.__getitem__, reverse=True)
    return leaves
