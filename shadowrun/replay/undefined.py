"""Elements that the definition of an operator leaves open: ties, duplicate writes, conversions out of range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.numerics.tolerance import base_name
from shadowrun.replay.finding import op_name

if TYPE_CHECKING:
    from shadowrun.replay.case import Case
    from shadowrun.replay.finding import Finding

__all__ = ["undefined"]

Mask = npt.NDArray[np.bool_]

_ORDERED: Final = frozenset(
    "argmax argmin max min sort argsort topk kthvalue median nanmedian cummax cummin".split()  # noqa: SIM905
)
_POOLED: Final = frozenset(
    (
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "fractional_max_pool2d",
    )
)
_WRITES: Final = frozenset(("scatter", "index_put", "_index_put_impl", "_unsafe_index_put", "index_copy", "put"))


def undefined(case: Case, finding: Finding) -> tuple[str, Mask] | None:
    """Find what leaves differing elements of a result open.

    Returns:
        The reason and a mask over `finding.where`, or None if the operator is of no such kind.
    """
    op = base_name(op_name(case))
    named = arguments(case)
    if op in _ORDERED and finding.fmt is None:
        if named.get("stable"):
            return None
        return "tie", _tied(named, finding)
    if op == "mode":
        return "tie", _as_frequent(named, finding)
    if op in _POOLED and finding.fmt is None:
        return "tie", _tied_in_plane(named["self"], finding, case)
    if op in _WRITES and not (named.get("accumulate") or named.get("reduce")):
        return "duplicate indices", _written_twice(op, named, finding)
    if op in {"_to_copy", "copy"} and finding.fmt is None:
        source = named["src"] if op == "copy" else named["self"]
        if source.is_floating_point():
            return "conversion out of range", _out_of_range(source, finding)
    return None


def arguments(case: Case) -> dict[str, Any]:
    """Arguments by their names in the schema, defaults included."""
    named: dict[str, Any] = {}
    for i, argument in enumerate(case.func._schema.arguments):
        if i < len(case.args):
            named[argument.name] = case.args[i]
        elif argument.name in case.kwargs:
            named[argument.name] = case.kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    return named


def _tied(named: dict[str, Any], finding: Finding) -> Mask:
    """Whether both indices lead to equal values (or both to NaN)."""
    values = named["self"].detach()
    dim = named.get("dim", -1)
    position = torch.from_numpy(finding.where)
    actual, expected = finding.actual[position].long(), finding.expected[position].long()
    if dim is None or values.dim() == 0:
        values, outer, inner = values.reshape(-1), position * 0, 1
    else:
        # The results have the shape of the input, with another size (1 or k) along dim.
        dim %= values.dim()
        inner = int(np.prod(values.shape[dim + 1 :]))
        length = finding.actual.numel() * values.shape[dim] // max(values.numel(), 1)
        outer = position // max(inner * length, 1)
        size = values.shape[dim]
        values = values.reshape(-1)
        base = outer * size * inner + position % inner
        inside = (actual >= 0) & (actual < size)
        left = values[base + actual.clamp(0, size - 1) * inner]
        right = values[base + expected.clamp(0, size - 1) * inner]
        return _mask(inside & _same(left, right))
    inside = (actual >= 0) & (actual < values.numel())
    left, right = values[actual.clamp(0, values.numel() - 1)], values[expected]
    return _mask(inside & _same(left, right))


def _as_frequent(named: dict[str, Any], finding: Finding) -> Mask:
    """Whether both values, or the values at both indices, are equally frequent."""
    values = named["self"].detach()
    rows = values.reshape(1, -1) if values.dim() == 0 else values.movedim(named.get("dim", -1), -1)
    rows = rows.reshape(-1, rows.shape[-1])[torch.from_numpy(finding.where)]
    sides = [side.reshape(-1)[torch.from_numpy(finding.where)] for side in (finding.actual, finding.expected)]
    if finding.position == 1:
        inside = (sides[0] >= 0) & (sides[0] < rows.shape[1])
        sides = [rows.gather(1, side.clamp(0, rows.shape[1] - 1)[:, None])[:, 0] for side in sides]
    else:
        inside = torch.ones(len(rows), dtype=torch.bool)
    left, right = (_same(rows, side[:, None]).sum(1) for side in sides)
    return _mask(inside & (left == right))


def _tied_in_plane(values: torch.Tensor, finding: Finding, case: Case) -> Mask:
    spatial = 3 if "3d" in op_name(case) else 2
    planes = values.detach().reshape(-1, int(np.prod(values.shape[-spatial:])))
    position = torch.from_numpy(finding.where)
    plane = position // (finding.actual.numel() // planes.shape[0])
    actual, expected = finding.actual[position], finding.expected[position]
    inside = (actual >= 0) & (actual < planes.shape[1])
    left = planes[plane, actual.clamp(0, planes.shape[1] - 1)]
    return _mask(inside & _same(left, planes[plane, expected]))


def _mask(found: torch.Tensor) -> Mask:
    mask: Mask = found.numpy()
    return mask


def _same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    same = left == right
    return same | ((left != left) & (right != right))  # noqa: PLR0124 (NaN, for integers too)


def _written_twice(op: str, named: dict[str, Any], finding: Finding) -> Mask:
    writes = torch.zeros(named["self"].shape, dtype=torch.int64)
    if op == "scatter":
        writes.scatter_add_(named["dim"], named["index"], torch.ones_like(named["index"]))
    elif op == "index_copy":
        shape = list(writes.shape)
        shape[named["dim"]] = named["index"].numel()
        writes.index_add_(named["dim"], named["index"], torch.ones(shape, dtype=torch.int64))
    elif op == "put":
        writes.put_(named["index"], torch.ones_like(named["index"]), accumulate=True)
    else:
        writes = torch.ops.aten.index_put.default(writes, named["indices"], torch.tensor(1), True)
    # Complex results are looked at by components.
    position = torch.from_numpy(finding.where) // max(finding.actual.numel() // max(writes.numel(), 1), 1)
    return _mask(writes.reshape(-1)[position] > 1)


def _out_of_range(source: torch.Tensor, finding: Finding) -> Mask:
    if finding.actual.dtype is torch.bool:
        return np.zeros(finding.where.size, bool)
    info = torch.iinfo(finding.actual.dtype)
    taken = source.detach().expand(source.shape).reshape(-1).to(torch.float64)
    if taken.numel() != finding.actual.numel():
        return np.zeros(finding.where.size, bool)
    taken = taken[torch.from_numpy(finding.where)]
    return _mask(~((taken > info.min - 1.0) & (taken < info.max + 1.0)))
