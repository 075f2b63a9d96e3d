"""Elements that the definition of an operator leaves open: ties, duplicate writes, conversions out of range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.operators.facts import OpenElements

if TYPE_CHECKING:
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.operators.case import Case

__all__ = ["undefined"]

Mask = npt.NDArray[np.bool_]


def undefined(case: Case, result_diff: ResultDiff) -> tuple[str, Mask] | None:
    """Find what leaves differing elements of a result open.

    Returns:
        The reason and a mask over `result_diff.where`, or None if the operator is of no such kind.
    """
    row, named = case.facts, case.arguments()
    kind = row.open_elements
    if kind is OpenElements.INDEX_TIE and result_diff.fmt is None:
        # A stable sort defines the order of equal values.
        if named.get("stable"):
            return None
        return "tie", _tied(named, result_diff)
    if kind is OpenElements.FREQUENCY_TIE:
        return "tie", _as_frequent(named, result_diff)
    if kind is OpenElements.WINDOW_TIE and result_diff.fmt is None:
        return "tie", _tied_in_plane(named["self"], result_diff, case)
    if kind is OpenElements.DUPLICATE_INDICES and not (named.get("accumulate") or named.get("reduce")):
        return "duplicate indices", _written_twice(row.name, named, result_diff)
    if kind is OpenElements.CONVERSION and result_diff.fmt is None:
        source = named["src"] if row.name == "copy" else named["self"]
        if source.is_floating_point():
            return "conversion out of range", _out_of_range(source, result_diff)
    return None


def _tied(named: dict[str, Any], result_diff: ResultDiff) -> Mask:
    """Whether both indices lead to equal values (or both to NaN)."""
    values = named["self"].detach()
    dim = named.get("dim", -1)
    position = torch.from_numpy(result_diff.where)
    actual, expected = result_diff.actual[position].long(), result_diff.expected[position].long()
    if dim is None or values.dim() == 0:
        values, outer, inner = values.reshape(-1), position * 0, 1
    else:
        # The results have the shape of the input, with another size (1 or k) along dim.
        dim %= values.dim()
        inner = int(np.prod(values.shape[dim + 1 :]))
        length = result_diff.actual.numel() * values.shape[dim] // max(values.numel(), 1)
        outer = position // max(inner * length, 1)
        size = values.shape[dim]
        values = values.reshape(-1)
        base = outer * size * inner + position % inner
        # An index out of range is wrong, and must not be read.
        inside = (actual >= 0) & (actual < size)
        at_actual = values[base + actual.clamp(0, size - 1) * inner]
        at_expected = values[base + expected.clamp(0, size - 1) * inner]
        return _mask(inside & _same(at_actual, at_expected))
    inside = (actual >= 0) & (actual < values.numel())
    at_actual, at_expected = values[actual.clamp(0, values.numel() - 1)], values[expected]
    return _mask(inside & _same(at_actual, at_expected))


def _as_frequent(named: dict[str, Any], result_diff: ResultDiff) -> Mask:
    """Whether both values, or the values at both indices, are equally frequent."""
    values = named["self"].detach()
    rows = values.reshape(1, -1) if values.dim() == 0 else values.movedim(named.get("dim", -1), -1)
    rows = rows.reshape(-1, rows.shape[-1])[torch.from_numpy(result_diff.where)]
    sides = [
        side.reshape(-1)[torch.from_numpy(result_diff.where)] for side in (result_diff.actual, result_diff.expected)
    ]
    if result_diff.position == 1:
        inside = (sides[0] >= 0) & (sides[0] < rows.shape[1])
        sides = [rows.gather(1, side.clamp(0, rows.shape[1] - 1)[:, None])[:, 0] for side in sides]
    else:
        inside = torch.ones(len(rows), dtype=torch.bool)
    at_actual, at_expected = (_same(rows, side[:, None]).sum(1) for side in sides)
    return _mask(inside & (at_actual == at_expected))


def _tied_in_plane(values: torch.Tensor, result_diff: ResultDiff, case: Case) -> Mask:
    # Indices of pooling count within one plane, not within the tensor.
    spatial = 3 if "3d" in case.op else 2
    planes = values.detach().reshape(-1, int(np.prod(values.shape[-spatial:])))
    position = torch.from_numpy(result_diff.where)
    plane = position // (result_diff.actual.numel() // planes.shape[0])
    actual, expected = result_diff.actual[position], result_diff.expected[position]
    inside = (actual >= 0) & (actual < planes.shape[1])
    at_actual = planes[plane, actual.clamp(0, planes.shape[1] - 1)]
    return _mask(inside & _same(at_actual, planes[plane, expected]))


def _mask(found: torch.Tensor) -> Mask:
    mask: Mask = found.numpy()
    return mask


def _same(at_actual: torch.Tensor, at_expected: torch.Tensor) -> torch.Tensor:
    same = at_actual == at_expected
    return same | ((at_actual != at_actual) & (at_expected != at_expected))  # noqa: PLR0124 (NaN, for integers too)


def _written_twice(op: str, named: dict[str, Any], result_diff: ResultDiff) -> Mask:
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
    position = torch.from_numpy(result_diff.where) // max(result_diff.actual.numel() // max(writes.numel(), 1), 1)
    return _mask(writes.reshape(-1)[position] > 1)


def _out_of_range(source: torch.Tensor, result_diff: ResultDiff) -> Mask:
    if result_diff.actual.dtype is torch.bool:
        return np.zeros(result_diff.where.size, bool)
    info = torch.iinfo(result_diff.actual.dtype)
    taken = source.detach().expand(source.shape).reshape(-1).to(torch.float64)
    if taken.numel() != result_diff.actual.numel():
        return np.zeros(result_diff.where.size, bool)
    # The conversion truncates, so numbers less than 1 beyond the range still have a defined result.
    taken = taken[torch.from_numpy(result_diff.where)]
    return _mask(~((taken > info.min - 1.0) & (taken < info.max + 1.0)))
