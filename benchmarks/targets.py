"""The targets for shadowrun's cost, compared with the measured figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

__all__ = ["limit_of", "met_targets"]

_STEPS = {
    ("isolated", "tiny MLP*"): 4.5,
    ("isolated", "transformer*"): 2.5,
    ("isolated", "CNN*"): 2.2,
    ("record only", "transformer*"): 1.15,
    ("record only", "CNN*"): 1.15,
    ("record digests", "tiny MLP*"): 4.5,
    ("record digests", "transformer*"): 1.6,
    ("record digests", "CNN*"): 1.6,
}
"""Ratio of processor time to the plain step."""

_OPERATORS = {("record only", "add, 1 element"): 12.0, ("isolated", "add, 1 element"): 25.0}
"""Microseconds of processor time that a call takes longer."""

_RATES = {"memcmp": 0.9, "memcpy": 1 / 6}
_GB_S = {"pack": 2.0}
"""Of a function whose target is not a part of another's rate."""

_STARTUP = {"shadowrun --help": 150.0, "import shadowrun": 100.0}
"""Milliseconds on the wall."""


@dataclass(frozen=True)
class _Target:
    what: str
    measured: float
    limit: float
    unit: str
    at_least: bool = False

    def row(self) -> dict[str, Any]:
        met = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return asdict(self) | {"met": met}


def limit_of(tool: str, workload: str, *, single: bool) -> float | None:
    """The greatest figure that is meant, None where there is none."""
    limits = _OPERATORS if single else _STEPS
    return next((v for (t, pattern), v in limits.items() if t == tool and fnmatchcase(workload, pattern)), None)


def met_targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target for which something was measured, and whether it was met."""
    targets = []
    for workload in found["workloads"]:
        key, unit = ("added_cpu_us", "µs added") if workload["single"] else ("cpu", "x plain")
        for tool, figures in workload["tools"].items():
            limit = limit_of(tool, workload["name"], single=workload["single"])
            if limit is not None and key in figures:
                targets.append(_Target(f"{tool}: {workload['name']}", figures[key], limit, unit))
    for row in found.get("rates", ()):
        what, limit = f"{row['name']}: {row['size']}", _GB_S.get(row["function"])
        if limit is not None:
            targets.append(_Target(what, row["gb_s"], limit, "GB/s", at_least=True))
        else:
            part, unit = _RATES[row["against"]], f"of {row['against']}'s rate"
            targets.append(_Target(what, row["rate"], part, unit, at_least=True))
    targets += [
        _Target(row["name"], row["wall_ms"], _STARTUP[row["name"]], "ms")
        for row in found.get("startup", ())
        if row["name"] in _STARTUP
    ]
    return [target.row() for target in targets]
