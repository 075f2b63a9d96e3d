"""The table of dtypes: which the database lists for the CPU, and the outcome of float32's samples there."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from shadowrun.report.formats.markdown import pipe_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["dtype_table"]

_MAX_NAMES = 12


def dtype_table(path: Path, n_samples: int) -> str:
    """Tables and names from what `tests.ground_truth.dtype_support` wrote."""
    by_dtype: dict[str, list[dict[str, Any]]] = defaultdict(list)
    begun, ended = set(), set()
    for line in path.read_text(encoding="utf-8").splitlines():
        read = json.loads(line)
        begun.add(read["operator"])
        if "dtype" in read:
            ended.add(read["operator"])
            if read["samples"]:
                by_dtype[read["dtype"]].append(read)
    rows, notes = [], []
    for dtype, lines in by_dtype.items():
        refused = [r for r in lines if r["refused"]]
        none = [r for r in refused if r["refused"] == r["samples"]]
        deviating = [r for r in lines if r["deviating"]]
        counts = [len(lines) - len(refused), len(refused) - len(none), len(none)]
        claimed = sum(r["claimed"] for r in lines)
        shares = " / ".join(f"{100 * n / len(lines):.1f}" for n in counts)
        rows.append([dtype, str(len(lines)), str(claimed), *map(str, counts), shares, str(len(deviating))])
        notes += _notes(dtype, lines, deviating)
    head = ["dtype", "operators", "have it by the database", "full", "partial", "none", "%", "deviate"]
    intro = (
        f"**The CPU itself, by dtype**: up to {n_samples} float32 samples of each operator, forward, with their floats "
        "cast. *Deviate*: operators inside which a 16-bit result is one that no correct implementation could have "
        "returned, judged against the same in float32, rounded once."
    )
    crashed = sorted(begun - ended)
    notes += [f"- ended the process: {_names(crashed)}"] if crashed else []
    return "\n\n".join([intro, "\n".join(pipe_table([head, *rows])), "\n".join(notes)])


def _notes(dtype: str, lines: Sequence[dict[str, Any]], deviating: Sequence[dict[str, Any]]) -> list[str]:
    missing = [r["operator"] for r in lines if r["claimed"] and r["refused"] == r["samples"]]
    more = [r["operator"] for r in lines if not r["claimed"] and not r["refused"]]
    found = []
    if missing:
        found.append(f"- {dtype}: the database has it, and all samples are refused: {_names(missing)}")
    if more:
        found.append(f"- {dtype}: the database does not have it, and all samples run: {_names(more)}")
    if deviating:
        inside = sorted({op for r in deviating for op in r["deviating"]})
        names = [r["operator"] for r in deviating]
        found.append(f"- {dtype}: deviates in {_names(inside)}, called by {_names(names)}")
    return found


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_MAX_NAMES])
    return shown + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
