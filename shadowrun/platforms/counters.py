"""Counters that a backend itself keeps of the operators that it sent to the CPU: XLA's and lazy's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shadowrun.platforms import torchplatform

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["counter_reader", "risen"]

_PREFIX = "aten::"


def counter_reader(device_type: str) -> Callable[[], dict[str, int]] | None:
    """A function that reads a backend's fallback counters by operator; None where it keeps none."""
    if device_type == "lazy":
        return _lazy
    if device_type == "xla":
        return _xla
    return None


def risen(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Operators whose counters rose."""
    return [name for name, n in after.items() if n > before.get(name, 0)]


def _lazy() -> dict[str, int]:
    return {name: n for name, n in torchplatform.lazy_counters().items() if name.startswith(_PREFIX)}


def _xla() -> dict[str, int]:
    # XLA overrides `aten::_to_cpu` itself, so its counters are the only witness. Only asked where it is loaded.
    metrics = sys.modules.get("torch_xla.debug.metrics")
    if metrics is None:
        return {}
    return {name: int(metrics.counter_value(name)) for name in metrics.counter_names() if name.startswith(_PREFIX)}
