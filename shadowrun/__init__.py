"""Run every PyTorch operator on a second device and see what differs.

with shadowrun.compare("npu", ref="cpu") as run:
    train_step(batch)
run.write("report.html")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shadowrun.comparison import Comparison, compare, current
    from shadowrun.comparison.nan_track import nan_track
    from shadowrun.comparison.record import record
    from shadowrun.compiled.check import compile_check
    from shadowrun.config import Config
    from shadowrun.errors import (
        DataFileError,
        FindingsError,
        NestingError,
        NonFiniteError,
        PlatformError,
        ShadowrunError,
        ShadowrunWarning,
        UsageError,
    )
    from shadowrun.recording.nonfinite import NonFinite
    from shadowrun.run import Run, combine, load
    from shadowrun.types import Cause, OpCall, OpRecord, Phase, RunInfo, Status, TensorDiff, Verdict

__version__ = "0.1.0"

__all__ = [
    "Cause",
    "Comparison",
    "Config",
    "DataFileError",
    "FindingsError",
    "NestingError",
    "NonFinite",
    "NonFiniteError",
    "OpCall",
    "OpRecord",
    "Phase",
    "PlatformError",
    "Run",
    "RunInfo",
    "ShadowrunError",
    "ShadowrunWarning",
    "Status",
    "TensorDiff",
    "UsageError",
    "Verdict",
    "combine",
    "compare",
    "compile_check",
    "current",
    "load",
    "nan_track",
    "record",
]

_LAZY = {
    "Comparison": "shadowrun.comparison",
    "compare": "shadowrun.comparison",
    "compile_check": "shadowrun.compiled.check",
    "current": "shadowrun.comparison",
    "nan_track": "shadowrun.comparison.nan_track",
    "NonFinite": "shadowrun.recording.nonfinite",
    "record": "shadowrun.comparison.record",
    "Run": "shadowrun.run",
    "combine": "shadowrun.run",
    "load": "shadowrun.run",
    "Config": "shadowrun.config",
    **dict.fromkeys(
        (
            "DataFileError",
            "FindingsError",
            "NestingError",
            "NonFiniteError",
            "PlatformError",
            "ShadowrunError",
            "ShadowrunWarning",
            "UsageError",
        ),
        "shadowrun.errors",
    ),
    **dict.fromkeys(
        ("Cause", "OpCall", "OpRecord", "Phase", "RunInfo", "Status", "TensorDiff", "Verdict"), "shadowrun.types"
    ),
}


def __getattr__(name: str) -> Any:
    """Import at the first access: `--help` must not wait for torch, nor pytest for a plug-in that no test uses."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'shadowrun' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
