"""A variant compiled by torch.compile against the same variant in eager mode, on one device.

The program as a whole is compiled once and judged; its graphs are compiled one by one only where it is not right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.compiled.check import compile_check
from shadowrun.compiled.outcome import CompileReport, RegionOutcome
from shadowrun.errors import UsageError
from shadowrun.studies.sweep.cases import Kind
from shadowrun.studies.zoo.graph import Runner
from shadowrun.studies.zoo.values import make_all

if TYPE_CHECKING:
    from shadowrun.studies.campaign.variant import Variant

__all__ = ["check_compiled", "compiled"]

_LIMIT_S: Final = 120.0
_FAILED: Final = {
    RegionOutcome.COMPILE_ERROR: "compile error",
    RegionOutcome.RUNTIME_ERROR: "runtime error",
}


def check_compiled(variant: Variant, backend: str, device: torch.device) -> tuple[str, str, list[tuple[str, ...]]]:
    """Compile a variant, and compare it with eager.

    Args:
        variant: The variant; its graph is compiled as one function.
        backend: Of torch.compile; ``inductor:dynamic`` with sizes as symbols.
        device: Where both run.

    Returns:
        Status (as in `runner.Result`), the reason, and findings as op, dtype, kind, cause, explanation, message.
    """
    try:
        report = compiled(variant, backend, device)
    except UsageError as error:  # it fails in eager mode
        return "invalid", str(error)[:300], []
    return _read(report, backend)


def compiled(variant: Variant, backend: str, device: torch.device, *, regions: bool = False) -> CompileReport:
    """Compile a variant as one function.

    Args:
        variant: The variant.
        backend: Of torch.compile; ``inductor:dynamic`` with sizes as symbols.
        device: Where it runs.
        regions: Whether to look for the operator at fault, which takes a compilation for each step.

    Raises:
        UsageError: It fails in eager mode.
    """
    name, _, option = backend.partition(":")
    graph = variant.graph
    _check_eager(variant, device)
    runner = Runner(graph, device, checked=False)
    inputs = _inputs(variant, device)
    if variant.execution.backward:
        for described, t in zip(graph.inputs, inputs, strict=True):
            t.requires_grad_(described.requires_grad)

    def program(*given: torch.Tensor) -> list[Any]:
        return runner(given)

    return compile_check(
        program,
        *inputs,
        backend=name,
        dynamic=True if option == "dynamic" else None,
        train=variant.execution.backward,
        ladder=False,
        regions=regions,
        time_limit_s=_LIMIT_S,
    )


def _check_eager(variant: Variant, device: torch.device) -> None:
    """Run it once without compilation, where each call is looked at: compiled code does not look.

    Raises:
        UsageError: It fails.
    """
    try:
        with torch.no_grad():
            Runner(variant.graph, device)(_inputs(variant, device))
    except Exception as error:  # whatever the graph does on its values
        raise UsageError(f"It fails in eager mode: {type(error).__name__}: {error}", slug="no-repro") from error


def _inputs(variant: Variant, device: torch.device) -> list[torch.Tensor]:
    return [t.to(device) for t in make_all(variant.graph.inputs, variant.recipe.seed)]


def _read(report: CompileReport, backend: str) -> tuple[str, str, list[tuple[str, ...]]]:
    if report.outcome in _FAILED:
        error = report.error or next((r.error for r in report.regions if r.error), "")
        kind, _, message = error.partition(":")
        what = f"{backend}: {kind.strip() or _FAILED[report.outcome]}"
        return "finding", "", [(_place(report), "", Kind.ERROR, "", what, message.strip()[:300])]
    if report.outcome is RegionOutcome.MISMATCH:
        verdicts = [r.verdict for r in report.regions if r.outcome is RegionOutcome.MISMATCH] or [report.verdict]
        v = verdicts[0]
        finding = (_place(report), "", Kind.MISMATCH, str(v.cause or ""), f"{backend}: {v.explanation}", v.evidence)
        return "finding", "", [tuple(text[:300] for text in finding)]
    if report.outcome is RegionOutcome.UNVERIFIED:
        return "unverified", f"{report.verdict.explanation}: {report.verdict.evidence}"[:300], []
    return "ok", "", []


def _place(report: CompileReport) -> str:
    """The operator at fault, where the search named one: ``aten::add.Tensor``."""
    culprits = [c for r in report.regions if r.localised is not None for c in r.localised.culprits]
    if not culprits:
        return ""
    space, _, rest = culprits[0].op.partition(".")
    return f"{space}::{rest.removesuffix('.default')}"
